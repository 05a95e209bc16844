"""Tags of a run on Azure ML through which trainer and operator communicate.

The trainer publishes its progress, and that it reads the tags. The operator requests a stop with a
tag, because Azure ML may not send SIGTERM.
"""

from pydantic import AwareDatetime, Field

from finetune_trainer.config.contract_model import ContractModel

PROGRESS_TAG = "finetune.progress"  # Progress, shortened
HEARD_TAG = "finetune.heard"  # Heard
STOP_TAG = "finetune.stop"  # StopRequest
MAX_TAG_LENGTH = 1000  # Azure ML's limit for the value of a tag


class Heard(ContractModel):
    """Sign that the trainer reads the tags of its run."""

    time: float = Field(description="When this was written, seconds since the epoch.")
    starts: int | None = Field(
        None, description="Number of this start of the attempt, from 1; None before it is known."
    )


class StopRequest(ContractModel):
    """Request to commit a checkpoint and leave."""

    until: AwareDatetime = Field(description="When the rest of the attempt is cancelled.")
