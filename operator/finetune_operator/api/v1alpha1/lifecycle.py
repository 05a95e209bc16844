"""The life of a job: checkpoints, output, restarts, deadlines, queue, what it reports."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from finetune_operator.api.placeholders import ONLY_KNOWN
from finetune_operator.api.schema import ApiModel, Rule
from finetune_operator.api.v1alpha1.inputs import Source, Uri
from finetune_operator.api.v1alpha1.training import INT32_MAX

Seconds = Annotated[int, Field(ge=1, le=INT32_MAX)]
LabelValue = Annotated[str, Field(max_length=63)]
AnnotationValue = Annotated[str, Field(max_length=4096)]


class CheckpointSpec(ApiModel):
    """Committed checkpoints: where, how often, how many, and which one to start from."""

    uri: Source | None = None
    """Folder of the checkpoints, of this job alone; local and azureml have a default. {namespace}
    and {name} stand for the job's own, in every URI: pvc://checkpoints/{name}."""
    enabled: bool | None = None
    """false makes no checkpoint at all, and wants no room for any: a run that is stopped, or
    loses its node, begins anew. Absent means true."""
    every_steps: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Save every so many optimizer steps; without everySteps and everySeconds the interval follows
    from meanTimeBetweenFailures. The last step, and a stop of the job, make a checkpoint in any
    case."""
    every_seconds: Seconds | None = None
    """Save when so many seconds have passed since the last one."""
    mean_time_between_failures: Seconds | None = None
    """Seconds an attempt lasts on average until it is lost; with the measured cost of a save it
    makes the interval that loses the least time (Young, Daly). Absent means 7200 for capacity spot
    and spotPreferred, else 86400."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest committed checkpoints that are kept."""
    resume_from: Annotated[
        Uri,
        Rule(
            "self in ['auto', 'none'] || self.matches('^(hf|azureml|pvc|file|https)://.+')",
            "must be auto, none or the URI of a checkpoint",
        ),
        ONLY_KNOWN,
    ] = "auto"
    """auto (newest committed checkpoint), none, or the URI of one checkpoint."""
    allow_foreign: bool = False
    """Load the checkpoint that resumeFrom names though another job has written it; the job that
    takeOver goes on with is no other one. In a cluster the profile's allow.foreignCheckpoints has
    to allow it, and is enough."""

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
    """What is exported."""

    ADAPTER = "adapter"
    MERGED = "merged"
    BOTH = "both"


class OutputSpec(ApiModel):
    """The trained model."""

    uri: Source | None = None
    """Folder of the trained model, of this job alone; local and azureml have a default. {namespace}
    and {name} stand for the job's own."""
    format: OutputFormat | None = None
    """adapter, merged (adapter folded into the base), or both; absent means adapter for lora and
    qlora, the whole model for full."""


class RestartAction(StrEnum):
    """What follows a matching failure."""

    FAIL = "Fail"
    RESTART = "Restart"
    RESTART_FREE = "RestartFree"


class RestartRule(ApiModel):
    """One rule; the first that matches decides."""

    on_class: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Failure class, such as OutOfMemory."""
    on_exit_codes: (
        Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(max_length=32)] | None
    ) = None
    """Exit codes of the main process."""
    action: RestartAction
    """Fail, Restart (counted) or RestartFree."""

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
    )


class RestartBackoff(ApiModel):
    """Wait before a counted restart: base, doubled each time, at most max."""

    base_seconds: Annotated[int, Field(ge=0, le=86_400)] = 0
    """Wait before the first counted restart, in seconds."""
    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Longest wait, in seconds."""

    cel_rules = (
        Rule(
            "self.baseSeconds <= self.maxSeconds",
            "must be at most maxSeconds; reduce it",
            field="baseSeconds",
        ),
    )


class RestartPolicy(ApiModel):
    """How often a failed attempt is followed by another."""

    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Restarts after faults; preemptions do not count."""
    max_disruptions: Annotated[int, Field(ge=0, le=10_000)] | None = None
    """Restarts after preemptions; absent means without limit."""
    restarts_in_place: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often an attempt of one node starts its ranks again after a fault of one of them, without
    counting, before the attempt fails."""
    rules: Annotated[list[RestartRule], Field(max_length=20)] = Field([])
    """Exceptions by failure class or exit code; first match wins."""
    backoff: RestartBackoff = RestartBackoff()
    """Wait before a counted restart."""


class Deadlines(ApiModel):
    """Limits in seconds."""

    pending_seconds: Seconds | None = None
    """Longest wait for resources before the job fails; time in a queue does not count."""
    active_seconds: Seconds | None = None
    """Longest life of the job over all attempts."""
    hang_seconds: Seconds | None = None
    """Longest time without progress before an attempt writes every rank's stack to its log and
    fails; absent means no limit. Must be longer than the slowest phase, such as loading."""
    termination_grace_seconds: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Time between SIGTERM and SIGKILL; the checkpoint must fit into it."""


class QueueSpec(ApiModel):
    """Kueue queue and priority."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Local queue the job waits in."""
    priority_class: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Kueue's WorkloadPriorityClass."""


class Observability(ApiModel):
    """What a run reports."""

    metrics_port: Annotated[int, Field(ge=1024, le=65_535)] = 9400
    """Port of each node's /metrics, and of /progress on the node of rank 0."""
    status_interval_seconds: Annotated[int, Field(ge=5, le=3600)] = 15
    """Shortest time between two writes of progress to the status."""
    sample_prompts: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=4)
    ] = Field([])
    """Questions the model answers before and after training."""
    collective_timings: bool = False
    """Have NCCL's collectives timed on the GPU, for finetune_comm_duration_seconds_total; can slow
    down overlapping work. Needs GPUs; collectives between CPUs are always timed."""


class PodTemplateMetadata(ApiModel):
    """Labels and annotations added to every pod."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field({})
    """Labels added to every pod."""
    annotations: Annotated[dict[str, AnnotationValue], Field(max_length=64)] = Field({})
    """Annotations added to every pod."""


class PodTemplate(ApiModel):
    """Merged under the fields the operator owns."""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations of the pods."""
    spec: Annotated[dict[str, Any], Field(max_length=64)] = Field(
        {}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}
    )
    """Parts of a PodSpec."""
