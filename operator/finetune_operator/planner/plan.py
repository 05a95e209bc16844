"""Choose the settings that a job leaves open, or leave them to the trainer on GPUs.

`make_plan` is pure and records the reasons; backends convert the plan into a request. The trainer
chooses by the memory of the GPUs when an attempt starts and reports its choice, which later
attempts repeat (`with_choice`).
"""

import hashlib
import json
from dataclasses import dataclass, replace

from finetune_operator.api.paths import show_count
from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.method import ActivationCheckpointing, StrategyType
from finetune_operator.api.v1alpha1.status import PlanStatus
from finetune_operator.api.v1alpha1.training import Optimizer, Precision

MAX_AUTO_MICRO_BATCH = 8
_GIB = 2**30
_OF_TRAINING = {
    "global_batch_size",
    "micro_batch_size",
    "max_seq_length",
    "packing",
    "precision",
    "optimizer",
    "compile",
    "attention",
    "fused_head",
    "float8",
    "liger",
}
"""Fields of `spec.training` that the trainer's choice depends on."""
_STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
_PRECISIONS = ("bf16", "fp16", "fp32")
_RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Expectation:
    """Forecast whether a job fits on the GPUs that job or profile select.

    Attributes:
        fits: None if it is unknown.
        reason: A CamelCase word for the condition Planned.
        message: A sentence for the condition.
    """

    fits: bool | None
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """A job with all settings chosen.

    Attributes:
        job: The job.
        processes_per_node: Ranks per node.
        device: `cpu` or `cuda`.
        compiles: Whether decoder layers are compiled, if the model supports it.
        micro_batch_size: Sequences per forward pass and rank.
        reasons: Reason of each choice, one sentence each.
        replicas: Groups of ranks that each hold the whole model; fsdp only.
        auto: Settings that the trainer chooses, by their names in `AutoConfig`; the values here
            are those with which it begins.
        peak_at_most: Largest peak of the trainer's choice in bytes, after an OutOfMemory.
        expectation: Forecast of the memory; None on CPUs and before it is computed.
    """

    job: FineTuneJob
    nodes: int
    processes_per_node: int
    device: str
    strategy: StrategyType
    precision: Precision
    activation_checkpointing: ActivationCheckpointing
    compiles: bool
    micro_batch_size: int
    reasons: tuple[str, ...]
    replicas: int = 1
    auto: tuple[str, ...] = ()
    peak_at_most: int | None = None
    expectation: Expectation | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of a rank per optimizer step."""
        per_pass = self.world_size * self.micro_batch_size
        return self.job.spec.training.global_batch_size // per_pass

    @property
    def digest(self) -> str:
        """Digest of the fields and of the world that the trainer's choice depends on.

        Fields with their default are left out, so that a new field of a later version does not
        change the digest.
        """
        spec = self.job.spec
        parts = [
            part.model_dump(mode="json", exclude_defaults=True)
            for part in (spec.model, spec.method, spec.strategy)
        ]
        settings = spec.backend.kubernetes or spec.backend.azureml
        parts += [
            spec.training.model_dump(mode="json", include=_OF_TRAINING, exclude_defaults=True),
            {"nodes": self.nodes, "processes": self.processes_per_node, "device": self.device},
            {"size": spec.topology.instance_type, "profile": settings and settings.profile},
        ]
        if spec.training.packing is not True:  # the longest row may count
            parts.append(spec.dataset.model_dump(mode="json", exclude_defaults=True))
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def make_plan(job: FineTuneJob, *, leaves_open: bool = True) -> Plan:
    """Choose the settings that the job leaves open.

    Args:
        job: The job.
        leaves_open: Whether the trainer may choose; 0.1.0 has chosen all settings itself.

    Raises:
        InvalidJobError: No choice satisfies the job.
    """
    spec, reasons = job.spec, list[str]()
    device = "cuda" if spec.topology.gpus_per_node else "cpu"
    auto = _left_to_the_trainer(job) if device == "cuda" and leaves_open else ()
    if auto:
        reasons.append(
            f"{', '.join(auto)}: left to the trainer, which chooses by the memory of the GPUs when "
            "the attempt starts"
        )
    processes = spec.topology.processes_per_node or spec.topology.gpus_per_node or 1
    strategy = spec.strategy.type
    if strategy is StrategyType.AUTO:
        strategy = StrategyType.DDP
        if "strategy" not in auto:
            reasons.append(
                "strategy ddp: every rank holds the whole model, and only gradients are exchanged"
            )
    precision = spec.training.precision
    if precision is Precision.AUTO:
        precision, reason = _precision(spec.training.optimizer, device)
        if "precision" not in auto:
            reasons.append(f"precision {precision}: {reason}")
    recompute = spec.strategy.activation_checkpointing
    if recompute is ActivationCheckpointing.AUTO:
        recompute = ActivationCheckpointing.NONE
        if "activationCheckpointing" not in auto:
            reasons.append("activation checkpointing none: it costs time and saves only memory")
    compiles = spec.training.compile
    if compiles is None:
        is_native = strategy in (StrategyType.DDP, StrategyType.FSDP)
        compiles = device == "cuda" and is_native
        if compiles:
            reasons.append("compile true: the default on GPUs with ddp and fsdp")
    return Plan(
        job=job,
        nodes=spec.topology.nodes,
        processes_per_node=processes,
        device=device,
        strategy=strategy,
        precision=precision,
        activation_checkpointing=recompute,
        compiles=compiles,
        micro_batch_size=_micro_batch_size(job, processes, auto, reasons),
        reasons=tuple(reasons),
        replicas=spec.strategy.replicas,
        auto=auto,
    )


def with_choice(plan: Plan, stored: PlanStatus | None) -> Plan:
    """Return the plan with the values that the trainer of an earlier attempt has chosen.

    Unchanged if the trainer has not chosen yet, or has chosen for other fields or ranks. After
    an OutOfMemory the plan only has the limit for the next choice. A plan of 0.1.0 has no digest.

    Args:
        plan: The plan of the spec.
        stored: The plan in the status.
    """
    if not plan.auto or stored is None or stored.digest not in (None, plan.digest):
        return plan
    if not stored.micro_batch_size:
        return replace(plan, peak_at_most=stored.peak_at_most)
    if not _is_possible(plan, stored):
        return plan
    chosen = replace(plan, auto=())
    if "strategy" in plan.auto:
        kind = StrategyType(stored.strategy)
        chosen = replace(chosen, strategy=kind, replicas=stored.replicas or 1)
    if "activationCheckpointing" in plan.auto:
        recompute = ActivationCheckpointing(stored.activation_checkpointing or "none")
        chosen = replace(chosen, activation_checkpointing=recompute)
    if "microBatchSize" in plan.auto:
        chosen = replace(chosen, micro_batch_size=stored.micro_batch_size)
    if "precision" in plan.auto:
        chosen = replace(chosen, precision=Precision(stored.precision))
    if chosen.job.spec.training.global_batch_size % (chosen.world_size * chosen.micro_batch_size):
        return plan
    others = plan.reasons[1:]  # the first one is about `auto`
    return replace(chosen, reasons=(reason_of_choice(stored), *others))


def _is_possible(plan: Plan, stored: PlanStatus) -> bool:
    """Whether `auto` can have chosen these values for this world; a trainer may report any."""
    replicas, world = stored.replicas or 1, plan.world_size
    is_of_world = stored.digest is not None or (
        stored.micro_batch_size * stored.gradient_accumulation_steps * world
        == plan.job.spec.training.global_batch_size
    )
    return (
        is_of_world
        and stored.micro_batch_size > 0
        and stored.strategy in _STRATEGIES
        and stored.precision in _PRECISIONS
        and (stored.activation_checkpointing or "none") in _RECOMPUTATIONS
        and (replicas == 1 or (stored.strategy == "fsdp" and replicas > 0 == world % replicas))
    )


def reason_of_choice(stored: PlanStatus) -> str:
    """Return the sentence about an earlier choice, of the trainer or of an earlier operator."""
    memory, chooser = "", "the trainer" if stored.usable_bytes else "an earlier version"
    if stored.peak_bytes and stored.usable_bytes:
        peak, usable = stored.peak_bytes / _GIB, stored.usable_bytes / _GIB
        memory = f"; a step takes {peak:.1f} of {usable:.1f} GiB on each GPU"
    replicas = f" with {stored.replicas} replicas" if stored.replicas else ""
    return (
        f"{stored.strategy}{replicas}, activation checkpointing "
        f"{stored.activation_checkpointing or 'none'}, micro-batch {stored.micro_batch_size} and "
        f"{stored.precision}: chosen by {chooser}{memory}"
    )


def _left_to_the_trainer(job: FineTuneJob) -> tuple[str, ...]:
    """Return the settings with `auto` that the memory or the generation of the GPUs decides."""
    strategy, training = job.spec.strategy, job.spec.training
    is_open = {
        "strategy": strategy.type is StrategyType.AUTO,
        "activationCheckpointing": (
            strategy.activation_checkpointing is ActivationCheckpointing.AUTO
        ),
        "microBatchSize": training.micro_batch_size == "auto",
        # 8-bit moments need bf16.
        "precision": (
            training.precision is Precision.AUTO and training.optimizer is not Optimizer.ADAMW_8BIT
        ),
    }
    return tuple(name for name, is_left in is_open.items() if is_left)


def _precision(optimizer: Optimizer | None, device: str) -> tuple[Precision, str]:
    """Return the precision of a job that leaves it open, and the reason."""
    if optimizer is Optimizer.ADAMW_8BIT:
        return Precision.BF16, "adamw8bit keeps parameters in it"
    precision = Precision.BF16 if device == "cuda" else Precision.FP32
    return precision, f"the default on a {device} device"


def _micro_batch_size(
    job: FineTuneJob, processes: int, auto: tuple[str, ...], reasons: list[str]
) -> int:
    """Return the micro-batch of the job, or the largest divisor up to 8 of the rows per rank."""
    training, nodes = job.spec.training, job.spec.topology.nodes
    asked = 1 if training.micro_batch_size == "auto" else training.micro_batch_size
    step = nodes * processes * asked
    if training.global_batch_size % step:
        below = training.global_batch_size // step * step
        use = f"{below} or {below + step}" if below else f"{step}"
        raise InvalidJobError(
            [
                Problem(
                    "spec.training.globalBatchSize",
                    f"{training.global_batch_size} is not a multiple of {step} "
                    f"({show_count(nodes, 'node')} x "
                    f"{show_count(processes, 'process', 'processes')} x micro-batch {asked}); "
                    f"use {use}",
                )
            ]
        )
    if training.micro_batch_size != "auto":
        return training.micro_batch_size
    if "microBatchSize" in auto:
        return 1
    if training.packing is not False:
        reasons.append("micro-batch 1: a pack already fills maxSeqLength")
        return 1
    share = training.global_batch_size // step
    size = max(d for d in range(1, MAX_AUTO_MICRO_BATCH + 1) if share % d == 0)
    reasons.append(f"micro-batch {size}: the largest divisor of a rank's {share} rows up to 8")
    return size
