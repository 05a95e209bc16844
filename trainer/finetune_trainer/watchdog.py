"""End a hanging rank after all ranks have written the stacks of their threads.

Started by `worker`. A stuck rank stops all others in their next collective, so all ranks notice it
at nearly the same time. No rank may end before the last has written its stacks. If one thread holds
the interpreter lock, no other thread runs. In this case a timer in C writes the stacks and ends the
process.
"""

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.config import ExitCode, FailureClass, Termination, TrainConfig
from finetune_trainer.telemetry import Telemetry

PEER_GRACE_SECONDS = 2.0
# Default limit on GPUs. It is longer than any micro-batch, and shorter than the collectives'
# timeout of 30 minutes, at which NCCL aborts the process without a stack.
DEFAULT_HANG_SECONDS = 900.0
# Once steps have been measured, the default limit is this many times their median, but not lower
# than the least, because storage and schedulers pause healthy steps for minutes.
STEPS_IN_LIMIT = 20
LEAST_HANG_SECONDS = 300.0
# The medians of two ranks differ by less than this share, so no rank ends before the others have
# written their stacks.
_GRACE_SHARE = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class Limit(NamedTuple):
    """How long a rank may go without a report.

    Attributes:
        seconds: The limit.
        is_of_steps: Whether the limit applies only to steps after the first, in which kernels are
            compiled. It then does not apply to work that a step waits for, such as a save or an
            evaluation.
        least_seconds: If set, the limit falls to `STEPS_IN_LIMIT` times the median step, but not
            below this.
    """

    seconds: float
    is_of_steps: bool
    least_seconds: float | None = None

    def current(self, telemetry: Telemetry) -> float:
        """Return the limit in seconds after the steps so far."""
        median = telemetry.median_step_seconds
        if self.least_seconds is None or median is None:
            return self.seconds
        return min(self.seconds, max(self.least_seconds, STEPS_IN_LIMIT * median))


def limit_of(config: TrainConfig) -> Limit | None:
    """Return the limit of a run; None if a rank may take any time."""
    if config.control.hang_seconds is not None:
        return Limit(config.control.hang_seconds, is_of_steps=False)
    if config.world.device != "cuda":
        return None
    return Limit(DEFAULT_HANG_SECONDS, is_of_steps=True, least_seconds=LEAST_HANG_SECONDS)


def watch_progress(
    telemetry: Telemetry, limit: Limit, stacks: Path, end: Callable[[Termination], None]
) -> None:
    """Check from a thread whether the time without a report exceeds `limit`.

    If so, `stacks` receives the stacks of all threads, and `end` ends the process.
    """
    idle = _Idle(telemetry, limit)

    def watch() -> None:
        with stacks.open("a") as file:
            while True:
                while (left := (seconds := limit.current(telemetry)) - idle.seconds()) > 0:
                    later = seconds + 2 * _grace_of(seconds)
                    _set_timer(later, is_on=not idle.is_exempt, file_number=file.fileno())
                    time.sleep(min(left, seconds / 8, _LONGEST_PAUSE_SECONDS))
                file.write(f"no progress for {idle.seconds():.0f} s\n")
                file.flush()
                faulthandler.dump_traceback(file)
                time.sleep(_grace_of(seconds))
                if idle.seconds() >= seconds:  # otherwise the rank was only slow
                    faulthandler.cancel_dump_traceback_later()
                    end(_termination(telemetry, seconds, stacks))
                    return

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


class _Idle:
    """Time without a report that counts towards a limit."""

    def __init__(self, telemetry: Telemetry, limit: Limit) -> None:
        self._telemetry, self._limit = telemetry, limit
        self._exempt_at = time.monotonic()
        self.is_exempt = False

    def seconds(self) -> float:
        idle = self._telemetry.idle_seconds
        if not self._limit.is_of_steps:
            self.is_exempt = idle == 0  # such a phase reports only at its end
            return idle
        now = time.monotonic()
        self.is_exempt = not self._telemetry.is_stepping
        if self.is_exempt:
            self._exempt_at = now
        return min(idle, now - self._exempt_at)


def _grace_of(seconds: float) -> float:
    return max(PEER_GRACE_SECONDS, _GRACE_SHARE * seconds)


def _set_timer(later: float, *, is_on: bool, file_number: int) -> None:
    """Restart the timer in C, which ends the process unless this thread restarts it again."""
    if is_on:
        faulthandler.dump_traceback_later(later, exit=True, file=file_number)
    else:
        faulthandler.cancel_dump_traceback_later()


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
