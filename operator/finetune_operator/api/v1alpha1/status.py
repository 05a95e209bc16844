"""`status` of a FineTuneJob; written by the controller alone."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.time_ledger import TimeLedger

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

    type: Annotated[str, Field(max_length=316)]
    """Which condition."""
    status: Annotated[str, Field(max_length=7)]
    """True, False or Unknown."""
    reason: Annotated[str, Field(max_length=1024)]
    """One CamelCase word."""
    message: Annotated[str, Field(max_length=32_768)] = ""
    """One sentence."""
    last_transition_time: Time | None = None
    """When status last changed, RFC 3339."""
    observed_generation: int | None = None
    """Generation this was decided for."""


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

    counted: int = 0
    """After faults; limited by maxRestarts."""
    disruptions: int = 0
    """After preemptions and failures of the service."""


class NodesStatus(ApiModel):
    """Nodes wanted and ready."""

    desired: int = 0
    """Nodes of the current attempt."""
    ready: int = 0
    """Nodes whose processes run."""
    world_size: int = 0
    """Ranks of the current attempt."""


class PlanStatus(ApiModel):
    """What was chosen for the job."""

    strategy: Text = ""
    """Strategy in use."""
    precision: Text = ""
    """Precision in use."""
    micro_batch_size: int = 0
    """Sequences of one forward pass on one rank."""
    gradient_accumulation_steps: int = 0
    """Forward passes of a step."""
    reasons: Annotated[list[Text], Field(max_length=16)] = Field([])
    """Why these were chosen."""


class ProgressStatus(ApiModel):
    """What rank 0 published last."""

    step: int = 0
    """Optimizer steps done."""
    total_steps: int | None = None
    """Optimizer steps in all."""
    epoch: float = 0.0
    """Passes over the data set so far."""
    loss: float | None = None
    """Training loss of the newest step."""
    eval_loss: float | None = None
    """Newest held-out loss."""
    tokens_per_second: float | None = None
    """Non-padding tokens, all ranks."""
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1."""
    eta_seconds: float | None = None
    """Time to the last step, in seconds."""
    last_update_time: Time | None = None
    """When this was written, RFC 3339."""


class CheckpointEntry(ApiModel):
    """One committed checkpoint."""

    step: int
    """Optimizer step it was taken after."""
    uri: Uri
    """Where it is."""
    time: Time
    """When it was committed."""
    world_size: int
    """Ranks that wrote it."""
    eval_loss: float | None = None
    """Held-out loss at that step."""


class CheckpointLedger(ApiModel):
    """The checkpoints that matter."""

    last: CheckpointEntry | None = None
    """Newest committed checkpoint."""
    best: CheckpointEntry | None = None
    """Lowest held-out loss."""


class AttemptStatus(ApiModel):
    """One attempt, newest 10 are kept."""

    number: int
    """Counts up over restarts and resumes."""
    start_time: Time | None = None
    """When it was submitted."""
    stop_deadline: Time | None = None
    """When what is left of it is killed, once it was asked to stop."""
    end_time: Time | None = None
    """When its last process was gone."""
    failure_class: Annotated[str, Field(max_length=64)] | None = None
    """Why it ended."""
    message: Text = ""
    """Its termination message."""
    node: Annotated[str, Field(max_length=253)] | None = None
    """Node of the rank whose failure is the root cause."""
    exit_code: int | None = None
    """Exit code of the main process."""
    resumed_step: int | None = None
    """Step of the checkpoint it started from."""
    disruptions: int | None = None
    """How often its service moved it."""
    url: Uri | None = None
    """Its page, also after its end."""
    digest: Annotated[str, Field(max_length=64)] | None = None
    """SHA-256 of what later attempts keep of it, such as its profile."""


class SuspectStatus(ApiModel):
    """A rank that holds the others back."""

    rank: Annotated[int, Field(ge=0)]
    """Its rank."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Its node."""
    cause: Annotated[str, Field(max_length=64)]
    """What it does while the others wait: compute, data, checkpoint, or stuck."""
    score: float | None = None
    """Its busy time by the median of the others'; none where it stays away from a collective."""
    since: Time
    """When it began, RFC 3339."""
    message: Text = ""
    """The same in one sentence, with what more is known."""


class BackendRef(ApiModel):
    """What the backend made for the current attempt."""

    kind: Text
    """Kind of the thing."""
    name: Text
    """Its name."""
    uid: Text = ""
    """Its unique id."""
    url: Uri = ""
    """Its page."""


class FineTuneJobStatus(ApiModel):
    """What is known about the job."""

    observed_generation: int = 0
    """Generation the status was decided for."""
    phase: JobPhase = JobPhase.PENDING
    """One word for printing."""
    attempt: int = 0
    """Number of the newest attempt."""
    start_time: Time | None = None
    """When the first attempt was submitted."""
    completion_time: Time | None = None
    """When the job ended."""
    restarts: Restarts = Restarts()
    """Restarts so far."""
    nodes: NodesStatus = NodesStatus()
    """Nodes wanted and ready."""
    plan: PlanStatus | None = None
    """What was chosen for the job."""
    progress: ProgressStatus | None = None
    """What rank 0 published last."""
    suspects: Annotated[list[SuspectStatus], Field(max_length=5)] = Field([])
    """Ranks that hold the newest attempt back."""
    checkpoint: CheckpointLedger = CheckpointLedger()
    """The checkpoints that matter."""
    ledger: TimeLedger | None = None
    """Where the time went; written with whatever else is written."""
    attempts: Annotated[list[AttemptStatus], Field(max_length=10)] = Field([])
    """Newest ten attempts."""
    backend_ref: BackendRef | None = None
    """What the backend made for the current attempt."""
    folders: Annotated[list[Uri], Field(max_length=16)] = Field([])
    """What the current attempt was opened to write; no other job may."""
    artifacts: Annotated[list[Uri], Field(max_length=16)] = Field([])
    """What was exported."""
    conditions: Annotated[list[Condition], Field(max_length=32)] = Field(
        list(FIRST_CONDITIONS),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions, one a type."""
