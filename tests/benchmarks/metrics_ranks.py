"""A rank that trains as ever, and adds up what its telling takes; `metrics_cost` starts it.

Every call that tells something is timed from outside, nested ones once. After the steps that are
added up come blocks of steps with telling and without it, in an order that chance decides, and all
ranks alike.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from interception_clock import InterceptionClock

from finetune_trainer import loop, rank
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import StopSignal
from finetune_trainer.step_counters import StepCounters
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.world import World

ENV_COURSE = "FINETUNE_BENCH_COURSE"
# What tells, and what it returns where nothing is told.
_REPORT = StepReport(0, 0.0, None, None, 0.0, 0, 0, 1.0)
TELLING: tuple[tuple[Any, str, Any], ...] = (
    (PhaseClock, "enter", TimedPhase.OTHER),
    (PhaseClock, "take_marks", ()),
    (PhaseClock, "count", None),
    (StepCounters, "add", None),
    (loop, "step_report", _REPORT),
    (Telemetry, "step", None),
)
# Seconds so far of what tells around a call of another, and so takes its own time.
OWN_CLOCKS: tuple[Callable[[], float], ...] = (InterceptionClock().install().seconds,)


@dataclass(frozen=True)
class Course:
    """What the ranks do.

    Attributes:
        warm: steps before anything is measured.
        told: steps whose telling is added up.
        blocks: blocks of steps of each of three kinds: plain, plain again, with telling.
        block: steps of a block, of which the first is left out.
        folder: where each rank leaves its `Measured`.
    """

    warm: int
    told: int
    blocks: int
    block: int
    seed: int
    folder: str

    @property
    def steps(self) -> int:
        """All of them, and one more, which is reported when the loop ends."""
        return self.warm + self.told + 3 * self.blocks * self.block + 1

    def kinds(self) -> list[str]:
        """Return the kind of each block, the same on every rank."""
        order: list[str] = []
        for number in range(self.blocks):
            three = ["plain", "plain again", "told"]
            random.Random(f"{self.seed}:{number}").shuffle(three)
            order += three
        return order


@dataclass
class Measured:
    """What one rank found, in seconds.

    Attributes:
        telling: by what tells, over the `told` steps.
        wall: those steps themselves.
        blocks: a step of each block, by kind.
    """

    telling: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0
    blocks: dict[str, list[float]] = field(default_factory=dict)


class Meter:
    """Puts itself around whatever tells."""

    def __init__(self, course: Course) -> None:
        self.measured = Measured()
        self._course, self._kinds = course, course.kinds()
        self._depth = self._steps = 0
        self._is_told = True
        self._began = self._own_began = 0.0

    def wrap(self, owner: Any, name: str, without: Any) -> None:
        """Time a method where it is told, and leave it out where it is not."""
        original, key = (
            getattr(owner, name),
            f"{owner.__name__}.{name}".removeprefix("finetune_trainer."),
        )
        seconds = self.measured.telling

        def timed(*given: Any, **named: Any) -> Any:
            if not self._is_told:
                result = without
            elif self._depth:
                return original(*given, **named)
            else:
                self._depth = 1
                began = perf_counter()
                try:
                    result = original(*given, **named)
                finally:
                    took = perf_counter() - began
                    seconds[key] = seconds.get(key, 0.0) + took
                    self._depth = 0
            if owner is Telemetry and name == "step":
                self._step()
            return result

        setattr(owner, name, timed)

    def _step(self) -> None:
        self._steps += 1
        course, now = self._course, perf_counter()
        ended = self._steps - course.warm
        if ended == 0:
            self.measured.telling.clear()
            self._began, self._own_began = now, _own_seconds()
        elif ended == course.told:
            self.measured.wall = now - self._began
            self.measured.telling["own clocks"] = _own_seconds() - self._own_began
            self.measured.telling = dict(self.measured.telling)  # no more is added to it
            self._began_block()
        elif ended > course.told:
            self._step_of_block(ended - course.told, now)

    def _step_of_block(self, number: int, now: float) -> None:
        block, within = divmod(number - 1, self._course.block)
        if within == 0:
            self._began = now
        elif within == self._course.block - 1 and block < len(self._kinds):
            one = (now - self._began) / (self._course.block - 1)
            self.measured.blocks.setdefault(self._kinds[block], []).append(one)
            self._began_block(block + 1)

    def _began_block(self, block: int = 0) -> None:
        self._is_told = block >= len(self._kinds) or self._kinds[block] == "told"


def run(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Train, and leave what the telling took."""
    course = Course(**json.loads(os.environ[ENV_COURSE]))
    meter = Meter(course)
    for owner, name, without in TELLING:
        meter.wrap(owner, name, without)
    ended = rank.run(config, world, stop, telemetry, fence)
    path = Path(course.folder) / f"rank-{world.rank}.json"
    path.write_text(json.dumps(asdict(meter.measured)))
    return ended


def _own_seconds() -> float:
    return sum(clock() for clock in OWN_CLOCKS)
