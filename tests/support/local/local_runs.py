"""Builders for tests that run the stand-in trainer on this machine."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local import proc
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.backends.local.environment import ENV_MARK

Plays = Mapping[str, Mapping[str, Any]]
"""How the stand-in trainer of each attempt behaves; `*` is every other attempt."""
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in_trainer.py")))


def write_inputs(folder: Path) -> None:
    """Write what the manifest of `builders` names, as far as it is looked at before a start."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "train.jsonl").write_text("{}\n")


def local_context(
    folder: Path,
    plays: Plays | None = None,
    environ: Mapping[str, str] | None = None,
) -> BackendContext:
    """Return what the backend of a manifest in `folder` is given; its trainer plays `plays`."""
    passed = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "FINETUNE_STAND_IN": json.dumps(plays or {}),
        **(environ or {}),
    }
    return BackendContext(folder, passed)


def local_backend(
    folder: Path,
    plays: Mapping[str, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> LocalBackend:
    """Return the backend of a manifest in `folder`, whose trainer plays `plays`."""
    context = replace(local_context(folder, plays, environ), now=now)
    return LocalBackend(context, command=STAND_IN, cores=2)


def starts(folder: Path) -> list[tuple[int, int]]:
    """Return (attempt, node) of every main process that ever started, sorted."""
    file = folder / "runs" / "default" / "tiny" / "starts.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted((int(line.split()[0]), int(line.split()[1])) for line in lines)


def is_running(pid: int) -> bool:
    """Say whether the process runs; a zombie does not, nor one that is on its way there."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    is_exiting = int(fields[5]) & 0x4  # PF_EXITING of the flags, the ninth field in proc(5)
    return state not in "ZXx" and not is_exiting


def kill_what_runs_below(folder: Path) -> None:
    """Kill the main processes of jobs below a folder, as a failed test leaves them.

    Those of the tests that run beside this one come and go meanwhile.
    """
    for process in proc.marked(ENV_MARK, ""):
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in command:
            process.send(signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as `is_so`; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def run_and_kill(main: Callable[[], object], event: int) -> bool:
    """Run `main` in a forked process that SIGKILLs itself before its Nth file event.

    The interpreter's audit hook counts what opens, renames, makes a folder or spawns.

    Returns:
        False when it came to its end before.
    """
    child = os.fork()
    if child == 0:
        left = [event]

        def hear(name: str, arguments: tuple[object, ...]) -> None:
            if name in ("open", "os.rename", "os.posix_spawn", "os.mkdir"):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(hear)
        code = 1
        try:
            main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), "see the traceback of the forked process above"
    return status != 0
