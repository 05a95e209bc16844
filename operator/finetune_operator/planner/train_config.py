"""Derive the trainer's configuration from a plan; the one place where the two contracts meet."""

from dataclasses import dataclass

from finetune_operator.api.v1alpha1.inputs import DatasetSpec
from finetune_operator.api.v1alpha1.lifecycle import CheckpointSpec
from finetune_operator.api.v1alpha1.method import MethodType
from finetune_operator.planner.plan import Plan
from finetune_trainer import config as trainer

# A fault then loses ten minutes at most, and an asynchronous save blocks for well under a second.
DEFAULT_CHECKPOINT_SECONDS = 600


@dataclass(frozen=True)
class Locations:
    """Where a backend puts what the job names by URI: paths as a rank sees them.

    Attributes:
        model: Folder or hub name of the base model.
        train: File or hub name of the training rows.
        eval: The same of the held-out rows, or None.
        resume_from: `auto`, `none` or the folder of one checkpoint.
    """

    model: str
    train: trainer.DatasetSource
    eval: trainer.DatasetSource | None
    run_dir: str
    checkpoint_dir: str
    output_dir: str
    cache_dir: str
    termination_path: str
    resume_from: str = "auto"
    threads_per_process: int = 1
    metrics_host: str = "127.0.0.1"


def derive_train_config(plan: Plan, attempt: int, locations: Locations) -> trainer.TrainConfig:
    """Write down every choice for one attempt of `plan`; pure."""
    job, spec = plan.job, plan.job.spec
    training = spec.training
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
        ),
        model=trainer.ModelConfig(
            path=locations.model, revision=spec.model.revision, base_name=spec.model.base_name
        ),
        data=trainer.DataConfig(
            train=locations.train,
            eval=locations.eval,
            format=trainer.DataFormat(spec.dataset.format),
            columns=_columns(spec.dataset),
            max_seq_len=training.max_seq_length,
            long_rows=trainer.LongRows(spec.dataset.long_rows),
            packing=training.packing,
            cache_dir=locations.cache_dir,
        ),
        method=_method(plan),
        strategy=trainer.StrategyConfig(
            type=plan.strategy.value,
            activation_checkpointing=plan.activation_checkpointing.value,
        ),
        training=trainer.TrainingConfig(
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
            seed=training.seed,
            eval_every_steps=training.eval_every_steps,
        ),
        checkpoint=trainer.CheckpointConfig(
            dir=locations.checkpoint_dir,
            every_steps=spec.checkpoint.every_steps,
            every_seconds=_every_seconds(spec.checkpoint),
            keep=spec.checkpoint.keep,
            resume_from=locations.resume_from,
            is_continued=attempt > 1,
        ),
        output=trainer.OutputConfig(dir=locations.output_dir, format=_output_format(plan)),
        telemetry=trainer.TelemetryConfig(
            metrics_port=spec.observability.metrics_port,
            metrics_host=locations.metrics_host,
            sample_prompts=tuple(spec.observability.sample_prompts),
        ),
        run_dir=locations.run_dir,
        termination_path=locations.termination_path,
        termination_grace_seconds=spec.deadlines.termination_grace_seconds,
    )


def _columns(dataset: DatasetSpec) -> trainer.ColumnMap:
    return trainer.ColumnMap(**dataset.columns.model_dump())


def _method(plan: Plan) -> trainer.MethodConfig:
    method = plan.job.spec.method
    if method.type is MethodType.FULL:
        return trainer.MethodConfig(type="full")
    lora = method.lora.model_dump() if method.lora else {}
    return trainer.MethodConfig(type="lora", lora=trainer.LoraSettings(**lora))


def _every_seconds(checkpoint: CheckpointSpec) -> int | None:
    if checkpoint.every_steps is None and checkpoint.every_seconds is None:
        return DEFAULT_CHECKPOINT_SECONDS
    return checkpoint.every_seconds


def _output_format(plan: Plan) -> str:
    output = plan.job.spec.output
    if output.format is not None:
        return output.format.value
    return "merged" if plan.job.spec.method.type is MethodType.FULL else "adapter"
