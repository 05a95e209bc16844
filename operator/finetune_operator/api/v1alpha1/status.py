"""`status` of a FineTuneJob; written by the controller alone."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel

Text = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=64)]  # RFC 3339
Uri = Annotated[str, Field(max_length=2048)]


class JobPhase(StrEnum):
    """One word for printing; decisions read conditions and attempts, never this."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETING = "Deleting"


class Condition(ApiModel):
    """A metav1 condition."""

    type: Annotated[str, Field(max_length=316)] = Field(description="Which condition.")
    status: Annotated[str, Field(max_length=7)] = Field(description="True, False or Unknown.")
    reason: Annotated[str, Field(max_length=1024)] = Field(description="One CamelCase word.")
    message: Annotated[str, Field(max_length=32_768)] = Field("", description="One sentence.")
    last_transition_time: Time | None = Field(
        None, description="When status last changed, RFC 3339."
    )
    observed_generation: int | None = Field(None, description="Generation this was decided for.")


def _pending(type_: str, status: str) -> Condition:
    """Return a condition with the epoch as its time, as a default has no time of its own."""
    return Condition(
        type=type_,
        status=status,
        reason="Pending",
        message="waiting for the controller's first report",
        last_transition_time="1970-01-01T00:00:00Z",
    )


FIRST_CONDITIONS = (_pending("Ready", "Unknown"), _pending("Reconciling", "True"))
"""A job's conditions before its controller has seen it; kstatus reads them as InProgress."""


class Restarts(ApiModel):
    """Restarts so far."""

    counted: int = Field(0, description="After faults; limited by maxRestarts.")
    disruptions: int = Field(0, description="After preemptions and failures of the service.")


class NodesStatus(ApiModel):
    """Nodes wanted and ready."""

    desired: int = Field(0, description="Nodes of the current attempt.")
    ready: int = Field(0, description="Nodes whose processes run.")
    world_size: int = Field(0, description="Ranks of the current attempt.")


class PlanStatus(ApiModel):
    """What was chosen for the job."""

    strategy: Text = Field("", description="Strategy in use.")
    precision: Text = Field("", description="Precision in use.")
    micro_batch_size: int = Field(0, description="Sequences of one forward pass on one rank.")
    gradient_accumulation_steps: int = Field(0, description="Forward passes of a step.")
    reasons: Annotated[list[Text], Field(max_length=16)] = Field(
        [], description="Why these were chosen."
    )


class ProgressStatus(ApiModel):
    """What rank 0 published last."""

    step: int = Field(0, description="Optimizer steps done.")
    total_steps: int | None = Field(None, description="Optimizer steps in all.")
    epoch: float = Field(0.0, description="Passes over the data set so far.")
    loss: float | None = Field(None, description="Training loss of the newest step.")
    eval_loss: float | None = Field(None, description="Newest held-out loss.")
    tokens_per_second: float | None = Field(None, description="Non-padding tokens, all ranks.")
    mfu: float | None = Field(None, description="Model FLOPs utilisation, 0 to 1.")
    eta_seconds: float | None = Field(None, description="Time to the last step, in seconds.")
    last_update_time: Time | None = Field(None, description="When this was written, RFC 3339.")


class CheckpointEntry(ApiModel):
    """One committed checkpoint."""

    step: int = Field(description="Optimizer step it was taken after.")
    uri: Uri = Field(description="Where it is.")
    time: Time = Field(description="When it was committed.")
    world_size: int = Field(description="Ranks that wrote it.")
    eval_loss: float | None = Field(None, description="Held-out loss at that step.")


class CheckpointLedger(ApiModel):
    """The checkpoints that matter."""

    last: CheckpointEntry | None = Field(None, description="Newest committed checkpoint.")
    best: CheckpointEntry | None = Field(None, description="Lowest held-out loss.")


class AttemptStatus(ApiModel):
    """One attempt, newest 10 are kept."""

    number: int = Field(description="Counts up over restarts and resumes.")
    start_time: Time | None = Field(None, description="When it was submitted.")
    stop_deadline: Time | None = Field(
        None, description="When what is left of it is killed, once it was asked to stop."
    )
    end_time: Time | None = Field(None, description="When its last process was gone.")
    failure_class: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Why it ended."
    )
    message: Text = Field("", description="Its termination message.")
    node: Annotated[str, Field(max_length=253)] | None = Field(
        None, description="Node of the rank whose failure is the root cause."
    )
    exit_code: int | None = Field(None, description="Exit code of the main process.")
    resumed_step: int | None = Field(None, description="Step of the checkpoint it started from.")
    disruptions: int | None = Field(None, description="How often its service moved it.")
    url: Uri | None = Field(None, description="Its page, also after its end.")
    digest: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="SHA-256 of what later attempts keep of it, such as its profile."
    )


class BackendRef(ApiModel):
    """What the backend made for the current attempt."""

    kind: Text = Field(description="Kind of the thing.")
    name: Text = Field(description="Its name.")
    uid: Text = Field("", description="Its unique id.")
    url: Uri = Field("", description="Its page.")


class FineTuneJobStatus(ApiModel):
    """What is known about the job."""

    observed_generation: int = Field(0, description="Generation the status was decided for.")
    phase: JobPhase = Field(JobPhase.PENDING, description="One word for printing.")
    attempt: int = Field(0, description="Number of the newest attempt.")
    start_time: Time | None = Field(None, description="When the first attempt was submitted.")
    completion_time: Time | None = Field(None, description="When the job ended.")
    restarts: Restarts = Field(Restarts(), description="Restarts so far.")
    nodes: NodesStatus = Field(NodesStatus(), description="Nodes wanted and ready.")
    plan: PlanStatus | None = Field(None, description="What was chosen for the job.")
    progress: ProgressStatus | None = Field(None, description="What rank 0 published last.")
    checkpoint: CheckpointLedger = Field(
        CheckpointLedger(), description="The checkpoints that matter."
    )
    attempts: Annotated[list[AttemptStatus], Field(max_length=10)] = Field(
        [], description="Newest ten attempts."
    )
    backend_ref: BackendRef | None = Field(
        None, description="What the backend made for the current attempt."
    )
    folders: Annotated[list[Uri], Field(max_length=16)] = Field(
        [], description="What the current attempt was opened to write; no other job may."
    )
    artifacts: Annotated[list[Uri], Field(max_length=16)] = Field(
        [], description="What was exported."
    )
    conditions: Annotated[list[Condition], Field(max_length=32)] = Field(
        list(FIRST_CONDITIONS),
        description="Conditions, one a type.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    )
