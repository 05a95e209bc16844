"""The tags of a run on Azure ML in which trainer and operator write to each other.

The trainer says how far it is and that it listens; the operator asks it to stop, as Azure ML need
not send SIGTERM.
"""

from pydantic import AwareDatetime, Field

from finetune_trainer.config.contract_model import ContractModel

PROGRESS_TAG = "finetune.progress"  # Progress, shortened
HEARD_TAG = "finetune.heard"  # Heard
STOP_TAG = "finetune.stop"  # StopRequest
MAX_TAG_LENGTH = 1000  # what Azure ML takes as the value of a tag


class Heard(ContractModel):
    """The trainer reads the tags of its run."""

    time: float = Field(description="When it wrote this, seconds since the epoch.")
    starts: int | None = Field(
        None, description="Which start of the attempt this is, from 1; None before it is known."
    )


class StopRequest(ContractModel):
    """The trainer shall commit a checkpoint and leave."""

    until: AwareDatetime = Field(description="When what is left of the attempt is cancelled.")
