"""`FineTuneJob`, and the rules that read several parts of its spec."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from finetune_operator.api.placeholders import with_names
from finetune_operator.api.schema import ApiModel, OmitDefault, Rule
from finetune_operator.api.v1alpha1.inputs import DatasetSpec, ModelSpec
from finetune_operator.api.v1alpha1.lifecycle import (
    CheckpointSpec,
    Deadlines,
    Observability,
    OutputSpec,
    PodTemplate,
    QueueSpec,
    RestartPolicy,
)
from finetune_operator.api.v1alpha1.method import MethodSpec, StrategySpec
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.api.v1alpha1.topology import BackendSpec, Capacity, TopologySpec
from finetune_operator.api.v1alpha1.training import INT32_MAX, TrainingSpec
from finetune_operator.api.v1alpha1.transitions import (
    BACKEND_NEVER_CHANGES,
    NEVER_CHANGES,
    changes_only_while_suspended,
)

MANAGED_BY = "finetune.dev/operator"

_PROCESSES = (
    "(self.topology.gpusPerNode > 0 ? self.topology.gpusPerNode : "
    "has(self.topology.processesPerNode) ? self.topology.processesPerNode : 1)"
)
_RANKS = f"(self.topology.nodes * {_PROCESSES})"
# auto may choose 1, so 1 must be valid
_MICRO_BATCH = "(type(self.training.microBatchSize) == int ? int(self.training.microBatchSize) : 1)"
_PARALLEL = "(self.strategy.tensorParallel * self.strategy.pipelineParallel)"
_STEP = f"({_RANKS} * {_MICRO_BATCH} / {_PARALLEL})"
_BELOW = f"(self.training.globalBatchSize / {_STEP} * {_STEP})"
_BATCH_DETAIL = (
    f"'(' + string(self.topology.nodes) + ' x ' + string({_PROCESSES}) + ' x ' + "
    f"string({_MICRO_BATCH}) + '); use ' + "
    f"({_BELOW} > 0 ? string({_BELOW}) + ' or ' : '') + string({_BELOW} + {_STEP})"
)

_NAMES_BACKEND = "has(self.backend) && has(self.backend.type)"
_ON_CLUSTER = f"(!({_NAMES_BACKEND}) || self.backend.type in ['kubernetes', 'aks', 'azureml'])"
# On Azure ML, checkpoints without a URI are stored in the datastore of the profile.
_KEEPS_CHECKPOINTS = (
    f"(has(self.checkpoint.uri) || ({_NAMES_BACKEND} && self.backend.type == 'azureml'))"
)
_LOCAL_ONLY = (
    "is a path on this machine, which only backend type local can read; "
    "use backend.type: local or another source"
)


def _local_only(field: str, *optional: str) -> Rule:
    """Return the rule that refuses a path on the local machine for a cluster."""
    absent = "".join(f"!has(self.{one}) || " for one in optional)
    return Rule(
        f"{absent}!self.{field}.startsWith('file://') || !{_ON_CLUSTER}", _LOCAL_ONLY, field=field
    )


def _needs_gpu(field: str, *optional: str) -> Rule:
    """Return the rule that refuses a flag on the CPU; `optional` fields may be absent."""
    absent = "".join(f"!has(self.{one}) || " for one in optional)
    return Rule(
        f"self.topology.gpusPerNode > 0 || {absent}!self.{field}",
        "requires GPUs, but topology.gpusPerNode is 0; remove it",
        field=field,
    )


class FineTuneJobSpec(ApiModel):
    """Model, data set, method and resources of a fine-tuning job."""

    model: ModelSpec
    """The base model."""
    dataset: DatasetSpec
    """The rows to train and to evaluate on."""
    method: MethodSpec = MethodSpec()
    """Full fine-tuning, LoRA or QLoRA."""
    strategy: StrategySpec = StrategySpec()
    """How the ranks share the model."""
    training: TrainingSpec
    """Batch size, steps, learning rate and precision."""
    topology: TopologySpec = TopologySpec()
    """Nodes, GPUs and processes of an attempt."""
    capacity: Capacity = Capacity.ON_DEMAND
    """onDemand, spot, or spotPreferred (spot if available)."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Location and interval of checkpoints."""
    output: OutputSpec = OutputSpec()
    """Location and format of the trained model."""
    restart_policy: RestartPolicy = RestartPolicy()
    """When a failed attempt is restarted."""
    deadlines: Deadlines = Deadlines()
    """Limits in seconds."""
    take_over: bool = False
    """Continue in the folders of the deleted job of the same namespace and name, from its newest
    checkpoint (with checkpoint.resumeFrom none from the start). false refuses folders in which
    another job has written. No attempt starts while a pod of the deleted job is alive."""
    suspend: bool = False
    """Stop with a checkpoint and wait; false resumes the job."""
    queue: QueueSpec | None = None
    """Kueue queue and priority."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """Delete the job this many seconds after it finishes; absent keeps the job. Do not set it for
    jobs in Git: the tool that applies them would create the job again."""
    observability: Observability = Observability()
    """Metrics, status updates and sample prompts."""
    pod_template: PodTemplate | None = None
    """Additions to the pods; fields that the operator sets take precedence."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63), NEVER_CHANGES] = MANAGED_BY
    """Controller that manages the job; other controllers ignore the job."""
    backend: Annotated[BackendSpec, OmitDefault()] = BackendSpec()
    """Backend that runs the job; absent means kubernetes."""

    cel_reads = (
        "topology.gpusPerNode",
        "method.type",
        "strategy.tensorParallel",
        "strategy.pipelineParallel",
        "method",
        "training",
        "topology",
        "strategy",
        "checkpoint",
        "dataset",
    )
    cel_rules = (
        Rule(
            "self.method.type != 'full' || !has(self.output) || !has(self.output.format) || "
            "self.output.format == 'merged'",
            "requires an adapter, but method type full trains none; remove it",
            field="output.format",
        ),
        Rule(
            "self.method.type == 'full' || !has(self.output) || !has(self.output.dtype) || "
            "self.output.dtype == 'auto' || "
            "(has(self.output.format) && self.output.format != 'adapter')",
            "has no effect on an adapter; set output.format to merged or both, or remove it",
            field="output.dtype",
        ),
        Rule(
            "has(self.dataset.evalSource) || has(self.dataset.evalSplit) || "
            "has(self.dataset.evalShare) || !has(self.training.evalEverySteps)",
            "has no effect without held-out rows; set dataset.evalShare, dataset.evalSource or "
            "dataset.evalSplit, or remove it",
            field="training.evalEverySteps",
        ),
        Rule(
            f"self.capacity == 'onDemand' || {_KEEPS_CHECKPOINTS}",
            "requires checkpoint.uri, because an eviction would otherwise lose all work; set "
            "checkpoint.uri",
            field="capacity",
        ),
        Rule(
            f"!has(self.topology.minNodes) || {_KEEPS_CHECKPOINTS}",
            "requires checkpoint.uri, because a restart on fewer nodes would otherwise lose all "
            "work; set checkpoint.uri",
            field="topology.minNodes",
        ),
        Rule(
            f"{_PARALLEL} == 1 || {_RANKS} % {_PARALLEL} == 0",
            "times pipelineParallel must divide nodes x processes; change one of them",
            field="strategy.tensorParallel",
        ),
        Rule(
            f"self.training.globalBatchSize * {_PARALLEL} % ({_RANKS} * {_MICRO_BATCH}) == 0",
            "must be a multiple of nodes x processes x micro-batch",
            field="training.globalBatchSize",
            detail=_BATCH_DETAIL,
        ),
        Rule(
            "self.strategy.replicas == 1 || self.strategy.type != 'fsdp' || "
            f"({_RANKS} % self.strategy.replicas == 0 && {_RANKS} > self.strategy.replicas)",
            "must divide nodes x processes into groups of at least two; use 1, or another divisor",
            field="strategy.replicas",
        ),
        Rule(
            "self.method.type != 'qlora' || self.strategy.type != 'zero3'",
            "cannot shard the quantized base of method type qlora; use ddp, or fsdp to shard it",
            field="strategy.type",
        ),
        Rule(
            "!has(self.method.quantization) || self.method.quantization != 'int8' || "
            "self.strategy.type != 'fsdp'",
            "cannot be sharded by strategy type fsdp; use nf4, or type ddp",
            field="method.quantization",
        ),
        Rule(
            "self.method.type == 'full' || !self.training.float8",
            "requires method type full; remove it",
            field="training.float8",
        ),
        Rule(
            "self.method.type == 'full' || !has(self.training.optimizer) || "
            "self.training.optimizer == 'adamw'",
            "requires method type full, because parameters and moments of adapters are small; use "
            "adamw",
            field="training.optimizer",
        ),
        Rule(
            "self.strategy.type in ['auto', 'ddp', 'fsdp'] || !has(self.training.optimizer) || "
            "self.training.optimizer == 'adamw'",
            "is not supported by DeepSpeed, which has an optimizer of its own; use adamw, or "
            "strategy type fsdp or ddp",
            field="training.optimizer",
        ),
        Rule(
            "!has(self.checkpoint.enabled) || self.checkpoint.enabled || "
            "!has(self.training.earlyStopping)",
            "disables checkpoints, but early stopping returns to the best one; remove "
            "training.earlyStopping, or checkpoint.enabled",
            field="checkpoint.enabled",
        ),
        Rule(
            "!has(self.checkpoint.enabled) || self.checkpoint.enabled || "
            "self.capacity == 'onDemand'",
            "disables checkpoints, so each evicted spot node would lose all work; use capacity "
            "onDemand, or remove checkpoint.enabled",
            field="checkpoint.enabled",
        ),
        Rule(
            "self.restartPolicy.restartsInPlace == 0 || self.topology.nodes == 1",
            "is not supported with several nodes, because no node sees ranks of another node fail; "
            "remove it to restart the whole attempt",
            field="restartPolicy.restartsInPlace",
        ),
        *(
            _needs_gpu(field)
            for field in (
                "training.liger",
                "training.float8",
                "observability.collectiveTimings",
            )
        ),
        *(
            _needs_gpu(field, field)
            for field in ("training.deterministic", "training.expandableSegments")
        ),
        *(
            _needs_gpu(field, "observability.profile", field)
            for field in ("observability.profile.memory", "observability.profile.nvtx")
        ),
        Rule(
            "!has(self.observability.profile) || !has(self.training.maxSteps) || "
            "self.observability.profile.steps.split('-').all(step, "
            "!step.matches('^[1-9][0-9]{0,8}$') || int(step) <= self.training.maxSteps)",
            "must end by training.maxSteps; choose earlier steps",
            field="observability.profile.steps",
        ),
        Rule(
            "!has(self.observability.profile) || !has(self.observability.profile.ranks) || "
            f"self.observability.profile.ranks.all(rank, rank < {_RANKS})",
            "must be less than nodes x processes, because ranks are counted from 0; remove the "
            "others",
            field="observability.profile.ranks",
        ),
        Rule(
            "self.topology.gpusPerNode != 1 || self.topology.nodes > 1 || "
            "!self.observability.collectiveTimings",
            "has no effect with a single GPU, which communicates with no other; remove it",
            field="observability.collectiveTimings",
        ),
        *(_local_only(field) for field in ("model.source", "dataset.source")),
        *(_local_only(field, field) for field in ("dataset.evalSource", "checkpoint.uri")),
        _local_only("output.uri", "output", "output.uri"),
        _local_only("method.lora.startFrom", "method.lora", "method.lora.startFrom"),
        Rule(
            "!has(self.dataset.also) || "
            f"!self.dataset.also.exists(one, one.source.startsWith('file://')) || !{_ON_CLUSTER}",
            "contains a path on this machine, which only backend type local can read; "
            "use backend.type: local or other sources",
            field="dataset.also",
        ),
    )


class ObjectMeta(BaseModel):
    """The parts of Kubernetes object metadata that are read here."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1


class FineTuneJob(ApiModel):
    """A fine-tuning job: one manifest, one status."""

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneJob"] = "FineTuneJob"
    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: FineTuneJobStatus = Field(
        FineTuneJobStatus(),
        # An atomic map has one owner, so managedFields do not list each field, which would cost
        # time on every write.
        json_schema_extra={"x-kubernetes-map-type": "atomic"},
    )

    cel_rules = (
        Rule(
            "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$')",
            "must be at most 50 lower-case letters, digits and hyphens and start with a letter, "
            "because the names of its pods derive from it; rename the job",
            field="metadata.name",
        ),
        # Attempts after the first may have fewer ranks, so the rule applies only before the first.
        Rule(
            "(has(self.status) && self.status.attempt > 0) || "
            "self.spec.strategy.type != 'fsdp' || [self.spec.topology].all(topology, "
            f"{_RANKS.replace('self.topology', 'topology')} > 1)",
            "requires at least two processes, but topology has one; use ddp, or more processes",
            field="spec.strategy.type",
        ),
        changes_only_while_suspended(),
        BACKEND_NEVER_CHANGES,
    )

    @model_validator(mode="before")
    @classmethod
    def _name_itself(cls, value: Any) -> Any:
        return with_names(value) if isinstance(value, dict) else value

    def to_object(self) -> dict[str, Any]:
        """Return the Kubernetes object: camelCase keys, absent fields left out, plain URIs."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")
