"""What the judge sees of a rank at one moment; also what nodes send to rank 0's."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from finetune_trainer.config import ContractModel
from finetune_trainer.telemetry.boundary import Boundary


class RankLook(ContractModel):
    """A rank at the moment of a look.

    Attributes:
        process_start: tells its process from an earlier one.
        process: state of the process, as a letter of proc(5); None where it is gone.
        phase: what its clock runs for now.
        boundary: None before its first step has ended.
        position: number of collectives of training that it has begun, as it has noted itself; None
            where not known.
        recorded: the same as torch's recorder has it, of a rank that does not get on; None where
            nobody has asked that.
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
    """A look at a rank as the judge has it.

    Attributes:
        node: name of its node.
        is_silent: its node has not been heard of for some time, so this is an old look.
    """

    look: RankLook
    node: str
    is_silent: bool = False
