"""The data of `ftctl top`: a row for each job, or for each rank of a job.

None means unknown; a table shows it as `-`.
"""

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import Field

from finetune_trainer.config import ContractModel


class SuspectRow(ContractModel):
    """A rank that slows down the others."""

    rank: int
    cause: str
    score: float | None = None


class JobRow(ContractModel):
    """A job."""

    namespace: str
    name: str
    run_directory: str | None = Field(None, description="Of a job of this machine.")
    phase: str = Field(description="The trainer's while it works, if known; else the job's.")
    reason: str | None = Field(None, description="Of the condition Ready.")
    attempt: int = 0
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    age_seconds: float | None = Field(None, description="Since the creation of the job.")
    suspects: tuple[SuspectRow, ...] = ()

    @property
    def key(self) -> str:
        """`NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}"


class RankRow(ContractModel):
    """A rank.

    Attributes:
        phase: The phase that took most of the time between the two newest pages.
        waiting_ratio: Share of that time in which the rank waited, for other ranks or for data.
        phase_ratios: Share of each phase.
        score: Busy time of a step, divided by the median of the other ranks.
        memory_bytes: Memory by kind, as in `finetune_train_memory_bytes`.
        gpu: UUID of the GPU.
        gpu_utilization_ratio: Share of the time in which a kernel ran on the GPU.
        age_seconds: Time since the last report of the rank.
    """

    rank: int
    node: str | None = None
    step: int | None = None
    phase: str | None = None
    step_seconds: float | None = None
    waiting_ratio: float | None = None
    phase_ratios: Mapping[str, float] = {}
    score: float | None = None
    cause: str | None = Field(None, description="Why it is a suspect.")
    memory_bytes: Mapping[str, float] = {}
    gpu: str | None = None
    gpu_utilization_ratio: float | None = None
    age_seconds: float | None = None


class Screen(ContractModel):
    """The content of a screen: all jobs, or one job with its ranks.

    Attributes:
        notes: Sentences about failed reads.
    """

    jobs: tuple[JobRow, ...]
    ranks: tuple[RankRow, ...] | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the output of `-o json`."""
        fields = self.model_dump(by_alias=True, mode="json")
        if self.ranks is None:
            return {"jobs": fields["jobs"], "notes": fields["notes"]}
        return {"job": fields["jobs"][0], "ranks": fields["ranks"], "notes": fields["notes"]}


def get_in(value: Any, *path: str) -> Any:
    """Return the value at a path of a JSON value; None if the path does not exist.

    Another version may have written the value, so its structure is not assumed.
    """
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number_in(value: Any, *path: str) -> float | None:
    """Return the number at a path of a JSON value; None if there is no finite number.

    Python's JSON parser also accepts `NaN` and `Infinity`.
    """
    found = get_in(value, *path)
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def count_in(value: Any, *path: str) -> int | None:
    """Return the number at a path of a JSON value, cut to an integer; None if there is none."""
    found = number_in(value, *path)
    return None if found is None else int(found)


def age_in(metadata: Any, now: datetime) -> float | None:
    """Return the seconds since the creation of an object; None if its metadata has no time."""
    try:
        return (now - datetime.fromisoformat(get_in(metadata, "creationTimestamp"))).total_seconds()
    except (TypeError, ValueError):
        return None


def reason_in(status: Any) -> str | None:
    """Return the reason of the condition Ready; None if the status has none."""
    conditions = get_in(status, "conditions")
    for one in conditions if isinstance(conditions, list) else ():
        if get_in(one, "type") == "Ready" and get_in(one, "reason"):
            return str(one["reason"])
    return None


def progress_in(progress: Any) -> dict[str, float | None]:
    """Return the fields of a `JobRow` that the progress of a status or a page contains."""
    return {
        "step": count_in(progress, "step"),
        "total_steps": count_in(progress, "totalSteps"),
        "loss": number_in(progress, "loss"),
        "tokens_per_second": number_in(progress, "tokensPerSecond"),
        "eta_seconds": number_in(progress, "etaSeconds"),
    }


def suspects_in(value: Any) -> tuple[SuspectRow, ...]:
    """Return the suspects of a status or a progress; invalid entries are left out."""
    found = ((one, count_in(one, "rank")) for one in (value if isinstance(value, list) else ()))
    return tuple(
        SuspectRow(rank=rank, cause=str(get_in(one, "cause") or "?"), score=number_in(one, "score"))
        for one, rank in found
        if rank is not None
    )
