"""What the operator adds on this machine between apply and the first optimizer step.

    python tests/benchmarks/dev_share.py [PAIRS]

The warm quickstart for one step, without evaluation and answers: in turn applied to a running
`ftctl dev`, and started as the bare process of the same request. Prints JSON: seconds from apply
to the main process, and first steps compared pair by pair.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from finetune_operator.api.validate import load_job  # noqa: E402
from finetune_operator.backends.base import Attempt, BackendContext  # noqa: E402
from finetune_operator.backends.local import proc  # noqa: E402
from finetune_operator.backends.local.backend import LocalBackend  # noqa: E402
from finetune_operator.backends.local.layout import AttemptFolder  # noqa: E402
from finetune_operator.kube.resources import FINE_TUNE_JOBS  # noqa: E402
from finetune_operator.planner.plan import make_plan  # noqa: E402
from operators import Api, wait_until  # noqa: E402

PATIENCE_SECONDS = 600


def main() -> None:
    """Measure and print."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
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
            print(json.dumps(measure(api, folder, pairs), indent=2))
        finally:
            api.close()
            dev.send_signal(signal.SIGTERM)
            dev.communicate()


def measure(api: Api, folder: Path, pairs: int) -> dict[str, Any]:
    """Return the figures of so many pairs; which of the two comes first changes."""
    applied: list[float] = []
    bare: list[float] = []
    starts: list[float] = []
    for number in range(pairs):
        first, second = (write(folder, f"{kind}-{number}") for kind in ("api", "bare"))
        turns: list[Callable[[], None]] = [
            lambda file=first: collect(seconds_applied(api, folder, file), starts, applied),
            lambda file=second: collect((0.0, seconds_bare(folder, file)), [], bare),
        ]
        for turn in turns if number % 2 else reversed(turns):
            turn()
    return {
        "apply_to_process_seconds": summary(starts),
        "apply_to_first_step_seconds": summary(applied),
        "bare_to_first_step_seconds": summary(bare),
        "own_share_seconds": summary([a - b for a, b in zip(applied, bare, strict=True)]),
    }


def collect(measured: tuple[float, float], starts: list[float], steps: list[float]) -> None:
    """Append what was measured."""
    starts.append(measured[0])
    steps.append(measured[1])


def summary(values: list[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {key: round(value, 3) for key, value in found.items()}


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


def seconds_applied(api: Api, folder: Path, file: Path) -> tuple[float, float]:
    """Apply a job; return seconds to its main process and to its first step."""
    made = yaml.safe_load(file.read_text())
    name, attempt = file.stem, folder / "runs" / "default" / file.stem / "attempts" / "1"
    began = time.time()
    api.run(api.client.create(FINE_TUNE_JOBS, made, "default"))
    record = AttemptFolder(attempt).node(0)
    wait_until(record.exists, PATIENCE_SECONDS)
    started = born(json.loads(record.read_text())["pid"])
    wait_until(lambda: api.phase("default", name) == "Succeeded", PATIENCE_SECONDS)
    return started - began, first_step(folder, name) - began


def seconds_bare(folder: Path, file: Path) -> float:
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
    return first_step(folder, file.stem) - began


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
