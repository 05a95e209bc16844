"""The lifecycle of a job: checkpoints, output, restarts, deadlines, queue and reports."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from finetune_operator.api.placeholders import ONLY_KNOWN
from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.inputs import Source, Uri
from finetune_operator.api.v1alpha1.pod_fields import JOB_POD_SPEC
from finetune_operator.api.v1alpha1.trackers import TrackerSpec
from finetune_operator.api.v1alpha1.training import INT32_MAX

Seconds = Annotated[int, Field(ge=1, le=INT32_MAX)]
LabelValue = Annotated[str, Field(max_length=63)]
AnnotationValue = Annotated[str, Field(max_length=4096)]
_MATCHES_PERMANENT = (
    "(has(self.onClass) && self.onClass in ['DataError', 'ConfigError', 'DoNotRestart']) || "
    "(has(self.onExitCodes) && self.onExitCodes.exists(code, code in [65, 78, 93]))"
)
_IS_RANGE = "self.steps.matches('^[1-9][0-9]{0,8}-[1-9][0-9]{0,8}$')"


class CheckpointSpec(ApiModel):
    """Checkpoints: location, interval, number, and the checkpoint to start from."""

    uri: Source | None = None
    """Folder of the checkpoints, not shared with other jobs; local and azureml have a default. In
    every URI {namespace} and {name} stand for the namespace and name of the job:
    pvc://checkpoints/{name}."""
    enabled: bool | None = None
    """false writes no checkpoints and needs no space for them: a run that is stopped, or loses a
    node, starts again from the beginning. Absent means true."""
    every_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Optimizer steps between two checkpoints. Without everySteps and everySeconds the interval
    follows from meanTimeBetweenFailures. The last step, and a stop of the job, always write a
    checkpoint."""
    every_seconds: Seconds | None = None
    """Seconds between two checkpoints."""
    mean_time_between_failures: Seconds | None = None
    """Mean time in seconds until an attempt is lost. Together with the measured cost of a save it
    determines the interval that loses the least time (Young, Daly). Absent means 7200 for capacity
    spot and spotPreferred, else 86400."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Number of committed checkpoints to retain, newest first."""
    resume_from: Annotated[
        Uri,
        Rule(
            "self in ['auto', 'none'] || self.matches('^(hf|azureml|pvc|file|https)://.+')",
            "must be auto, none or the URI of a checkpoint",
        ),
        ONLY_KNOWN,
    ] = "auto"
    """auto (newest committed checkpoint), none, or the URI of a checkpoint."""
    allow_foreign: bool = False
    """Load the checkpoint that resumeFrom names even if another job has written it. The deleted job
    that takeOver continues is not another job. In a cluster, the profile's allow.foreignCheckpoints
    is required, and suffices."""

    cel_rules = (
        Rule(
            "!has(self.enabled) || self.enabled || !(has(self.everySteps) || "
            "has(self.everySeconds) || has(self.meanTimeBetweenFailures))",
            "disables checkpoints, so everySteps, everySeconds and meanTimeBetweenFailures have no "
            "effect; remove them",
            field="enabled",
        ),
        Rule(
            "!self.allowForeign || !(self.resumeFrom in ['auto', 'none'])",
            "has no effect unless resumeFrom is the URI of a checkpoint; set resumeFrom, or remove "
            "allowForeign",
            field="allowForeign",
        ),
        Rule(
            "!has(self.meanTimeBetweenFailures) || "
            "!(has(self.everySteps) || has(self.everySeconds))",
            "has no effect with everySteps or everySeconds, which set the interval; remove it, or "
            "both of them",
            field="meanTimeBetweenFailures",
        ),
    )


class OutputFormat(StrEnum):
    """Format of the trained model."""

    ADAPTER = "adapter"
    MERGED = "merged"
    BOTH = "both"


class OutputDtype(StrEnum):
    """Dtype of an exported model."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class OutputSpec(ApiModel):
    """Location and format of the trained model."""

    uri: Source | None = None
    """Folder of the trained model, not shared with other jobs; local and azureml have a default.
    {namespace} and {name} stand for the namespace and name of the job."""
    format: OutputFormat | None = None
    """adapter, merged (adapter merged into the base model), or both; absent means adapter for lora
    and qlora, the whole model for full."""
    dtype: OutputDtype | None = None
    """Dtype of a whole model. auto, which is the default, takes the dtype of the base model's
    files, or float32 if less than 95 % of the update of full fine-tuning would survive the
    rounding."""


class RestartAction(StrEnum):
    """Action after a matching failure."""

    FAIL = "Fail"
    RESTART = "Restart"
    RESTART_FREE = "RestartFree"


class RestartRule(ApiModel):
    """A restart rule; the first rule that matches applies."""

    on_class: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Failure class to match, such as OutOfMemory."""
    on_exit_codes: (
        Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] | None
    ) = None
    """Exit codes of the main process to match."""
    action: RestartAction
    """Fail, Restart (counted) or RestartFree; the last is not possible after DataError, ConfigError
    and DoNotRestart."""

    cel_rules = (
        Rule(
            "has(self.onClass) || has(self.onExitCodes)",
            "never matches, because it has neither a failure class nor an exit code; set onClass "
            "or onExitCodes",
        ),
        Rule(
            "!has(self.onClass) || self.onClass != 'Overtaken' || self.action == 'Fail'",
            "is not possible after Overtaken, because another attempt writes to the same folders; "
            "remove the rule",
            field="action",
        ),
        Rule(
            f"self.action != 'RestartFree' || !({_MATCHES_PERMANENT})",
            "is not possible after DataError, ConfigError or DoNotRestart (exit codes 65, 78 and "
            "93), which would recur indefinitely; use Restart, or Fail",
            field="action",
        ),
    )


class RestartBackoff(ApiModel):
    """Delay before a counted restart: base, doubled each time, at most max."""

    base_seconds: Annotated[int, Field(ge=0, le=86_400)] = 0
    """Delay before the first counted restart, in seconds."""
    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Maximum delay, in seconds."""

    cel_rules = (
        Rule(
            "self.baseSeconds <= self.maxSeconds",
            "must be at most maxSeconds; reduce it",
            field="baseSeconds",
        ),
    )


class RestartPolicy(ApiModel):
    """When a failed attempt is restarted."""

    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Maximum restarts after faults; preemptions do not count."""
    max_disruptions: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Maximum restarts after preemptions; absent means no limit."""
    restarts_in_place: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of times an attempt on a single node restarts its ranks after a fault of a rank before
    the attempt fails. Such restarts are not counted."""
    rules: Annotated[list[RestartRule], Field(max_length=20)] = Field([])
    """Exceptions by failure class or exit code; the first match applies."""
    backoff: RestartBackoff = RestartBackoff()
    """Delay before a counted restart."""


class Deadlines(ApiModel):
    """Time limits in seconds."""

    pending_seconds: Seconds | None = None
    """Maximum wait for resources before the job fails, over consecutive attempts that never had
    all of their nodes; time in a queue does not count."""
    active_seconds: Seconds | None = None
    """Maximum duration of the job over all attempts."""
    hang_seconds: Seconds | None = None
    """Maximum time without progress before an attempt logs the stack of every rank and fails;
    absent means no limit. Must be longer than the slowest phase, such as loading."""
    termination_grace_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Time between SIGTERM and SIGKILL; must be long enough to write a checkpoint."""


class QueueSpec(ApiModel):
    """Kueue queue and priority."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Kueue LocalQueue of the job."""
    priority_class: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Kueue WorkloadPriorityClass of the job."""


class ProfileSpec(ApiModel):
    """Steps of an attempt that torch.profiler records."""

    steps: Annotated[
        str,
        Rule(
            "self.matches('^[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?$')",
            "must be a step or a range of steps; write 10 or 10-12",
        ),
        Field(max_length=19),
    ]
    """Steps to record, counted from 1: 10 or 10-12. At most 10 steps."""
    ranks: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(min_length=1, max_length=64)
        ]
        | None
    ) = None
    """Ranks that record, each into its own file; absent means rank 0."""
    stacks: bool | None = None
    """Record the Python stack of each operator. Absent means false."""
    memory: bool | None = None
    """Record the stack of each allocation of GPU memory from the start, and write a snapshot of the
    memory after the steps and when it runs out. Requires GPUs. Absent means false."""
    nvtx: bool | None = None
    """Mark the steps and phases for Nsight Systems, which then records the GPU in place of
    torch.profiler. Requires GPUs. Absent means false."""

    cel_rules = (
        Rule(
            f"!{_IS_RANGE} || int(self.steps.split('-')[0]) <= int(self.steps.split('-')[1])",
            "must not end before it begins; write the first step, a hyphen and the last step",
            field="steps",
        ),
        Rule(
            f"!{_IS_RANGE} || int(self.steps.split('-')[1]) - int(self.steps.split('-')[0]) < 10",
            "must have at most 10 steps; choose fewer",
            field="steps",
        ),
    )


class Observability(ApiModel):
    """Metrics, status updates and sample prompts."""

    metrics_port: Annotated[int, Field(ge=1024, le=65_535)] = 9400
    """Port of /metrics on each node, and of /progress on the node of rank 0."""
    status_interval_seconds: Annotated[int, Field(ge=5, le=3600)] = 15
    """Minimum time between two updates of progress in the status."""
    sample_prompts: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=4)
    ] = Field([])
    """Prompts that the model completes before and after training."""
    collective_timings: bool = False
    """Measure NCCL collectives on the GPU, for finetune_comm_duration_seconds_total; can slow down
    overlapping work. Requires GPUs; collectives between CPUs are always measured."""
    profile: ProfileSpec | None = None
    """Steps that torch.profiler records. The files are in run/profiles of the checkpoint folder."""
    trackers: Annotated[list[TrackerSpec], Field(min_length=1, max_length=2)] | None = None
    """Experiment trackers that get the curves, each type at most once. All attempts of a job are
    one run there, whose page is in status.trackers."""

    cel_rules = (
        Rule(
            "!has(self.trackers) || self.trackers.all(one, self.trackers.exists_one(other, "
            "other.type == one.type))",
            "must have each type at most once; remove the others",
            field="trackers",
        ),
    )


class PodTemplateMetadata(ApiModel):
    """Labels and annotations added to every pod."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field({})
    """Labels added to every pod."""
    annotations: Annotated[dict[str, AnnotationValue], Field(max_length=64)] = Field({})
    """Annotations added to every pod."""


class PodTemplate(ApiModel):
    """Additions to the pods; fields that the operator sets take precedence."""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any], Field(max_length=64)] = Field(
        {}, json_schema_extra=JOB_POD_SPEC
    )
    """Fields of a PodSpec."""
