"""What the operator adds on this machine between apply and the first optimizer step.

    python tests/benchmarks/dev_share.py [--pairs 10] [--out docs/benchmarks]

The warm quickstart for one step, without evaluation and answers: in turn applied to a running
`ftctl dev`, and started as the bare process of the same request. `make bench-dev` runs it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from measured import FOLDER, ROOT, Limit, commit, figures_table, machine, spread

from finetune_operator.api.validation import load_job
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.local import proc
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.backends.local.layout import AttemptFolder
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from finetune_operator.planner.plan import make_plan
from operators import Api, wait_until

PATIENCE_SECONDS = 600
LIMITS = {"own_share_seconds": Limit(1, "median")}
_MEANING = {
    "apply_to_process_seconds": "apply of the job to the start of its main process",
    "apply_to_first_step_seconds": "apply of the job to the end of its first optimizer step",
    "bare_to_first_step_seconds": "start of the bare process to the end of its first step",
    "own_share_seconds": "the difference of the last two, pair by pair",
    "operator_cpu_seconds": "CPU time of `ftctl dev` from the apply to the end of the job, whose "
    "phase is asked for each second",
}


def main() -> None:
    """Measure, then write dev.json and dev.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".quickstart").symlink_to(ROOT / "examples" / ".quickstart")
        seconds_bare(folder, write(folder, "warm-up"))
        dev = subprocess.Popen(
            [sys.executable, "-m", "finetune_operator", "dev", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert dev.stdout is not None
        dev.stdout.readline()
        api = Api(f"{name}/runs/.dev/kubeconfig")
        try:
            measured = measure(api, folder, options.pairs, dev.pid)
        finally:
            api.close()
            dev.send_signal(signal.SIGTERM)
            dev.communicate()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dev.json").write_text(json.dumps(measured, indent=2) + "\n")
    (options.out / "dev.md").write_text(page(measured))
    print(page(measured))


def measure(api: Api, folder: Path, pairs: int, operator: int) -> dict[str, Any]:
    """Return the figures of so many pairs; which of the two comes first changes."""
    runs: list[dict[str, float]] = []
    for number in range(pairs):
        first, second = (write(folder, f"{kind}-{number}") for kind in ("api", "bare"))
        turns: list[Callable[[], dict[str, float]]] = [
            partial(seconds_applied, api, folder, first, operator),
            partial(seconds_bare, folder, second),
        ]
        run: dict[str, float] = {}
        for turn in turns if number % 2 else reversed(turns):
            run |= turn()
        print(f"pair {number}: {json.dumps(run)}", flush=True)
        runs.append(run)
    return {
        "apply_to_process_seconds": spread([one["process"] for one in runs]),
        "apply_to_first_step_seconds": spread([one["applied"] for one in runs]),
        "bare_to_first_step_seconds": spread([one["bare"] for one in runs]),
        "own_share_seconds": spread([one["applied"] - one["bare"] for one in runs]),
        "operator_cpu_seconds": spread([one["operator_cpu"] for one in runs]),
        "runs": runs,
        "machine": machine(),
        "commit": commit(),
    }


def page(measured: dict[str, Any]) -> str:
    """Return the report for people, as Markdown."""
    where = measured["machine"]
    lines = [
        "# The operator's own share on this machine",
        "",
        "Written by `make bench-dev`. The warm quickstart for one optimizer step, without "
        "evaluation and answers: in turn applied to a running `ftctl dev`, and started as the bare "
        f"process of the same request; {len(measured['runs'])} pairs.",
        "",
        f"Machine: {where['cpu']}, {where['cores']} cores; Python {where['python']}; commit "
        f"{measured['commit'][:12]}.",
        "",
        *figures_table(measured, _MEANING, LIMITS),
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str) -> Path:
    """Write a manifest of one step of the quickstart."""
    made = yaml.safe_load((ROOT / "examples" / "00-quickstart.yaml").read_text())
    made["metadata"]["name"] = name
    spec = made["spec"]
    del spec["dataset"]["evalSource"], spec["training"]["epochs"], spec["observability"]
    spec["training"] |= {"maxSteps": 1, "learningRate": 3e-3, "warmup": 0}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(made))
    return file


def seconds_applied(api: Api, folder: Path, file: Path, operator: int) -> dict[str, float]:
    """Apply a job; return seconds to its main process and to its first step, and the CPU's."""
    made = yaml.safe_load(file.read_text())
    name, attempt = file.stem, folder / "runs" / "default" / file.stem / "attempts" / "1"
    began, used = time.time(), cpu_seconds(operator)
    api.run(api.client.create(FINE_TUNE_JOBS, made, "default"))
    record = AttemptFolder(attempt).node(0)
    wait_until(record.exists, PATIENCE_SECONDS)
    started = born(json.loads(record.read_text())["pid"])
    while api.phase("default", name) not in ("Succeeded", "Failed"):
        time.sleep(1)  # as every question costs the CPU time that is measured
    return {
        "process": started - began,
        "applied": first_step(folder, name) - began,
        "operator_cpu": cpu_seconds(operator) - used,
    }


def seconds_bare(folder: Path, file: Path) -> dict[str, float]:
    """Run a job's one process as the backend would; return seconds to its first step."""
    job, where = load_job(file)
    backend = LocalBackend(BackendContext(where.directory, dict(os.environ)))
    request = backend.render(make_plan(job), Attempt(1))
    _, config, node = request.objects
    path = Path(config["path"])
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config["content"]))
    began = time.time()
    subprocess.run(
        node["command"], env={**os.environ, **node["environment"]}, check=True, capture_output=True
    )
    return {"bare": first_step(folder, file.stem) - began}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def born(pid: int) -> float:
    """Return when a process began, in seconds since the epoch."""
    process = proc.look_up(pid)
    assert process is not None, "the main process is still there"
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + process.start_time / os.sysconf("SC_CLK_TCK")


def first_step(folder: Path, name: str) -> float:
    """Return when rank 0 had made its first step, in seconds since the epoch."""
    log = folder / "runs" / "default" / name / "logs" / "rank-0.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return float(next(one["time"] for one in events if one["event"] == "first_step"))


if __name__ == "__main__":
    main()
