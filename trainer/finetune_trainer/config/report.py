"""Results of a run: exit codes, progress and termination message."""

from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError
from pydantic_core import from_json

from finetune_trainer.config.contract_model import ContractModel


class ExitCode(IntEnum):
    """Exit codes of the main process of a node."""

    DONE = 0
    ERROR = 1
    DATA = 65
    PREEMPTED = 75
    CONFIG = 78
    DO_NOT_RESTART = 93
    KILLED = 137


class FailureClass(StrEnum):
    """Why an attempt ended; the restart policy depends on it."""

    COMPLETED = "Completed"
    DATA_ERROR = "DataError"
    PREEMPTED = "Preempted"
    CONFIG_ERROR = "ConfigError"
    DO_NOT_RESTART = "DoNotRestart"
    OUT_OF_MEMORY = "OutOfMemory"
    WORKER_LOST = "WorkerLost"
    HUNG = "Hung"
    OVERTAKEN = "Overtaken"
    SERVICE_FAILED = "ServiceFailed"  # the backend reports that its service failed
    EVICTED = "Evicted"  # the cluster reports that the pod exceeded a limit of its own
    NODE_LOST = "NodeLost"  # the cluster reports that the node is lost
    REJECTED = "Rejected"  # the kubelet refused the pod
    NOT_STARTED = "NotStarted"  # the trainer could not be started
    UNKNOWN = "Unknown"  # the backend reports that the cause is not known
    ERROR = "Error"


class Phase(StrEnum):
    """Current activity of the trainer; shown in progress.json, in logs and in the live view."""

    STARTING = "Starting"
    TOKENIZING = "Tokenizing"
    LOADING = "Loading"
    EVALUATING = "Evaluating"
    ANSWERING = "Answering"
    TRAINING = "Training"
    SAVING = "Saving"
    EXPORTING = "Exporting"
    STOPPING = "Stopping"
    DONE = "Done"


Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of things; JSON's integers are exact up to this limit."""
Seconds = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
"""Seconds on a clock that may be set back."""
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]
"""Seconds since the epoch, before the year 10000, where `datetime` ends."""


class CheckpointRef(ContractModel):
    """A committed checkpoint in the ledger."""

    step: Count
    path: str
    time: Moment = Field(description="Seconds since the epoch.")
    world_size: Count
    eval_loss: float | None = None


class SampleAnswer(ContractModel):
    """A prompt of `observability.samplePrompts`, answered before and after training."""

    prompt: str
    before: str | None = None
    after: str | None = None


class ProfileReport(ContractModel):
    """A profile that was written, or could not be written."""

    first_step: Count
    last_step: Count
    path: str = Field(description="Folder of the files, one per profiled rank.")
    error: str | None = Field(None, description="Why the file of rank 0 is missing.")


class TrackerRun(ContractModel):
    """The run in an experiment tracker."""

    type: Annotated[str, Field(max_length=64)]
    url: Annotated[str, Field(max_length=512)] = Field(description="Page of the run.")


class PlanReport(ContractModel):
    """Values that the trainer has chosen for settings with `auto`, beside the other settings."""

    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3"]
    replicas: Annotated[int, Field(ge=1, le=2**31)] = 1
    activation_checkpointing: Literal["none", "selective", "full"]
    micro_batch_size: Annotated[int, Field(ge=1, le=2**31)]
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=2**31)]
    precision: Literal["bf16", "fp16", "fp32", "fp64"]
    peak_bytes: Annotated[Count, Field(ge=1)] | None = Field(
        None, description="Tensors of a step on each rank by the formula; null if not known."
    )
    usable_bytes: Count = Field(description="Memory of the rank that has the least.")
    lower_peak_bytes: Annotated[Count, Field(ge=1)] | None = Field(
        None, description="Peak of the next choice after an OutOfMemory; null if there is none."
    )


class DataReport(ContractModel):
    """Counts of the rows, including truncated rows."""

    rows: int = 0
    sequences: int = 0
    tokens: int = 0
    label_tokens: int = 0
    truncated_rows: int = 0
    split_rows: int = 0
    rows_without_labels: int = 0
    packs: int = 0
    fill_ratio: float = Field(1.0, description="Share of a pack's positions that hold tokens.")
    warnings: tuple[str, ...] = Field((), description="Warnings about the rows.")


class TimeSpent(ContractModel):
    """Seconds of rank 0's process by activity; they sum to its age.

    After a restart in place they start at 0 again.
    """

    starting: Seconds = Field(0.0, description="Until it trains: imports, tokenizing, loading.")
    training: Seconds = Field(0.0, description="Computing and communicating.")
    data: Seconds = Field(0.0, description="Waiting for rows.")
    checkpoint: Seconds = Field(0.0, description="Training waited for a checkpoint.")
    evaluation: Seconds = Field(0.0, description="Held-out loss and sample prompts.")
    exporting: Seconds = 0.0
    other: Seconds = 0.0


SPENT_AS = {
    Phase.STARTING: "starting",
    Phase.TOKENIZING: "starting",
    Phase.LOADING: "starting",
    Phase.EVALUATING: "evaluation",
    Phase.ANSWERING: "evaluation",
    Phase.TRAINING: "training",
    Phase.SAVING: "checkpoint",
    Phase.STOPPING: "checkpoint",
    Phase.EXPORTING: "exporting",
    Phase.DONE: "other",
}
"""Field of `TimeSpent` for the time of a phase; waiting times of steps are subtracted."""


class SuspectCause(StrEnum):
    """Activity of a rank while the others wait for it."""

    COMPUTE = "compute"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    STUCK = "stuck"


class Suspect(ContractModel):
    """A rank that holds the others back."""

    rank: Count
    node: str = Field(description="Name of its node in the cluster, or of its machine.")
    cause: SuspectCause
    score: float | None = Field(
        None,
        description="Its busy time relative to the others' median, 1.2 is 20 % longer; null for a "
        "rank that is missing from a collective.",
    )
    since: Moment = Field(description="When this began, seconds since the epoch.")
    process: str | None = Field(
        None, description="State of the process of a missing rank: asleep, stopped, gone."
    )
    evidence: str | None = Field(
        None, description="Folder of stacks and recorder dumps, below the run directory."
    )


MAX_SUSPECTS = 5
SUSPECTS_FILE = "suspects.json"


class Progress(ContractModel):
    """progress.json and `GET /progress`: state of the run as known to rank 0."""

    attempt: Count = 1
    phase: Phase = Phase.STARTING
    time: Moment = Field(0.0, description="When this was written, seconds since the epoch.")
    waits_for: Annotated[str, Field(max_length=500)] | None = Field(
        None, description="A sentence about the ranks that rank 0 waits for before it trains."
    )
    step: Count = 0
    total_steps: Count | None = None
    resumed_step: Count | None = Field(None, description="Step of the checkpoint started from.")
    epoch: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    eval_loss_before: float | None = None
    eval_loss: float | None = None
    exported_step: Count | None = Field(
        None,
        description="Step of the exported weights if early stopping went back to an earlier one; "
        "`loss` and `eval_loss` are then of that step.",
    )
    tokens_per_second: float | None = Field(None, description="Non-padding tokens, all ranks.")
    eta_seconds: Seconds | None = None
    skipped_steps: Count = Field(0, description="Steps skipped because a gradient was not finite.")
    restarts_in_place: Count = 0
    first_step_seconds: Seconds | None = Field(
        None, description="Process start to the end of the first new step, without evaluation."
    )
    spent: TimeSpent | None = Field(None, description="Where rank 0's time went.")
    checkpoint: CheckpointRef | None = None
    best_checkpoint: CheckpointRef | None = None
    samples: tuple[SampleAnswer, ...] = ()
    train_data: DataReport | None = None
    eval_data: DataReport | None = None
    metrics_url: str | None = None
    plan: PlanReport | None = Field(None, description="What `auto` chose; null without `auto`.")
    profile: ProfileReport | None = Field(None, description="The newest profile of this attempt.")
    transport: str | None = Field(
        None, description="Transports between the GPUs, such as NET/IB,P2P; null if not known."
    )
    trackers: Annotated[tuple[TrackerRun, ...], Field(max_length=8)] | None = Field(
        None, description="The run in its trackers, once they have it."
    )
    warnings: tuple[str, ...] = ()
    suspects: Annotated[tuple[Suspect, ...], Field(max_length=MAX_SUSPECTS)] = Field(
        (), description="Ranks that now hold the others back, found by the page of rank 0's node."
    )

    @classmethod
    def of_any_version(cls, text: bytes) -> Self:
        """Return progress that another version may have written.

        Fields that this version cannot read are left out.

        Raises:
            pydantic.ValidationError: The text is not progress, or an essential field is invalid.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            strange = {one["loc"][0] for one in error.errors() if one["loc"]}
            if not strange or strange & _ESSENTIAL:
                raise
            values = from_json(text)
            return cls.model_validate({key: values[key] for key in values if key not in strange})


class Suspects(ContractModel):
    """suspects.json beside progress.json, while there are suspects.

    The page of rank 0's node writes it, because rank 0 may be a suspect.
    """

    attempt: int
    suspects: Annotated[tuple[Suspect, ...], Field(max_length=MAX_SUSPECTS)] = ()


def read_progress(run_dir: Path) -> Progress:
    """Return the progress in a run directory, with the suspects of the same attempt.

    Raises:
        OSError: There is no progress yet, or it cannot be read.
        pydantic.ValidationError: One of the files is invalid.
    """
    progress = Progress.read(run_dir / "progress.json")
    try:
        found = Suspects.read(run_dir / SUSPECTS_FILE)
    except FileNotFoundError:
        return progress
    if found.attempt != progress.attempt:
        return progress
    return progress.model_copy(update={"suspects": found.suspects})


_ESSENTIAL = frozenset({"attempt", "phase", "time", "step"})


class Termination(ContractModel):
    """End of an attempt, written to `TrainConfig.termination_path`."""

    failure_class: FailureClass
    exit_code: int
    message: str = Field(description="A sentence with the problem and the remedy.")
    step: int = 0
    rank: int | None = Field(None, description="The rank whose failure is the root cause, if any.")
    checkpoint: CheckpointRef | None = None
    artifacts: tuple[str, ...] = ()
    progress: Progress | None = None
    is_gpu_memory: bool | None = Field(
        None, description="true if the memory of a GPU was exhausted; null otherwise."
    )
