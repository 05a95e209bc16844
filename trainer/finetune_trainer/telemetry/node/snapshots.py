"""Snapshots of a rank, which nodes send to rank 0's node for the judge."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from finetune_trainer.config import ContractModel
from finetune_trainer.telemetry.boundary import Boundary


class RankSnapshot(ContractModel):
    """State of a rank at one moment.

    Attributes:
        process_start: Start of its process, which distinguishes it from an earlier one.
        process: State of the process as a letter of proc(5); None if it is gone.
        phase: Current phase of its phase clock.
        boundary: None before the end of its first step.
        position: Number of collectives that training has begun, by the rank's own count; None if
            not known.
        recorded: The same number from torch's recorder, for a rank without progress; None if it
            was not queried.
    """

    rank: Annotated[int, Field(ge=0)]
    process_start: int
    process: Annotated[str, Field(max_length=1)] | None
    phase: Annotated[str, Field(max_length=64)] | None = None
    boundary: Boundary | None = None
    position: Annotated[int, Field(ge=0)] | None = None
    recorded: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True)
class Seen:
    """Snapshot of a rank as known to the judge.

    Attributes:
        node: Name of its node.
        is_silent: Whether its node has sent no news for some time, so that the snapshot is old.
    """

    look: RankSnapshot
    node: str
    is_silent: bool = False
