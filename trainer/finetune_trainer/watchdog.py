"""Ends a rank that hangs, after every rank has written the stacks of its threads.

Started by `worker`. A stuck rank stops all others in their next collective, so all notice within
the same seconds; none may end before the last has written its stacks.
"""

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

from finetune_trainer.config import ExitCode, FailureClass, Termination
from finetune_trainer.telemetry import Telemetry

SECONDS_FOR_THE_OTHERS = 2.0


def watch_progress(
    telemetry: Telemetry, hang_seconds: float, stacks: Path, end: Callable[[Termination], None]
) -> None:
    """Check from a thread whether anything was reported within the last `hang_seconds`.

    Where not, `stacks` receives the stacks of all threads, and `end` ends the process.
    """

    def watch() -> None:
        while True:
            while (left := hang_seconds - telemetry.idle_seconds) > 0:
                time.sleep(left)
            with stacks.open("a") as file:
                file.write(f"no progress for {telemetry.idle_seconds:.0f} s\n")
                file.flush()
                faulthandler.dump_traceback(file)
            time.sleep(SECONDS_FOR_THE_OTHERS)
            if telemetry.idle_seconds >= hang_seconds:  # else it was only slow
                end(_termination(telemetry, hang_seconds, stacks))
                return

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def _termination(telemetry: Telemetry, hang_seconds: float, stacks: Path) -> Termination:
    progress = telemetry.progress
    return Termination(
        failure_class=FailureClass.HUNG,
        exit_code=ExitCode.ERROR,
        message=f"no progress for {hang_seconds:.0f} s in phase {progress.phase} after step "
        f"{progress.step}; {stacks.parent}/rank-*.stacks.txt show where each rank is; raise "
        "spec.deadlines.hangSeconds if it was only slow",
        step=progress.step,
    )
