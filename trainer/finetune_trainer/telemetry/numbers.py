"""Turn a rank's reports into the counters, gauges and histograms of its block."""

import math
from importlib.metadata import version

from finetune_trainer.config import CheckpointRef, TrainConfig, metrics
from finetune_trainer.telemetry.gpu_device import Gpu, GpuMemory
from finetune_trainer.telemetry.slots import Block
from finetune_trainer.telemetry.step import StepReport, Throughput

_SECONDS_BETWEEN_POLLS = 10.0  # reading a GPU's memory is the slowest part of a report


class Numbers:
    """Series of one rank; rank 0 also has the series of the whole run."""

    def __init__(self, block: Block, *, is_main: bool) -> None:
        """Look up the slot of every series."""
        self._is_main = is_main
        self._step_duration = block.histogram(metrics.STEP_DURATION)
        self._step_duration_ewma = block.slot(metrics.STEP_DURATION_EWMA)
        self._steps = block.slot(metrics.STEPS)
        self._global_step = block.slot(metrics.GLOBAL_STEP)
        self._last_step = block.slot(metrics.LAST_STEP_TIMESTAMP)
        self._tokens = block.slot(metrics.TOKENS, "nonpad")
        self._padding = block.slot(metrics.TOKENS, "pad")
        self._samples = block.slot(metrics.SAMPLES)
        self._lost_losses = block.slot(metrics.NON_FINITE, "loss")
        self._lost_norms = block.slot(metrics.NON_FINITE, "grad")
        self._flops = block.slot(metrics.MODEL_FLOPS)
        self._loss = block.slot(metrics.LOSS)
        self._grad_norm = block.slot(metrics.GRAD_NORM)
        self._learning_rate = block.slot(metrics.LEARNING_RATE)
        self._tokens_per_second = block.slot(metrics.TOKENS_PER_SECOND)
        self._epoch = block.slot(metrics.EPOCH)
        self._eval_loss = block.slot(metrics.EVAL_LOSS)
        self._checkpoint_time = block.slot(metrics.CHECKPOINT_TIMESTAMP)
        self._checkpoint_step = block.slot(metrics.CHECKPOINT_STEP)
        self._attempt = block.slot(metrics.ATTEMPT)

    def begin(self, attempt: int) -> None:
        """Publish the number of the attempt."""
        if self._is_main:
            self._attempt.set(attempt)

    def step(self, report: StepReport, throughput: Throughput, now: float) -> None:
        """Count one optimizer step that was reported at `now`, in seconds since the epoch."""
        seconds_per_step = throughput.seconds_per_step
        self._step_duration.observe(report.seconds)
        if seconds_per_step is not None:
            self._step_duration_ewma.set(seconds_per_step)
        self._steps.add(1)
        self._tokens.add(report.rank_tokens)
        self._padding.add(report.rank_padding)
        if report.rank_flops is not None:
            self._flops.begin()
            self._flops.add(report.rank_flops)
        self._samples.add(report.rank_samples)
        self._global_step.set(report.step)
        self._last_step.set(now)
        if report.grad_norm is not None and not math.isfinite(report.grad_norm):
            self._lost_norms.add(1)
        if self._is_main:
            self._learning_rate.set(report.learning_rate)
            self._epoch.set(report.epoch)
            if throughput.tokens_per_second is not None:
                self._tokens_per_second.set(throughput.tokens_per_second)
            if report.loss is not None:
                self._loss.set(report.loss)
            if report.grad_norm is not None:
                self._grad_norm.set(report.grad_norm)

    def loss_was_not_finite(self) -> None:
        """Count a step that ends the run because its loss is not finite."""
        self._lost_losses.add(1)

    def evaluated(self, loss: float) -> None:
        """Record one evaluation."""
        if self._is_main:
            self._eval_loss.set(loss)

    def checkpointed(self, checkpoint: CheckpointRef) -> None:
        """Record one committed checkpoint."""
        if self._is_main:
            self._checkpoint_time.set(checkpoint.time)
            self._checkpoint_step.set(checkpoint.step)


def info_labels(config: TrainConfig, rank: int, gpu: Gpu | None = None) -> dict[str, str]:
    """Return the labels of `metrics.INFO` that follow the rank; GPU labels are empty without a GPU.

    The UUID joins these labels with GPU metrics, so it is empty if GPU metrics are disabled.
    """
    uuid = "" if gpu is None or config.telemetry.gpu_metrics == "none" else gpu.uuid
    return {
        "strategy": config.strategy.type,
        "precision": config.training.precision,
        "peft": config.method.type,
        "backend": "nccl" if config.world.device == "cuda" else "gloo",
        "torch": version("torch"),
        "local_rank": str(rank % config.world.nproc_per_node),
        "nccl": "" if gpu is None else gpu.nccl,
        "gpu_model": "" if gpu is None else gpu.model,
        "gpu_uuid": uuid,
        "transport": "",  # known after the first collective
    }


class GpuNumbers:
    """Series of a rank's GPU."""

    def __init__(self, block: Block, gpu: Gpu, peak_flops: float | None) -> None:
        """Look up the slot of every series and publish the GPU's peak FLOPs."""
        self._read = gpu.memory
        self._allocated = block.slot(metrics.MEMORY, "allocated")
        self._reserved = block.slot(metrics.MEMORY, "reserved")
        self._peak_allocated = block.slot(metrics.MEMORY, "peak_allocated")
        self._retries = block.slot(metrics.ALLOC_RETRIES)
        self._ooms = block.slot(metrics.OUT_OF_MEMORY)
        self._before = GpuMemory()
        self._looked_at = float("-inf")
        for counter in (self._retries, self._ooms):
            counter.begin()
        if peak_flops is not None:
            block.slot(metrics.PEAK_FLOPS).set(peak_flops)

    def look(self, now: float) -> None:
        """Read the memory counters unless they were read recently; `now` is in seconds."""
        if now - self._looked_at < _SECONDS_BETWEEN_POLLS:
            return
        self._looked_at = now
        memory, before = self._read(), self._before
        self._allocated.set(memory.allocated)
        self._reserved.set(memory.reserved)
        self._peak_allocated.set(memory.peak_allocated)
        self._retries.add(memory.alloc_retries - before.alloc_retries)
        self._ooms.add(memory.ooms - before.ooms)
        self._before = memory
