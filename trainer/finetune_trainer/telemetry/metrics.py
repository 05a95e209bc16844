"""The Prometheus metrics of a trainer, and nothing that is not really set.

Job, namespace, pod and node are no labels here: the scrape configuration adds them. Only rank 0 is
scraped today, so its token and sample counters speak for all ranks.
"""

import math
from importlib.metadata import version

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from finetune_trainer.config import CheckpointRef, TrainConfig
from finetune_trainer.telemetry.step import StepReport

_STEP_BUCKETS = tuple(0.05 * 1.5**k for k in range(20))
_CHECKPOINT_BUCKETS = tuple(0.1 * 2**k for k in range(14))


class Metrics:
    """One registry of its own, so that two runs in one process never share a counter."""

    def __init__(self, config: TrainConfig, *, rank: int) -> None:
        """Create the metrics; a series appears on the page once it has a value."""
        self._registry = CollectorRegistry()
        self._rank = str(rank)
        self._gauges = {
            name: Gauge(f"finetune_train_{name}", text, ["rank"], registry=self._registry)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"finetune_train_{name}", text, labels, registry=self._registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._step_duration = Histogram(
            "finetune_train_step_duration_seconds",
            "Wall time between optimizer steps.",
            ["rank"],
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._checkpoint_duration = Histogram(
            "finetune_train_checkpoint_duration_seconds",
            "Time a checkpoint took, by kind of work.",
            ["rank", "kind"],
            buckets=_CHECKPOINT_BUCKETS,
            registry=self._registry,
        )
        self._set("restart_attempt", config.job.attempt)
        self._publish_info(config)
        self._publish_memory()

    def step(self, report: StepReport, *, seconds_per_step: float | None, now: float) -> None:
        """Count one optimizer step."""
        self._step_duration.labels(self._rank).observe(report.seconds)
        self._set("step_duration_ewma_seconds", seconds_per_step)
        self._count("steps_total", 1)
        self._count("tokens_total", report.tokens, "nonpad")
        self._count("samples_total", report.samples)
        self._set("global_step", report.step)
        self._set("last_step_timestamp_seconds", now)
        self._set("loss", report.loss)
        self._set("grad_norm", report.grad_norm)
        self._set("learning_rate", report.learning_rate)
        self._set("epoch_ratio", report.epoch)
        for kind, value in (("loss", report.loss), ("grad", report.grad_norm)):
            if value is not None and not math.isfinite(value):
                self._count("nonfinite_total", 1, kind)
        self._count_phases(report)

    def evaluated(self, loss: float, seconds: float) -> None:
        """Record one evaluation."""
        self._set("eval_loss", loss)
        self._count("phase_seconds_total", seconds, "eval")

    def checkpointed(self, checkpoint: CheckpointRef) -> None:
        """Record one committed checkpoint."""
        self._set("checkpoint_last_success_timestamp_seconds", checkpoint.time)
        self._set("checkpoint_last_step", checkpoint.step)

    def render(self) -> bytes:
        """Return the page in the Prometheus text format."""
        return generate_latest(self._registry)

    def _count_phases(self, report: StepReport) -> None:
        named = report.data_wait_seconds + report.checkpoint_blocking_seconds
        self._count("phase_seconds_total", report.data_wait_seconds, "data_wait")
        self._count(
            "phase_seconds_total", report.checkpoint_blocking_seconds, "checkpoint_blocking"
        )
        self._count("phase_seconds_total", max(0.0, report.seconds - named), "other")
        if report.checkpoint_blocking_seconds > 0:
            self._checkpoint_duration.labels(self._rank, "save_blocking").observe(
                report.checkpoint_blocking_seconds
            )

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._gauges[name].labels(self._rank).set(value)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(self._rank, *labels).inc(amount)

    def _publish_info(self, config: TrainConfig) -> None:
        values = {
            "rank": self._rank,
            "strategy": config.strategy.type,
            "precision": config.training.precision,
            "peft": config.method.type,
            "backend": "nccl" if config.world.device == "cuda" else "gloo",
            "torch": version("torch"),
        }
        info = Gauge("finetune_train_info", "What runs.", list(values), registry=self._registry)
        info.labels(**values).set(1)

    def _publish_memory(self) -> None:
        memory = Gauge(
            "finetune_train_memory_bytes",
            "Memory in use, by kind.",
            ["rank", "kind"],
            registry=self._registry,
        )
        process = psutil.Process()
        memory.labels(self._rank, "host_rss").set_function(lambda: process.memory_info().rss)


_GAUGES = {
    "step_duration_ewma_seconds": "Seconds per step, recent steps counting more.",
    "global_step": "Optimizer steps finished, over all attempts.",
    "last_step_timestamp_seconds": "When the newest step ended, seconds since the epoch.",
    "loss": "Training loss per label token.",
    "grad_norm": "Global gradient norm before clipping.",
    "learning_rate": "Learning rate of the newest step.",
    "epoch_ratio": "Epochs finished, with fraction.",
    "eval_loss": "Held-out loss per label token.",
    "checkpoint_last_success_timestamp_seconds": "When the newest checkpoint was committed.",
    "checkpoint_last_step": "Step of the newest committed checkpoint.",
    "restart_attempt": "Number of this attempt, from 1.",
}

_COUNTERS = {
    "steps_total": ("Optimizer steps of this attempt.", ["rank"]),
    "tokens_total": ("Tokens trained on, all ranks.", ["rank", "kind"]),
    "samples_total": ("Rows trained on, all ranks.", ["rank"]),
    "nonfinite_total": ("Losses or gradient norms that were not finite.", ["rank", "kind"]),
    "phase_seconds_total": ("Wall time by what it went into.", ["rank", "phase"]),
}
