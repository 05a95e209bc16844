"""In-memory state of one job: everything that the kernel remembers besides the object itself.

`JobIndex` creates a `JobMemory` with the first `JobView` of a uid and drops it when the job is
finished or gone; each `JobView` refers to it. All of it can be lost: after a restart the kernel
finds the handle by the attempt's name and counts failures from zero.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from finetune_operator.backends.base import Handle, Obstacle
from finetune_operator.planner.catalogue import GpuSize
from finetune_operator.planner.plan import Expectation, Plan
from finetune_operator.reconcile.decide import PATIENCE_SECONDS, Rejection

Reasons = tuple[tuple[str, str], ...]
"""Type and reason of each condition of a status."""


@dataclass(slots=True)
class FailureStreak:
    """Consecutive failures of one kind of call.

    Attributes:
        since: Time of the first failure; None after a success.
        num_lasting: Number of failures at least `PATIENCE_SECONDS` after the first.
    """

    since: datetime | None = None
    num_lasting: int = 0

    def record(self, now: datetime) -> int:
        """Count a failure and return `num_lasting`; 0 means that the failure may be temporary."""
        if self.since is None:
            self.since = now
        self.num_lasting += now - self.since >= timedelta(seconds=PATIENCE_SECONDS)
        return self.num_lasting

    def reset(self) -> None:
        """Record a success."""
        self.since, self.num_lasting = None, 0


@dataclass(slots=True)
class JobMemory:
    """State of one job, identified by its uid.

    Attributes:
        submitted: Number and handle of an attempt whose handle the status does not have yet.
        plan: Generation of the spec, and its plan.
        expectation: Generation of the spec with the GPU sizes, and the forecast.
        reported_at: Time of the last write of a status with these reasons, for the newest few.
        observing: Failures to observe the attempt.
        acting: Failures to create, cancel or collect the attempt.
        obstacle: The failure to report with the next observation.
        finalizer_since: When this process first saw our finalizer missing or just added.
        is_adoption_done: `Adoption` has searched for an attempt that the status lacks.
    """

    submitted: tuple[int, Handle] | None = None
    plan: tuple[int, Plan | Rejection] | None = None
    expectation: tuple[tuple[int, tuple[GpuSize, ...]], Expectation | None] | None = None
    reported_at: dict[Reasons, datetime] = field(default_factory=dict)
    observing: FailureStreak = field(default_factory=FailureStreak)
    acting: FailureStreak = field(default_factory=FailureStreak)
    obstacle: Obstacle | None = None
    finalizer_since: datetime | None = None
    is_adoption_done: bool = False

    def forget_failures(self) -> None:
        """Drop recorded failures of actions: one succeeded, or another attempt begins."""
        self.acting.reset()
        self.obstacle = None
