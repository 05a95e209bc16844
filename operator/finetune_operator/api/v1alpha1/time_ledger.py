"""`status.ledger` of a FineTuneJob: where its time went; `reconcile/ledger.py` keeps it."""

from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel


class Milliseconds(ApiModel):
    """Time by what it went into; what is left out is 0."""

    queued: int | None = None
    """Waiting for its operator, or in a queue."""
    provisioning: int | None = None
    """Waiting for its nodes."""
    starting: int | None = None
    """All nodes run: ranks meet, load the model, read the data."""
    productive: int | None = None
    """Training steps that were never made before."""
    recomputed: int | None = None
    """Training steps that an earlier attempt had made."""
    data: int | None = None
    """Training waited for rows."""
    checkpoint: int | None = None
    """Training stood still for a checkpoint."""
    evaluation: int | None = None
    """Held-out loss and answers to sample prompts."""
    exporting: int | None = None
    """Writing the model that was trained."""
    restarting: int | None = None
    """From the loss of an attempt until the next one trains."""
    suspended: int | None = None
    """Nothing ran, as spec.suspend said."""
    other: int | None = None
    """Anything else, such as time that no process reported."""


class RestartCount(ApiModel):
    """Attempts that were followed by another one."""

    failure_class: Annotated[str, Field(max_length=64)]
    """Why they ended."""
    count: int
    """How many."""


class HeardTime(ApiModel):
    """The report of rank 0 up to which its time is accounted for."""

    attempt: int
    """Of which attempt."""
    restarts_in_place: int = 0
    """After so many restarts in place."""
    time: float
    """When it was made, seconds since the epoch."""
    step: int
    """Optimizer steps done."""
    starting: int | None = None
    """Milliseconds until it trained."""
    training: int | None = None
    """Milliseconds of training."""
    data: int | None = None
    """Milliseconds of waiting for rows."""
    checkpoint: int | None = None
    """Milliseconds of checkpoints."""
    evaluation: int | None = None
    """Milliseconds of evaluation."""
    exporting: int | None = None
    """Milliseconds of exporting."""
    other: int | None = None
    """Milliseconds of anything else."""


class TimeLedger(ApiModel):
    """Where the job's time went since it was created.

    What is not accounted for yet belongs to what goes on now.
    """

    time: Milliseconds = Milliseconds()
    """Milliseconds of the job."""
    gpu_time: Milliseconds = Milliseconds()
    """Milliseconds of the job, times the GPUs of nodes that ran."""
    highest_step: int = 0
    """Highest optimizer step that any attempt has made."""
    first_step: int | None = None
    """Milliseconds from creation to the first optimizer step."""
    lost_at: int | None = None
    """Milliseconds from creation to the loss of ranks that it is recovering from."""
    recovery: int | None = None
    """Milliseconds from the newest loss of ranks until they trained again."""
    recoveries: int = 0
    """How often they did."""
    attempt: int = 0
    """Newest attempt whose restart is counted."""
    restarts: Annotated[list[RestartCount], Field(max_length=32)] = Field([])
    """Restarts so far, one entry a failure class."""
    heard: HeardTime | None = None
    """Up to where rank 0's own account is in it."""
