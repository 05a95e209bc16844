"""The metrics of a rank's collectives, declared once; a part of the catalogue in `metrics`."""

from finetune_trainer.config.metric import RANK, Label, Metric, MetricType

COLLECTIVE_OPS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
)
GROUPS = ("dp", "shard", "replica", "control", "checkpoint")
SIZE_CLASSES = ("small", "medium", "large")
MOST_KINDS = 14
"""Combinations of operation, group and size class that a rank counts; no strategy has more."""


def _of_collectives(name: str, unit: str, help: str) -> Metric:
    labels = (
        RANK,
        Label("op", COLLECTIVE_OPS),
        Label("group", GROUPS),
        Label("size", SIZE_CLASSES),
    )
    return Metric(
        f"finetune_comm_{name}_total",
        MetricType.COUNTER,
        unit,
        help,
        labels,
        most_series=MOST_KINDS,
    )


def _sequence(name: str, help: str) -> Metric:
    labels = (RANK, Label("group", GROUPS))
    return Metric(
        f"finetune_comm_{name}",
        MetricType.GAUGE,
        "collectives",
        help,
        labels,
        most_series=len(GROUPS),
    )


COMM_CALLS = _of_collectives(
    "collectives", "collectives", "Collectives, by the operation that was asked for."
)
COMM_BYTES = _of_collectives(
    "bytes", "bytes", "Size of their data: the whole tensor, of which a rank may hold a share."
)
COMM_BUS_BYTES = _of_collectives(
    "bus_bytes",
    "bytes",
    "Bytes that the links of one rank carry at best for those that are in the seconds; divided by "
    "these it is the bus bandwidth.",
)
COMM_SECONDS = _of_collectives(
    "duration_seconds",
    "seconds",
    "Time from their start to their end, waiting for other ranks included, where it is known.",
)
COMM_EXPOSED = _of_collectives(
    "exposed_seconds",
    "seconds",
    "Time in which the rank could do nothing but wait for them, where it is known.",
)
COMM_ENQUEUED = _sequence(
    "last_enqueued_seq", "Number of the newest collective that the rank has begun."
)
COMM_COMPLETED = _sequence(
    "last_completed_seq", "Number of the newest collective that the rank knows to be over."
)
COMM_SAMPLED = Metric(
    "finetune_comm_sampled_ratio",
    MetricType.GAUGE,
    "ratio",
    "Share of this process's collectives that are in the counters of bytes, and of seconds.",
    (RANK, Label("of", ("bytes", "seconds"))),
)
