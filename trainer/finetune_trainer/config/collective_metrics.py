"""Metrics of a rank's collectives, declared once; a part of the catalogue in `metrics`."""

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
"""Maximum number of combinations of operation, group and size class; no strategy has more."""


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
    "collectives", "collectives", "Collectives, by the requested operation."
)
COMM_BYTES = _of_collectives(
    "bytes", "bytes", "Size of their data: the whole tensor, of which a rank may hold a share."
)
COMM_BUS_BYTES = _of_collectives(
    "bus_bytes",
    "bytes",
    "Minimum bytes that the links of a rank carry for the collectives with a known duration; "
    "divided by the duration it is the bus bandwidth.",
)
COMM_SECONDS = _of_collectives(
    "duration_seconds",
    "seconds",
    "Time from start to end, including the wait for other ranks, if known.",
)
COMM_EXPOSED = _of_collectives(
    "exposed_seconds",
    "seconds",
    "Time in which the rank only waited for them, if known.",
)
COMM_ENQUEUED = _sequence(
    "last_enqueued_seq", "Number of the newest collective that the rank has begun."
)
COMM_COMPLETED = _sequence(
    "last_completed_seq", "Number of the newest collective that the rank knows to be finished."
)
COMM_SAMPLED = Metric(
    "finetune_comm_sampled_ratio",
    MetricType.GAUGE,
    "ratio",
    "Share of this process's collectives that the counters of bytes and of seconds include.",
    (RANK, Label("of", ("bytes", "seconds"))),
)
