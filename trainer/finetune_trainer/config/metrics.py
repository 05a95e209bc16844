"""Metrics of a training node, declared once.

The node's page, `docs/reference/metrics.md` and all Prometheus queries are derived from them. Job,
namespace, pod and node are not labels of a page: the scrape configuration adds them.
"""

from enum import StrEnum

from finetune_trainer.config.collective_metrics import (
    COLLECTIVE_OPS,
    COMM_BUS_BYTES,
    COMM_BYTES,
    COMM_CALLS,
    COMM_COMPLETED,
    COMM_ENQUEUED,
    COMM_EXPOSED,
    COMM_SAMPLED,
    COMM_SECONDS,
    GROUPS,
    MOST_KINDS,
    SIZE_CLASSES,
)
from finetune_trainer.config.metric import RANK, Label, Metric, MetricType, Needs, combinations

__all__ = [  # re-exported declarations
    "COLLECTIVE_OPS",
    "COMM_BUS_BYTES",
    "COMM_BYTES",
    "COMM_CALLS",
    "COMM_COMPLETED",
    "COMM_ENQUEUED",
    "COMM_EXPOSED",
    "COMM_SAMPLED",
    "COMM_SECONDS",
    "GROUPS",
    "MOST_KINDS",
    "RANK",
    "SIZE_CLASSES",
    "Label",
    "Metric",
    "MetricType",
    "Needs",
    "combinations",
]


class TimedPhase(StrEnum):
    """Phases of a rank's wall time; the rank is always in exactly one of them."""

    DATA_WAIT = "data_wait"
    H2D = "h2d"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    COMM_EXPOSED = "comm_exposed"
    CHECKPOINT_BLOCKING = "checkpoint_blocking"
    EVAL = "eval"
    PROFILING = "profiling"
    LOGGING = "logging"
    OTHER = "other"


_STEP_BUCKETS = tuple(round(0.05 * 1.5**k, 4) for k in range(20))
_CHECKPOINT_BUCKETS = tuple(round(0.1 * 3**k, 1) for k in range(8))

_OF_ALLOCATOR = ("allocated", "reserved", "peak_allocated")

INFO = Metric(
    "finetune_train_info",
    MetricType.GAUGE,
    "ranks",
    "Settings, versions and GPU of the rank; always 1. Labels that do not apply are empty.",
    (
        RANK,
        Label("strategy", ("ddp", "fsdp", "zero1", "zero2", "zero3")),
        Label("precision", ("bf16", "fp16", "fp32", "fp64")),
        Label("peft", ("full", "lora", "qlora")),
        Label("backend", ("gloo", "nccl")),
        Label("torch"),
        Label("local_rank"),
        Label("nccl"),
        Label("gpu_model"),
        Label("gpu_uuid"),
        Label("transport"),
    ),
)
LAST_SEEN_AGE = Metric(
    "finetune_train_last_seen_age_seconds",
    MetricType.GAUGE,
    "seconds",
    "Time since the last report of the rank; it grows while a rank is stuck, stopped or dead.",
    (RANK,),
)
SCORE = Metric(
    "finetune_train_straggler_score",
    MetricType.GAUGE,
    "ratio",
    "Busy time per step over some seconds, by the other ranks' median; 1.2 is 20 % longer.",
    (RANK,),
)
MEMORY = Metric(
    "finetune_train_memory_bytes",
    MetricType.GAUGE,
    "bytes",
    "Memory in use, by kind; host_rss is the resident memory of a live process. The others are "
    "torch's on the GPU: of tensors, all that torch has reserved, and the peak of tensors.",
    (RANK, Label("kind", ("host_rss", *_OF_ALLOCATOR), of_gpu=_OF_ALLOCATOR)),
)
ALLOC_RETRIES = Metric(
    "finetune_train_alloc_retries_total",
    MetricType.COUNTER,
    "allocations",
    "Allocations on the GPU that succeeded only after torch had released its cached memory.",
    (RANK,),
    needs=Needs.GPU,
)
OUT_OF_MEMORY = Metric(
    "finetune_train_ooms_total",
    MetricType.COUNTER,
    "allocations",
    "Allocations on the GPU that failed.",
    (RANK,),
    needs=Needs.GPU,
)
STEP_DURATION = Metric(
    "finetune_train_step_duration_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Wall time between optimizer steps, without evaluation.",
    (RANK,),
    buckets=_STEP_BUCKETS,
)
STEP_DURATION_EWMA = Metric(
    "finetune_train_step_duration_ewma_seconds",
    MetricType.GAUGE,
    "seconds",
    "Seconds per step, weighted towards recent steps.",
    (RANK,),
)
STEPS = Metric(
    "finetune_train_steps_total",
    MetricType.COUNTER,
    "steps",
    "Optimizer steps of this attempt.",
    (RANK,),
)
GLOBAL_STEP = Metric(
    "finetune_train_global_step",
    MetricType.GAUGE,
    "steps",
    "Optimizer steps finished, over all attempts.",
    (RANK,),
)
LAST_STEP_TIMESTAMP = Metric(
    "finetune_train_last_step_timestamp_seconds",
    MetricType.GAUGE,
    "seconds",
    "When the newest step was reported, since the epoch.",
    (RANK,),
)
TOKENS = Metric(
    "finetune_train_tokens_total",
    MetricType.COUNTER,
    "tokens",
    "Tokens that went through the rank's model in training, by kind; pad is padding.",
    (RANK, Label("kind", ("nonpad", "pad"))),
)
SAMPLES = Metric(
    "finetune_train_samples_total",
    MetricType.COUNTER,
    "rows",
    "Rows that the rank trained on.",
    (RANK,),
)
MODEL_FLOPS = Metric(
    "finetune_train_model_flops_total",
    MetricType.COUNTER,
    "FLOPs",
    "FLOPs that training needs, without padding and recomputation; absent for models whose FLOPs "
    "are not known.",
    (RANK,),
    is_unknown_at_first=True,
)
PEAK_FLOPS = Metric(
    "finetune_train_peak_flops_per_second",
    MetricType.GAUGE,
    "FLOPs per second",
    "Peak of the rank's GPU in this precision, without sparsity; absent if not known.",
    (RANK,),
    needs=Needs.GPU,
)
PHASE_SECONDS = Metric(
    "finetune_train_phase_seconds_total",
    MetricType.COUNTER,
    "seconds",
    "Wall time of the rank by phase, from its start to its end, including the current phase; "
    "starting and exporting are other.",
    (
        RANK,
        Label("phase", tuple(phase.value for phase in TimedPhase), of_gpu=(TimedPhase.H2D.value,)),
    ),
)
NON_FINITE = Metric(
    "finetune_train_nonfinite_total",
    MetricType.COUNTER,
    "steps",
    "Steps whose loss or gradient norm was not finite.",
    (RANK, Label("kind", ("loss", "grad"))),
)
CHECKPOINT_DURATION = Metric(
    "finetune_train_checkpoint_duration_seconds",
    MetricType.HISTOGRAM,
    "seconds",
    "Time of a checkpoint, by kind of work: save_blocking is the time that training waited, "
    "save_async the time from then until the commit, load the time to read a checkpoint.",
    (RANK, Label("kind", ("save_blocking", "save_async", "load"))),
    buckets=_CHECKPOINT_BUCKETS,
    is_of_rank_zero=True,
)
CHECKPOINT_BYTES = Metric(
    "finetune_train_checkpoint_bytes_total",
    MetricType.COUNTER,
    "bytes",
    "Size of the committed checkpoints, summed over all ranks.",
    (RANK,),
    is_of_rank_zero=True,
)
CHECKPOINT_FAILURES = Metric(
    "finetune_train_checkpoint_failures_total",
    MetricType.COUNTER,
    "checkpoints",
    "Checkpoints that could not be written or committed.",
    (RANK,),
    is_of_rank_zero=True,
)


def _of_rank_zero(name: str, unit: str, help: str) -> Metric:
    return Metric(
        f"finetune_train_{name}", MetricType.GAUGE, unit, help, (RANK,), is_of_rank_zero=True
    )


LOSS = _of_rank_zero("loss", "nats", "Training loss per label token.")
GRAD_NORM = _of_rank_zero(
    "grad_norm",
    "nats",
    "Global gradient norm before clipping; absent while it is NaN.",
)
LEARNING_RATE = _of_rank_zero("learning_rate", "ratio", "Learning rate of the newest step.")
TOKENS_PER_SECOND = _of_rank_zero(
    "tokens_per_second",
    "tokens",
    "Tokens per second of all ranks, without padding, weighted towards recent steps.",
)
EPOCH = _of_rank_zero("epoch_ratio", "epochs", "Epochs finished, with fraction.")
EVAL_LOSS = _of_rank_zero("eval_loss", "nats", "Held-out loss per label token.")
CHECKPOINT_TIMESTAMP = _of_rank_zero(
    "checkpoint_last_success_timestamp_seconds",
    "seconds",
    "When the newest checkpoint was committed, since the epoch.",
)
CHECKPOINT_STEP = _of_rank_zero(
    "checkpoint_last_step", "steps", "Step of the newest committed checkpoint."
)
CHECKPOINT_INTERVAL = _of_rank_zero(
    "checkpoint_interval_seconds",
    "seconds",
    "Time between checkpoints if their interval is a time; absent if it is a number of steps.",
)
ATTEMPT = _of_rank_zero("restart_attempt", "attempts", "Number of this attempt, from 1.")

OF_TRAINING_NODE = (
    INFO,
    LAST_SEEN_AGE,
    SCORE,
    MEMORY,
    ALLOC_RETRIES,
    OUT_OF_MEMORY,
    STEP_DURATION,
    STEP_DURATION_EWMA,
    STEPS,
    GLOBAL_STEP,
    LAST_STEP_TIMESTAMP,
    TOKENS,
    SAMPLES,
    MODEL_FLOPS,
    PEAK_FLOPS,
    PHASE_SECONDS,
    NON_FINITE,
    CHECKPOINT_DURATION,
    CHECKPOINT_BYTES,
    CHECKPOINT_FAILURES,
    COMM_CALLS,
    COMM_BYTES,
    COMM_BUS_BYTES,
    COMM_SECONDS,
    COMM_EXPOSED,
    COMM_ENQUEUED,
    COMM_COMPLETED,
    COMM_SAMPLED,
    LOSS,
    GRAD_NORM,
    LEARNING_RATE,
    TOKENS_PER_SECOND,
    EPOCH,
    EVAL_LOSS,
    CHECKPOINT_TIMESTAMP,
    CHECKPOINT_STEP,
    CHECKPOINT_INTERVAL,
    ATTEMPT,
)
"""All metrics on the page of a training node, in order."""
