"""Choose the settings that a job leaves open: ranks, strategy, micro-batch and precision.

`make_plan` is pure and records the reasons; backends convert the plan into a request.
"""

from dataclasses import dataclass

from finetune_operator.api.paths import show_count
from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.v1alpha1.method import ActivationCheckpointing, StrategyType
from finetune_operator.api.v1alpha1.training import Optimizer, Precision

MAX_AUTO_MICRO_BATCH = 8


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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward passes of a rank per optimizer step."""
        per_pass = self.world_size * self.micro_batch_size
        return self.job.spec.training.global_batch_size // per_pass


def make_plan(job: FineTuneJob) -> Plan:
    """Choose the settings that the job leaves open.

    Raises:
        InvalidJobError: No choice satisfies the job.
    """
    spec, reasons = job.spec, list[str]()
    device = "cuda" if spec.topology.gpus_per_node else "cpu"
    processes = spec.topology.processes_per_node or spec.topology.gpus_per_node or 1
    strategy = spec.strategy.type
    if strategy is StrategyType.AUTO:
        strategy = StrategyType.DDP
        reasons.append(
            "strategy ddp: every rank holds the whole model, and only gradients are exchanged; if "
            "the model does not fit, set fsdp or zero1 to zero3"
        )
    precision = spec.training.precision
    if precision is Precision.AUTO:
        precision, reason = _precision(spec.training.optimizer, device)
        reasons.append(f"precision {precision}: {reason}")
    recompute = spec.strategy.activation_checkpointing
    if recompute is ActivationCheckpointing.AUTO:
        recompute = ActivationCheckpointing.NONE
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
        micro_batch_size=_micro_batch_size(job, spec.topology.nodes, processes, reasons),
        reasons=tuple(reasons),
    )


def _precision(optimizer: Optimizer | None, device: str) -> tuple[Precision, str]:
    """Return the precision of a job that leaves it open, and the reason."""
    if optimizer is Optimizer.ADAMW_8BIT:
        return Precision.BF16, "adamw8bit keeps parameters in it"
    precision = Precision.BF16 if device == "cuda" else Precision.FP32
    return precision, f"the default on a {device} device"


def _micro_batch_size(job: FineTuneJob, nodes: int, processes: int, reasons: list[str]) -> int:
    """Return the micro-batch of the job, or the largest divisor up to 8 of the rows per rank."""
    training = job.spec.training
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
    if training.packing is not False:
        reasons.append("micro-batch 1: a pack already fills maxSeqLength")
        return 1
    share = training.global_batch_size // step
    size = max(d for d in range(1, MAX_AUTO_MICRO_BATCH + 1) if share % d == 0)
    reasons.append(f"micro-batch {size}: the largest divisor of a rank's {share} rows up to 8")
    return size
