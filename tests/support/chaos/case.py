"""Describe a fault, its expected effects, and the outcome of a run."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_trainer.config import FailureClass


class Place(StrEnum):
    """Requirements of a case, which decide the target that runs it."""

    VIRTUAL = "virtual time"
    PROCESSES = "processes"
    CONTROL_PLANE = "control plane"
    NODE = "node"


class Budget(StrEnum):
    """The limit of `restartPolicy` that an ended attempt counts against."""

    COUNTED = "counted"
    FREE = "free"
    NEITHER = "neither"
    """Neither `maxRestarts` nor `maxDisruptions`."""


THE_START = "the start"
LAST_STEP = "the last step"
NO_ATTEMPT_ENDS = "no attempt ends"


@dataclass(frozen=True)
class Truth:
    """Expected effects of a fault.

    Attributes:
        failure: Class of the attempt that the fault ends; None if no attempt ends.
        reason: Reason of the condition Ready while the fault lasts; empty if only the record of the
            attempt names it.
        words: Parts of the sentence that the user reads: the cluster's or the trainer's own words.
        meanwhile: Parts of the sentence of the condition Ready while the fault lasts.
        cause: Parts of the sentences of Failed and Stalled; each sentence has at least one part.
            If empty, `words`.
        remedy: Part of the sentence of a condition Failed or Stalled that states what to do.
        budget: Which limit the fault counts against.
        resumes: Step from which the next attempt trains, or why there is none.
        phase: Phase of the job in the end.
        final: Reason of the condition Failed in the end; empty if the job does not fail.
        within: Seconds within which the status must name the fault.
    """

    failure: FailureClass | None = None
    reason: str = ""
    words: tuple[str, ...] = ()
    meanwhile: tuple[str, ...] = ()
    cause: tuple[str, ...] = ()
    remedy: str = ""
    budget: Budget = Budget.NEITHER
    resumes: int | str = NO_ATTEMPT_ENDS
    phase: JobPhase = JobPhase.RUNNING
    final: str = ""
    within: float = 60.0


Act = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, eq=False)
class Case:
    """A fault with its expected effects.

    Attributes:
        fault: The fault in words; unique.
        how: How it is caused.
        place: What it needs.
        truth: What must be true.
        inject: Causes the fault; None if `shown_by` names a test.
        repair: Removes the fault once the status has named it; None if it passes by itself, or
            stays.
        check: Raises AssertionError if anything else is wrong in the end.
        at_step: Optimizer step at which the fault occurs; None for a job that has no pods yet.
        spec: Fields of the job.
        shown_by: A test that causes the fault and asserts the truth: `FILE::NAME`.
        is_starred: Whether it is in `make chaos-ci`.
        not_run: Why it cannot run yet; empty if it can.
        backend: Name of the backend.
        stride: Seconds between two reconciles once the status has named the fault.
    """

    fault: str
    how: str
    truth: Truth
    place: Place = Place.VIRTUAL
    inject: Act | None = None
    repair: Act | None = None
    check: Act | None = None
    at_step: int | None = 45
    spec: Mapping[str, Any] = field(default_factory=dict)
    shown_by: str = ""
    is_starred: bool = False
    not_run: str = ""
    backend: str = "kubernetes"
    stride: int = 1

    @property
    def slug(self) -> str:
        """Return the name of its test."""
        kept = "".join(one if one.isalnum() else " " for one in self.fault.lower())
        return f"{self.backend}-{'-'.join(kept.split())}"


@dataclass
class Outcome:
    """Outcome of a run of a case.

    Attributes:
        seen: The sentence that the user reads.
        lost_steps: Steps that are trained again; None if no attempt trains again.
        recovery_seconds: Seconds from the fault, or from its repair, until the job trains; None if
            it does not train again.
        named_seconds: Seconds until the status named the fault.
    """

    seen: str = ""
    lost_steps: int | None = None
    recovery_seconds: float | None = None
    named_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for the record of the run."""
        return asdict(self)
