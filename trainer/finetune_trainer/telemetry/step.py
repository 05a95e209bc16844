"""The loop's report about an optimizer step, and averages derived from such reports."""

from collections import deque
from statistics import median
from typing import NamedTuple, TypedDict

from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.telemetry.phases import PhaseClock

# Decay with which a step counts half after ten further steps: smooth enough to read, and quick to
# show a change.
_DECAY = 0.5 ** (1 / 10)
_STEPS_OF_MEDIAN, _FEWEST_STEPS_OF_MEDIAN = 100, 10


class StepReport(NamedTuple):
    """Report of one finished optimizer step.

    Attributes:
        step: number of finished steps, this one included; 1 after the first.
        epoch: epochs finished, with fraction.
        loss: mean loss over the step's label tokens of all ranks; None if the value was not read
            back from the device at this step.
        grad_norm: global norm before clipping.
        tokens: non-padding tokens of all ranks.
        samples: rows of the data set, of all ranks.
        rank_tokens: non-padding tokens of this rank.
        rank_samples: rows of this rank.
        rank_padding: padding tokens that went through this rank's model.
        rank_flops: model FLOPs of this rank; None if not known.
        seconds: wall time since the end of the previous step, without evaluation and without
            starting and stopping a profiler.
        data_wait_seconds: share of `seconds` spent waiting for batches.
        checkpoint_blocking_seconds: share of `seconds` spent on saving.
        profiling_seconds: time in which a profiler was started or stopped, besides `seconds`.
        is_profiled: whether a rank recorded a profile during the step, which slowed it down.
    """

    step: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens: int
    samples: int
    seconds: float
    rank_tokens: int = 0
    rank_samples: int = 0
    rank_padding: int = 0
    rank_flops: float | None = None
    data_wait_seconds: float = 0.0
    checkpoint_blocking_seconds: float = 0.0
    profiling_seconds: float = 0.0
    is_profiled: bool = False


class StepTimes(TypedDict):
    """Times of a `StepReport`."""

    seconds: float
    data_wait_seconds: float
    checkpoint_blocking_seconds: float
    profiling_seconds: float


class Lap:
    """Measures consecutive steps without gaps between them."""

    def __init__(self, phases: PhaseClock) -> None:
        """Begin the first step."""
        self._phases = phases
        self._began = self._now()

    def ended(self) -> StepTimes:
        """End the current step and return its times."""
        (at, waited, blocked, evaluated, profiled), now = self._began, self._now()
        self._began = now
        profiling = now[4] - profiled
        return {
            "seconds": now[0] - at - (now[3] - evaluated) - profiling,
            "data_wait_seconds": now[1] - waited,
            "checkpoint_blocking_seconds": now[2] - blocked,
            "profiling_seconds": profiling,
        }

    def _now(self) -> tuple[float, float, float, float, float]:
        spent = self._phases.spent
        return (
            self._phases.now(),
            spent(TimedPhase.DATA_WAIT),
            spent(TimedPhase.CHECKPOINT_BLOCKING),
            spent(TimedPhase.EVAL),
            spent(TimedPhase.PROFILING),
        )


class Throughput:
    """Tokens per second and seconds per step, as ratios of exponentially fading sums.

    A ratio of sums, unlike an average of rates, is right when steps differ in length.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._steps = 0.0
        self._newest: deque[float] = deque(maxlen=_STEPS_OF_MEDIAN)

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._steps = self._steps * _DECAY + 1
        self._newest.append(seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first step."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    @property
    def seconds_per_step(self) -> float | None:
        """None before the first step."""
        return self._seconds / self._steps if self._steps > 0 else None

    @property
    def median_seconds_per_step(self) -> float | None:
        """Median of the last 100 steps; None before the tenth step."""
        return median(self._newest) if len(self._newest) >= _FEWEST_STEPS_OF_MEDIAN else None
