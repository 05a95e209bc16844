"""What `ftctl top` shows: a row for each job, or for each rank of one.

None means that it is not known, which a table shows as `-`.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from finetune_trainer.config import ContractModel


class SuspectRow(ContractModel):
    """A rank that holds the others back."""

    rank: int
    cause: str
    score: float | None = None


class JobRow(ContractModel):
    """One job."""

    namespace: str
    name: str
    run_directory: str | None = Field(None, description="Of a job of this machine.")
    phase: str = Field(description="The trainer's while it works, if known; else the job's.")
    attempt: int = 0
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    suspects: tuple[SuspectRow, ...] = ()

    @property
    def key(self) -> str:
        """`NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}"


class RankRow(ContractModel):
    """One rank.

    Attributes:
        phase: What took most of the time between the two newest looks.
        waiting_ratio: Share of that time in which it waited, for other ranks or for data.
        phase_ratios: Share of each phase.
        score: Busy time of a step by the median of the other ranks'.
        memory_bytes: By kind, as in `finetune_train_memory_bytes`.
        gpu: UUID.
        gpu_utilization_ratio: Share of the time in which a kernel ran on it.
        age_seconds: Time since it last reported anything.
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
    """What is shown at one moment: all jobs, or one of them with its ranks.

    Attributes:
        notes: Sentences about what could not be read.
    """

    jobs: tuple[JobRow, ...]
    ranks: tuple[RankRow, ...] | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
        said = self.model_dump(by_alias=True, mode="json")
        if self.ranks is None:
            return {"jobs": said["jobs"], "notes": said["notes"]}
        return {"job": said["jobs"][0], "ranks": said["ranks"], "notes": said["notes"]}


def told_in(value: Any, *path: str) -> Any:
    """Return what stands at a path of a JSON value, None where nothing does.

    It may come from another version, so no form of it is taken for granted.
    """
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number_in(value: Any, *path: str) -> float | None:
    """Return the number at a path of a JSON value, None where there is none.

    Python's reader of JSON takes `NaN` and `Infinity`, too, which are none.
    """
    found = told_in(value, *path)
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def count_in(value: Any, *path: str) -> int | None:
    """Return the whole number at a path of a JSON value, None where there is none."""
    found = number_in(value, *path)
    return None if found is None else int(found)


def progress_in(told: Any) -> dict[str, float | None]:
    """Return those fields of a `JobRow` that a progress has, in a status or on a page."""
    return {
        "step": count_in(told, "step"),
        "total_steps": count_in(told, "totalSteps"),
        "loss": number_in(told, "loss"),
        "tokens_per_second": number_in(told, "tokensPerSecond"),
        "eta_seconds": number_in(told, "etaSeconds"),
    }


def suspects_in(told: Any) -> tuple[SuspectRow, ...]:
    """Return the suspects of a status or a progress; what is no suspect is left out."""
    found = ((one, count_in(one, "rank")) for one in (told if isinstance(told, list) else ()))
    return tuple(
        SuspectRow(
            rank=rank, cause=str(told_in(one, "cause") or "?"), score=number_in(one, "score")
        )
        for one, rank in found
        if rank is not None
    )
