"""`status` of a FineTuneJob; only the controller writes it."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.time_ledger import TimeLedger

Text = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=64)]  # RFC 3339
Uri = Annotated[str, Field(max_length=2048)]
MAX_TRANSPORT_LENGTH = 256


class JobPhase(StrEnum):
    """Phase for display; the controller decides by conditions and attempts, never by the phase."""

    PENDING = "Pending"
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    UNKNOWN = "Unknown"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETING = "Deleting"


class Condition(ApiModel):
    """A metav1 condition."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition."""
    status: Annotated[str, Field(max_length=7)]
    """True, False or Unknown."""
    reason: Annotated[str, Field(max_length=1024)]
    """Reason in CamelCase."""
    message: Annotated[str, Field(max_length=32_768)] = ""
    """Message for users."""
    last_transition_time: Time | None = None
    """Time of the last change of status, RFC 3339."""
    observed_generation: int | None = None
    """Generation that the condition was set for."""


def _pending(type_: str, status: str) -> Condition:
    """Return a condition without a time, because a default cannot be the current time."""
    message = "waiting for the controller's first report"
    return Condition(type=type_, status=status, reason="Pending", message=message)


FIRST_CONDITIONS = (_pending("Ready", "Unknown"), _pending("Reconciling", "True"))
"""Conditions of a job before its first reconcile; kstatus reads them as InProgress."""


class Restarts(ApiModel):
    """Number of restarts."""

    counted: int = 0
    """Restarts after faults; limited by maxRestarts."""
    disruptions: int = 0
    """Restarts after preemptions and failures of the service."""


class NodesStatus(ApiModel):
    """Desired and ready nodes."""

    desired: int = 0
    """Nodes of the current attempt."""
    ready: int = 0
    """Nodes with running processes."""
    world_size: int = 0
    """Ranks of the current attempt."""


class PlanStatus(ApiModel):
    """Settings that the planner or, on GPUs, the trainer has chosen."""

    strategy: Text = ""
    """Strategy in use; auto until the trainer has chosen."""
    precision: Text = ""
    """Precision in use; auto until the trainer has chosen."""
    micro_batch_size: int = 0
    """Sequences per forward pass and rank; 0 until the trainer has chosen."""
    gradient_accumulation_steps: int = 0
    """Forward passes per optimizer step; 0 until the trainer has chosen."""
    activation_checkpointing: Text | None = None
    """Recomputation in use; auto until the trainer has chosen."""
    replicas: int | None = None
    """Groups of ranks that each hold the whole model; absent means 1."""
    peak_bytes: int | None = None
    """Memory of a step's tensors on each GPU in bytes, computed by the trainer."""
    usable_bytes: int | None = None
    """Memory of the smallest GPU in bytes."""
    lower_peak_bytes: int | None = None
    """Peak of the choice after an OutOfMemory in bytes; absent if there is none."""
    peak_at_most: int | None = None
    """Largest peak of the next choice in bytes, after an OutOfMemory."""
    lowered: int | None = None
    """Number of choices that an OutOfMemory has replaced."""
    digest: Text | None = None
    """Digest of the fields and the number of ranks for which the trainer chooses."""
    reasons: Annotated[list[Text], Field(max_length=16)] = Field([])
    """Reasons for these settings."""


class ProgressStatus(ApiModel):
    """Latest progress that rank 0 has published."""

    step: int = 0
    """Completed optimizer steps."""
    total_steps: int | None = None
    """Total number of optimizer steps."""
    epoch: float = 0.0
    """Completed passes over the data set."""
    loss: float | None = None
    """Training loss of the latest step."""
    eval_loss: float | None = None
    """Latest held-out loss."""
    tokens_per_second: float | None = None
    """Non-padding tokens per second of all ranks."""
    mfu: float | None = None
    """Model FLOPs utilisation, from 0 to 1."""
    eta_seconds: float | None = None
    """Estimated time until the last step, in seconds."""
    transport: Annotated[str, Field(max_length=MAX_TRANSPORT_LENGTH)] | None = None
    """How NCCL connects the ranks, such as NET/IB,P2P; absent if not known."""
    last_update_time: Time | None = None
    """Time of this progress, RFC 3339."""


class CheckpointEntry(ApiModel):
    """A committed checkpoint."""

    step: int
    """Optimizer step after which it was saved."""
    uri: Uri
    """Location of the checkpoint."""
    time: Time
    """Time of the commit."""
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    eval_loss: float | None = None
    """Held-out loss at that step."""


class CheckpointLedger(ApiModel):
    """Latest and best checkpoint."""

    last: CheckpointEntry | None = None
    """Latest committed checkpoint."""
    best: CheckpointEntry | None = None
    """Checkpoint with the lowest held-out loss."""


class AttemptStatus(ApiModel):
    """An attempt; the status holds the latest 10."""

    number: int
    """Number of the attempt, counted over restarts and resumes."""
    start_time: Time | None = None
    """Time of the submission."""
    stop_deadline: Time | None = None
    """Time at which remaining processes are killed, after a stop was requested."""
    end_time: Time | None = None
    """Time at which the last process had terminated."""
    failure_class: Annotated[str, Field(max_length=64)] | None = None
    """Failure class of the attempt."""
    message: Text = ""
    """Termination message of the attempt."""
    node: Annotated[str, Field(max_length=253)] | None = None
    """Node of the rank whose failure is the root cause."""
    rank: int | None = None
    """Number of that rank."""
    exit_code: int | None = None
    """Exit code of the main process of the attempt."""
    resumed_step: int | None = None
    """Step of the checkpoint that the attempt started from."""
    last_step: int | None = None
    """Last optimizer step that the attempt reported."""
    saved_step: int | None = None
    """Step of the last checkpoint that the attempt reported as saved."""
    disruptions: int | None = None
    """Number of times the service has moved the attempt."""
    url: Uri | None = None
    """Web page of the attempt, also after it has finished."""
    digest: Annotated[str, Field(max_length=64)] | None = None
    """SHA-256 of the settings that later attempts reuse, such as the profile."""


class SuspectStatus(ApiModel):
    """A rank that slows down the other ranks."""

    rank: Annotated[int, Field(ge=0)]
    """Number of the rank."""
    node: Annotated[str, Field(max_length=253)] = ""
    """Node of the rank."""
    cause: Annotated[str, Field(max_length=64)]
    """Activity while the other ranks wait: compute, data, checkpoint, or stuck."""
    score: float | None = None
    """Busy time relative to the median of the other ranks; absent if the rank does not join a
    collective."""
    since: Time
    """Start time, RFC 3339."""
    message: Text = ""
    """Message for users, with more details."""


class TrackerStatus(ApiModel):
    """The run of the job in an experiment tracker."""

    type: Annotated[str, Field(max_length=64)]
    """Kind of the tracker."""
    url: Annotated[str, Field(max_length=512)]
    """Web page of the run."""


class BackendRef(ApiModel):
    """Object of the backend for the current attempt."""

    kind: Text
    """Kind of the object."""
    name: Text
    """Name of the object."""
    uid: Text = ""
    """Uid of the object."""
    url: Uri = ""
    """Web page of the object."""


class FineTuneJobStatus(ApiModel):
    """Observed state of the job."""

    observed_generation: int = 0
    """Generation of the spec that the status describes."""
    phase: JobPhase = JobPhase.PENDING
    """Phase for display."""
    attempt: int = 0
    """Number of the latest attempt."""
    start_time: Time | None = None
    """Time of the first submission."""
    completion_time: Time | None = None
    """Time at which the job finished."""
    restarts: Restarts = Restarts()
    """Number of restarts."""
    nodes: NodesStatus = NodesStatus()
    """Desired and ready nodes."""
    plan: PlanStatus | None = None
    """Settings that the planner has chosen."""
    progress: ProgressStatus | None = None
    """Latest progress that rank 0 has published."""
    suspects: Annotated[list[SuspectStatus], Field(max_length=5)] = Field([])
    """Ranks that slow down the latest attempt."""
    trackers: Annotated[list[TrackerStatus], Field(max_length=8)] | None = None
    """The run of the job in its experiment trackers."""
    checkpoint: CheckpointLedger = CheckpointLedger()
    """Latest and best checkpoint."""
    ledger: TimeLedger | None = None
    """Time by activity; updated with every other change of the status."""
    attempts: Annotated[list[AttemptStatus], Field(max_length=10)] = Field([])
    """Latest ten attempts."""
    backend_ref: BackendRef | None = None
    """Object of the backend for the current attempt."""
    folders: Annotated[list[Uri], Field(max_length=16)] = Field([])
    """Folders that the current attempt may write to; no other job may write to them."""
    artifacts: Annotated[list[Uri], Field(max_length=16)] = Field([])
    """Exported artifacts."""
    conditions: Annotated[list[Condition], Field(max_length=32)] = Field(
        list(FIRST_CONDITIONS),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions, one per type."""
