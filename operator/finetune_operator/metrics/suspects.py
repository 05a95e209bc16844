"""The metric of ranks that hold a job back, as its status has them."""

from collections.abc import Iterator

from finetune_operator.kube.resources import Object
from finetune_operator.metrics.catalogue import OF_JOB
from finetune_trainer.config import MAX_SUSPECTS, SuspectCause
from finetune_trainer.config.metrics import Label, Metric, MetricType

JOB_SUSPECT = Metric(
    "finetune_job_suspect",
    MetricType.GAUGE,
    "ranks",
    "Ranks that hold the running attempt back; always 1, and absent for all others.",
    (*OF_JOB, Label("node"), Label("rank"), Label("cause", tuple(SuspectCause))),
    most_series=MAX_SUSPECTS,
)


def suspect_series(status: Object) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield the values of `JOB_SUSPECT`'s labels after the job's, and its value."""
    attempts = status.get("attempts") or []
    if not attempts or attempts[-1].get("endTime"):
        return
    for one in status.get("suspects") or []:
        yield (one.get("node", ""), str(one["rank"]), one["cause"]), 1.0
