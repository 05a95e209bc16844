"""Series of two nodes with a GPU each, as a page of our exporter or of NVIDIA's would have them.

Every metric that needs a GPU, with every label that the catalogue gives it, and what only goes
wrong: suspects, restarts. Gauges stand still, counters go up by one a second.
"""

import time
from collections.abc import Iterable
from itertools import product

from finetune_trainer.config.gpu_metrics import OF_GPU
from finetune_trainer.config.metrics import Label, Metric, MetricType
from monitoring.known import OF_DCGM
from support.charts.served_pages import line

GPUS = ("GPU-aaaa", "GPU-bbbb")
"""Of rank 0 and of rank 1."""

_OPEN = {"xid": ("79",), "torch": ("2.13",), "local_rank": ("0",)}


def own_page() -> str:
    """Return the GPUs as the page of a node has them."""
    return _page(
        line(one.name, _value(one), **{"gpu": gpu}, **labels)
        for one in OF_GPU
        for gpu in GPUS
        for labels in _labels(one.labels[1:])
    )


def dcgm_page() -> str:
    """Return the GPUs as NVIDIA's exporter has them."""
    return _page(
        line(one.name, 50.0, UUID=gpu, Hostname="node-a") for one in OF_DCGM for gpu in GPUS
    )


def ranks_page() -> str:
    """Return what ranks with a GPU say besides."""
    return _page(
        sample
        for rank, gpu in enumerate(GPUS)
        for sample in (
            line("finetune_train_info", 1.0, rank=rank, gpu_uuid=gpu, backend="nccl"),
            line("finetune_train_model_flops_total", 4e14 * time.time(), rank=rank),
            line("finetune_train_peak_flops_per_second", 1e15, rank=rank),
            line("finetune_train_tokens_total", 2e4 * time.time(), rank=rank, kind="nonpad"),
        )
    )


def operator_page(namespace: str, job: str) -> str:
    """Return what the operator says of a job with which something is wrong."""
    of_job: dict[str, str | int] = {"namespace": namespace, "finetunejob": job}
    suspect: dict[str, str | int] = {"node": "node-a", "rank": 1, "cause": "compute"}
    return _page(
        (
            line("finetune_job_suspect", 1.0, **of_job, **suspect),
            line("finetune_job_restarts_total", 2.0, **of_job, reason="NodeLost"),
        )
    )


def _labels(labels: tuple[Label, ...]) -> Iterable[dict[str, str]]:
    values = [one.values or _OPEN[one.name] for one in labels]
    names = [one.name for one in labels]
    return (dict(zip(names, one, strict=True)) for one in product(*values))


def _value(metric: Metric) -> float:
    return time.time() if metric.type is MetricType.COUNTER else 1.0


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
