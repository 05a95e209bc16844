"""How long `ftctl run FILE` takes until the trainer's process starts, beside another version of it.

    python tests/benchmarks/run_start.py --before OTHER/.venv/bin/ftctl [--pairs 7]

The two run in turn, which one comes first changes; each run is of a small job in a folder of its
own and is killed as soon as the main process of its attempt was born.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import yaml

from finetune_operator.backends.local import proc
from finetune_operator.backends.local.environment import ENV_MARK
from finetune_operator.backends.local.layout import AttemptFolder

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120
NOW = [sys.executable, "-m", "finetune_operator"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other version's ftctl")
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    commands = {"before": [str(options.before.absolute())], "now": NOW}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for name, command in commands.items():
        started(command)  # with the files in the page cache
        print(f"{name}: {' '.join(command)}", flush=True)
    for number in range(options.pairs):
        for name in commands if number % 2 else reversed(commands):
            seconds[name].append(started(commands[name]))
        pair = {name: round(taken[-1], 3) for name, taken in seconds.items()}
        print(f"pair {number + 1}: {json.dumps(pair)}", flush=True)
    medians = {name: round(median(taken), 3) for name, taken in seconds.items()}
    print(json.dumps({"median": medians, "more": round(medians["now"] - medians["before"], 3)}))


def started(command: list[str]) -> float:
    """Run the job until its main process is born; return the seconds it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write(folder)
        record = AttemptFolder(folder / "runs/default/start/attempts/1").node(0)
        began = time.time()
        ftctl = subprocess.Popen(
            [*command, "run", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            while not record.exists():
                if ftctl.poll() is not None or time.time() - began > PATIENCE_SECONDS:
                    assert ftctl.stderr is not None
                    raise SystemExit(f"it starts no trainer: {ftctl.stderr.read().decode()}")
                time.sleep(0.005)
            return born(json.loads(record.read_text())["pid"]) - began
        finally:
            ftctl.kill()
            ftctl.communicate()
            end_attempt(folder)


def write(folder: Path) -> Path:
    """Write the manifest of the quickstart, in whose place nothing is trained to its end."""
    (folder / ".quickstart").symlink_to(ROOT / "examples" / ".quickstart")
    made = yaml.safe_load((ROOT / "examples" / "00-quickstart.yaml").read_text())
    made["metadata"]["name"] = "start"
    file = folder / "start.yaml"
    file.write_text(yaml.safe_dump(made))
    return file


def born(pid: int) -> float:
    """Return when a process began, in seconds since the epoch."""
    process = proc.look_up(pid)
    assert process is not None, "the main process is still there"
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + process.start_time / os.sysconf("SC_CLK_TCK")


def end_attempt(folder: Path) -> None:
    """Kill what the run has started, and wait until it is gone."""
    uid = json.loads((folder / "runs/default/start/job.json").read_text())["metadata"]["uid"]
    while processes := proc.marked(ENV_MARK, f"{uid}-"):
        for process in processes:
            process.send(signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
