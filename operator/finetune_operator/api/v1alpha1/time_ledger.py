"""`status.ledger` of a FineTuneJob: its time by activity; `reconcile/ledger.py` updates it."""

from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel


class Milliseconds(ApiModel):
    """Milliseconds by activity; absent means 0."""

    queued: int | None = None
    """Waiting for the operator, or in a queue."""
    provisioning: int | None = None
    """Waiting for nodes."""
    starting: int | None = None
    """All nodes run: rendezvous, loading the model, reading the data."""
    productive: int | None = None
    """Training steps that ran for the first time."""
    recomputed: int | None = None
    """Training steps that an earlier attempt had completed."""
    data: int | None = None
    """Waiting for rows."""
    checkpoint: int | None = None
    """Waiting for a checkpoint."""
    evaluation: int | None = None
    """Held-out loss and sample prompts."""
    exporting: int | None = None
    """Exporting the trained model."""
    restarting: int | None = None
    """From the loss of an attempt until the next attempt trains."""
    suspended: int | None = None
    """Suspended by spec.suspend."""
    other: int | None = None
    """Other time, such as time that no process reported."""


class RestartCount(ApiModel):
    """Restarts after failures of one class."""

    failure_class: Annotated[str, Field(max_length=64)]
    """Failure class."""
    count: int
    """Number of restarts."""


class HeardTime(ApiModel):
    """Latest report of rank 0 that the ledger includes."""

    attempt: int
    """Number of the attempt."""
    restarts_in_place: int = 0
    """Number of restarts in place before the report."""
    time: float
    """Time of the report, seconds since the epoch."""
    step: int
    """Completed optimizer steps."""
    starting: int | None = None
    """Milliseconds before training started."""
    training: int | None = None
    """Milliseconds of training."""
    data: int | None = None
    """Milliseconds of waiting for rows of the data set."""
    checkpoint: int | None = None
    """Milliseconds of checkpoints."""
    evaluation: int | None = None
    """Milliseconds of evaluation."""
    exporting: int | None = None
    """Milliseconds of exporting."""
    other: int | None = None
    """Milliseconds of other activities."""


class TimeLedger(ApiModel):
    """Time of the job by activity, since its creation.

    Time that is not yet accounted for belongs to the current activity.
    """

    time: Milliseconds = Milliseconds()
    """Milliseconds of the job."""
    gpu_time: Milliseconds = Milliseconds()
    """Milliseconds of the job, multiplied by the GPUs of running nodes."""
    highest_step: int = 0
    """Highest optimizer step that any attempt has completed."""
    first_step: int | None = None
    """Milliseconds from creation to the first optimizer step."""
    lost_at: int | None = None
    """Milliseconds from creation to the loss of ranks from which the job is recovering."""
    recovery: int | None = None
    """Milliseconds from the latest loss of ranks until training resumed."""
    recoveries: int = 0
    """Number of recoveries."""
    attempt: int = 0
    """Latest attempt whose restart is counted."""
    restarts: Annotated[list[RestartCount], Field(max_length=32)] = Field([])
    """Number of restarts per failure class."""
    heard: HeardTime | None = None
    """Latest report of rank 0 that the ledger includes."""
