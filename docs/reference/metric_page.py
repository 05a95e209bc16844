"""Write `metrics.md` from the catalogues of metrics in the code; `generate` calls it."""

from collections.abc import Sequence

from finetune_operator.metrics.catalogue import (
    ALL,
    OF_FLEET,
    OF_JOBS,
    OF_OPERATOR,
    OF_RANK_ZERO,
)
from finetune_trainer.config.gpu_metrics import OF_GPU
from finetune_trainer.config.metrics import OF_TRAINING_NODE, Label, Metric, Needs

_HEAD = """\
# Metrics

Generated from `metrics.py` and `gpu_metrics.py` in `finetune_trainer/config`, and from
`finetune_operator/metrics/catalogue.py`; `make generate` writes it.

Each training node serves the metrics of all its ranks: `GET /metrics` on the port
`spec.observability.metricsPort`. Counters and histograms exist from the start of a rank, gauges
once their value is known. Counters continue if the ranks of a node are restarted in place. The
scrape configuration adds the labels of job, namespace, pod and node.

The series of `finetune_comm_*` depend on the run, at most 14 of each name. A counter of these
appears with its first value. [collectives.md](collectives.md) explains them.
"""
_OPERATOR = """\
The operator serves `GET /metrics` on the port of its health checks. Its counters start at 0 in each
process. Only the leader exports the series of jobs and of the queue.
"""
_JOBS = """\
The labels `namespace` and `finetunejob` belong to the job. Scrape with `honorLabels: true`, or
Prometheus renames them to `exported_namespace` and `exported_finetunejob`. The series of a job
disappear an hour after the job finishes, or five minutes after it is deleted.
"""
_FLEET = """\
They start at 0 in each process. A job that starts and finishes between two scrapes is counted, too:
the leader counts it with the status that reports its end.
"""
_RANK_ZERO = """\
For jobs whose pages cannot be scraped, such as jobs of the backend `azureml`, while an attempt
runs: the values that their service reports to the operator. The age counts from the report of
rank 0.
"""


def page() -> str:
    """Return the reference of metrics as Markdown."""
    of_ranks = [one for one in OF_TRAINING_NODE if not one.is_of_rank_zero]
    of_rank_zero = [one for one in OF_TRAINING_NODE if one.is_of_rank_zero]
    return "\n".join(
        [
            _HEAD,
            _section("Of every rank", of_ranks),
            _section("Of rank 0 alone, for the whole run", of_rank_zero),
            _section("Of each GPU of a node", OF_GPU),
            _section("Of the operator", OF_OPERATOR, _OPERATOR),
            _section("Of each job, by the operator", OF_JOBS, _JOBS),
            _section("Of the jobs of a backend, by the operator", OF_FLEET, _FLEET),
            _section("Of rank 0, by the operator", OF_RANK_ZERO, _RANK_ZERO),
            "## Buckets\n",
            "Upper bounds; each histogram also has `+Inf`.\n",
            *(
                f"- `{one.name}`: {', '.join(f'{bound:g}' for bound in one.buckets)} {one.unit}"
                for one in (*OF_TRAINING_NODE, *ALL)
                if one.buckets
            ),
            "",
        ]
    )


def _section(title: str, metrics: Sequence[Metric], text: str = "") -> str:
    rows = [
        f"| `{one.name}` | {one.type} | {one.unit} | {_labels(one.labels)} | {_what(one)} |"
        for one in metrics
    ]
    head = ["| Metric | Type | Unit | Labels | What |", "|---|---|---|---|---|"]
    return "\n".join([f"## {title}\n", *([text] if text else []), *head, *rows, ""])


def _labels(labels: tuple[Label, ...]) -> str:
    return "; ".join(
        f"`{one.name}`" + (f": {', '.join(one.values)}" if one.values else "") for one in labels
    )


def _what(metric: Metric) -> str:
    needs = "" if metric.needs is Needs.NOTHING else f" Needs {metric.needs}."
    of_gpu = [value for label in metric.labels for value in label.of_gpu]
    return metric.help + needs + (f" {', '.join(of_gpu)} need a GPU." if of_gpu else "")
