"""The cluster of a benchmark: made by a kit of programs, or given by variables.

    FINETUNE_BENCH_KUBECONFIG   a cluster-admin's kubeconfig
    FINETUNE_BENCH_AUDIT_LOG    its API server's audit log (policy: tests/support/cluster/audit.py)
    FINETUNE_BENCH_PROCESSES    its processes on this machine: etcd=12,kube-apiserver=13,...

A kit is a folder with `up` and `down`, which make a control plane on this machine and take it away.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cluster.audit import POLICY

_TICKS = os.sysconf("SC_CLK_TCK")
# As shipped 50 requests a second: 600 pods would take it 10 s, whatever anybody else does.
_SCHEDULER = ("--kube-api-qps=500", "--kube-api-burst=1000")


@dataclass(frozen=True)
class BenchCluster:
    """Where it is and what it consists of.

    Attributes:
        processes: Process ids by name.
    """

    kubeconfig: Path
    audit_log: Path
    processes: dict[str, int]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of each process so far."""
        return {name: cpu_seconds(pid) for name, pid in self.processes.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time a process has used, system calls included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_mib(pid: int) -> float:
    """Return the most memory a process has had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) / 1024


@contextmanager
def bench_cluster(kit: Path | None, nodes: int) -> Iterator[BenchCluster]:
    """Yield the cluster that the variables name, else one of the kit's; end what was started."""
    if "FINETUNE_BENCH_KUBECONFIG" in os.environ:
        yield _given()
    elif kit is not None and (kit / "up").exists():
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield from _made(kit, nodes, Path(folder))
    else:
        sys.exit(
            "bench-operator needs a cluster: a control plane on this machine, as FINETUNE_BENCH_"
            "KUBECONFIG, FINETUNE_BENCH_AUDIT_LOG and FINETUNE_BENCH_PROCESSES name it (see "
            "tests/benchmarks/bench_cluster.py), or KUBE_KIT=FOLDER with programs that make one"
        )


def _given() -> BenchCluster:
    pairs = os.environ["FINETUNE_BENCH_PROCESSES"].split(",")
    return BenchCluster(
        Path(os.environ["FINETUNE_BENCH_KUBECONFIG"]),
        Path(os.environ["FINETUNE_BENCH_AUDIT_LOG"]),
        {name: int(pid) for name, _, pid in (pair.partition("=") for pair in pairs)},
    )


def _made(kit: Path, nodes: int, folder: Path) -> Iterator[BenchCluster]:
    name = f"bench-{os.getpid()}"
    audit_log = folder / "audit.log"
    (folder / "policy.yaml").write_text(POLICY)
    logs = (
        f"--audit-policy-file={folder / 'policy.yaml'}",
        f"--audit-log-path={audit_log}",
        "--audit-log-maxsize=4096",
    )
    command = [str(kit / "up"), "--control-plane-only", "--name", name, "--nodes", f"kwok:{nodes}"]
    command += [f"--scheduler-arg={one}" for one in _SCHEDULER]
    command += [f"--apiserver-arg={one}" for one in logs]
    try:
        said = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        kubeconfig = Path(said.strip().removeprefix("export KUBECONFIG="))
        started = json.loads((kubeconfig.parent / "processes.json").read_text())
        processes = {name: numbers[0] for name, numbers in started.items()}
        yield BenchCluster(kubeconfig, audit_log, processes)
    finally:
        subprocess.run([kit / "down", "--name", name], check=True, stdout=subprocess.DEVNULL)
