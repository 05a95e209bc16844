"""Derive the trainer's configuration from a plan."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import OutputDtype
from finetune_operator.api.v1alpha1.method import MethodType, Quantization, StrategyType
from finetune_operator.api.v1alpha1.profile import GpuMetrics
from finetune_operator.api.v1alpha1.topology import Capacity, Rdma
from finetune_operator.api.v1alpha1.training import Optimizer
from finetune_operator.errors import BackendError
from finetune_operator.planner.plan import Plan
from finetune_operator.planner.uris import HUB, is_on_hub
from finetune_trainer import config as trainer

# Defaults, in seconds: spot nodes are reclaimed, others fail.
SPOT_MEAN_TIME_BETWEEN_FAILURES = 7_200
MEAN_TIME_BETWEEN_FAILURES = 86_400
GARBAGE_EVERY_STEPS = 50
"""Steps between garbage collections on GPUs, where a rank that collects garbage blocks all others.
"""
SCHEDULED_EVENTS = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
"""URL at which an Azure machine announces its eviction."""

_WHOLE = re.compile(r"-?[0-9]{1,15}")
_FRACTION = re.compile(r"-?[0-9]{1,15}\.[0-9]{1,15}")


@dataclass(frozen=True)
class Locations:
    """Locations of the files of an attempt on a backend, as paths of a rank.

    Attributes:
        path_of: Returns the path of a URI; not called for URIs of the hub.
        allow_foreign: Whether the checkpoint that the job names may belong to another job.
        scheduled_events_url: URL at which the machine announces evictions; None without one.
        gpu_metrics: Source of GPU metrics.
        listing_lag_seconds: As in the trainer's configuration.
        trackers: Trackers that the backend has checked; None on a backend without trackers.
    """

    path_of: Callable[[str], str]
    run_dir: str
    checkpoint_dir: str
    output_dir: str
    cache_dir: str
    termination_path: str
    allow_foreign: bool = False
    threads_per_process: int = 1
    metrics_host: str = "127.0.0.1"
    gpu_metrics: GpuMetrics = GpuMetrics.OWN
    scheduled_events_url: str | None = None
    listing_lag_seconds: float | None = None
    trackers: tuple[trainer.TrackerConfig, ...] | None = None

    def place_of(self, uri: str) -> str:
        """Return the path of a URI, or its name on the hub."""
        return uri.removeprefix(HUB) if is_on_hub(uri) else self.path_of(uri)


def derive_train_config(plan: Plan, attempt: int, locations: Locations) -> trainer.TrainConfig:
    """Return the configuration of an attempt of `plan`, with all settings chosen; pure.

    Raises:
        BackendError: The job has trackers, which its backend does not support.
    """
    job, spec = plan.job, plan.job.spec
    if spec.observability.trackers and locations.trackers is None:
        raise BackendError(
            f"spec.observability.trackers is not supported by the backend {spec.backend.type}; "
            "remove it"
        )
    resume = spec.checkpoint.resume_from
    return trainer.TrainConfig(
        job=trainer.JobRef(
            namespace=job.metadata.namespace,
            name=job.metadata.name,
            uid=job.metadata.uid,
            attempt=attempt,
        ),
        world=trainer.WorldConfig(
            nnodes=plan.nodes,
            nproc_per_node=plan.processes_per_node,
            device=plan.device,
            threads_per_process=locations.threads_per_process,
            restarts_in_place=spec.restart_policy.restarts_in_place,
            rdma_required=spec.topology.rdma is Rdma.REQUIRED or None,
        ),
        model=trainer.ModelConfig(
            path=locations.place_of(spec.model.source),
            revision=spec.model.revision,
            base_name=spec.model.base_name,
            chat_template=spec.model.chat_template,
            chat_template_arguments={
                name: _scalar(value) for name, value in spec.model.chat_template_arguments.items()
            },
            add_tokens=tuple(spec.model.add_tokens),
        ),
        data=_data(spec, locations),
        method=_method(spec, locations),
        strategy=_strategy(plan),
        training=_training(plan),
        auto=_auto(plan),
        checkpoint=trainer.CheckpointConfig(
            dir=locations.checkpoint_dir,
            enabled=spec.checkpoint.enabled is not False,
            every_steps=spec.checkpoint.every_steps,
            every_seconds=spec.checkpoint.every_seconds,
            mean_time_between_failures=_mean_time_between_failures(spec),
            keep=spec.checkpoint.keep,
            resume_from=resume if resume in ("auto", "none") else locations.place_of(resume),
            allow_foreign=locations.allow_foreign,
            is_continued=attempt > 1 or (spec.take_over and resume != "none"),
        ),
        output=trainer.OutputConfig(
            dir=locations.output_dir, format=_output_format(plan), dtype=_output_dtype(plan)
        ),
        telemetry=trainer.TelemetryConfig(
            metrics_port=spec.observability.metrics_port,
            metrics_host=locations.metrics_host,
            gpu_metrics=locations.gpu_metrics.value,
            sample_prompts=tuple(spec.observability.sample_prompts),
            collective_timings=spec.observability.collective_timings,
            profile=_profile(plan),
            trackers=locations.trackers or None,
        ),
        control=trainer.ControlConfig(
            hang_seconds=spec.deadlines.hang_seconds,
            scheduled_events_url=locations.scheduled_events_url,
        ),
        run_dir=locations.run_dir,
        termination_path=locations.termination_path,
        termination_grace_seconds=spec.deadlines.termination_grace_seconds,
        take_over=spec.take_over,
        listing_lag_seconds=locations.listing_lag_seconds,
    )


def _profile(plan: Plan) -> trainer.ProfileConfig | None:
    """Return the steps to profile, without ranks that an attempt on fewer nodes lacks.

    Rank 0 records if the attempt has none of the ranks.
    """
    wanted = plan.job.spec.observability.profile
    if wanted is None:
        return None
    ranks = [rank for rank in wanted.ranks or [] if rank < plan.world_size] or [0]
    first, _, last = wanted.steps.partition("-")
    return trainer.ProfileConfig(
        first_step=int(first),
        last_step=int(last or first),
        ranks=tuple(ranks),
        stacks=wanted.stacks is True,
        memory=wanted.memory is True,
        nvtx=wanted.nvtx is True,
    )


def _scalar(text: str) -> str | int | float | bool:
    """Convert an argument of a template: true, false and numbers; everything else is text."""
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text


def _data(spec: FineTuneJobSpec, locations: Locations) -> trainer.DataConfig:
    dataset = spec.dataset

    def rows(uri: str, split: str, weight: float = 1.0) -> trainer.DatasetSource:
        path, is_hub = locations.place_of(uri), is_on_hub(uri)
        return trainer.DatasetSource(path=path, split=split, is_hub=is_hub, weight=weight)

    held_out = None
    if dataset.eval_source or dataset.eval_split:
        split = dataset.eval_split or ("train" if dataset.eval_source else dataset.split)
        held_out = rows(dataset.eval_source or dataset.source, split)
    return trainer.DataConfig(
        train=rows(dataset.source, dataset.split, dataset.weight),
        also=tuple(rows(one.source, one.split, one.weight) for one in dataset.also),
        eval=held_out,
        eval_share=dataset.eval_share,
        format=dataset.format,
        columns=trainer.ColumnMap(**dataset.columns.model_dump()),
        max_seq_len=spec.training.max_seq_length,
        long_rows=dataset.long_rows,
        packing=spec.training.packing is not False,
        is_packing_asked=spec.training.packing is True,
        special_tokens=tuple(spec.model.add_tokens),
        allow_special_tokens=dataset.allow_special_tokens,
        cache_dir=locations.cache_dir,
    )


def _method(spec: FineTuneJobSpec, locations: Locations) -> trainer.MethodConfig:
    method = spec.method
    if method.type is MethodType.FULL:
        return trainer.MethodConfig(type="full", freeze=tuple(method.freeze))
    lora = method.lora.model_dump(exclude={"start_from"}) if method.lora else {}
    start_from = method.lora.start_from if method.lora else None
    adapter = locations.place_of(start_from) if start_from else None
    default = Quantization.NF4 if method.type is MethodType.QLORA else Quantization.NONE
    return trainer.MethodConfig(
        type=method.type.value,
        lora=trainer.LoraSettings(**lora, start_from=adapter),
        quantization=(method.quantization or default).value,
    )


def _strategy(plan: Plan) -> trainer.StrategyConfig:
    strategy = plan.job.spec.strategy
    return trainer.StrategyConfig(
        type=plan.strategy.value,
        offload=strategy.offload.value,
        nvme_path=strategy.nvme_path,
        replicas=plan.replicas,
        reshard_after_forward=strategy.reshard_after_forward,
        reduce_each_micro_batch=strategy.reduce_each_micro_batch,
        prefetch=_prefetch(plan),
        activation_checkpointing=plan.activation_checkpointing.value,
    )


def _auto(plan: Plan) -> trainer.AutoConfig | None:
    if not plan.auto:
        return None
    return trainer.AutoConfig.model_validate(
        {"settings": plan.auto, "peak_at_most": plan.peak_at_most}
    )


def _prefetch(plan: Plan) -> int:
    """Return the number of layers to gather ahead; by default one on GPUs."""
    asked = plan.job.spec.strategy.prefetch
    default = int(plan.device == "cuda" and plan.strategy is StrategyType.FSDP)
    return default if asked is None else asked


def _garbage_interval(plan: Plan) -> int:
    asked = plan.job.spec.training.collect_garbage_every_steps
    default = GARBAGE_EVERY_STEPS if plan.device == "cuda" else 0
    return default if asked is None else asked


def _expands(plan: Plan) -> bool:
    asked = plan.job.spec.training.expandable_segments
    return plan.device == "cuda" if asked is None else asked


def _training(plan: Plan) -> trainer.TrainingConfig:
    training = plan.job.spec.training
    stopping = training.early_stopping
    return trainer.TrainingConfig(
        global_batch_size=training.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        epochs=training.epochs,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
        schedule=training.schedule.value,
        warmup=training.warmup,
        weight_decay=training.weight_decay,
        dropout=training.dropout,
        max_grad_norm=training.max_grad_norm,
        precision=plan.precision.value,
        optimizer=(training.optimizer or Optimizer.ADAMW).value,
        compile=plan.compiles,
        is_compile_asked=training.compile is True,
        attention="fastest" if training.attention is None else training.attention.value,
        deterministic=training.deterministic is True,
        collect_garbage_every_steps=_garbage_interval(plan),
        expandable_segments=_expands(plan),
        check_memory=training.check_memory is not False,
        fused_head=training.fused_head is not False,
        liger=training.liger,
        float8=training.float8,
        seed=training.seed,
        eval_every_steps=training.eval_every_steps,
        early_stopping=trainer.EarlyStopping(**stopping.model_dump()) if stopping else None,
    )


def _mean_time_between_failures(spec: FineTuneJobSpec) -> int:
    if spec.checkpoint.mean_time_between_failures is not None:
        return spec.checkpoint.mean_time_between_failures
    on_demand = spec.capacity is Capacity.ON_DEMAND
    return MEAN_TIME_BETWEEN_FAILURES if on_demand else SPOT_MEAN_TIME_BETWEEN_FAILURES


def _output_format(plan: Plan) -> str:
    output = plan.job.spec.output
    if output.format is not None:
        return output.format.value
    return "merged" if plan.job.spec.method.type is MethodType.FULL else "adapter"


def _output_dtype(plan: Plan) -> str | None:
    dtype = plan.job.spec.output.dtype
    return None if dtype in (None, OutputDtype.AUTO) else dtype.value
