"""All series that rules and dashboards may query: of the catalogue, of rules, and of DCGM."""

from finetune_operator.metrics.catalogue import OF_FLEET, OF_JOBS, OF_OPERATOR
from finetune_trainer.config.gpu_metrics import OF_GPU
from finetune_trainer.config.metrics import OF_TRAINING_NODE, Label, Metric, MetricType
from monitoring.groups import rules_of
from monitoring.queries import OF_EACH_SCRAPE, OF_TRAINING_PODS, Queries, series_of
from monitoring.windows import Windows

_DCGM = ("GPU_UTIL", "FB_USED", "POWER_USAGE", "GPU_TEMP", "SM_CLOCK", "ROW_REMAP_FAILURE")
OF_DCGM = tuple(
    Metric(
        f"DCGM_FI_DEV_{name}",
        MetricType.GAUGE,
        "as in DCGM's documentation",
        "What NVIDIA's DCGM exporter tells of a GPU by default.",
        (Label("UUID"), Label("Hostname"), Label("hostname")),
    )
    for name in _DCGM
)
"""Metrics of NVIDIA's exporter that are queried; it exports all of them by default."""

OF_PODS: tuple[Metric, ...] = (*OF_TRAINING_NODE, *OF_GPU)
OF_THE_OPERATOR: tuple[Metric, ...] = (*OF_OPERATOR, *OF_JOBS, *OF_FLEET)
CATALOGUE = (*OF_PODS, *OF_THE_OPERATOR)


def queries(windows: Windows) -> Queries:
    """Return the check of queries, which also knows the recorded series.

    Raises:
        QueryError: a recording rule queries an unknown series.
    """
    made = Queries(
        {
            **series_of(OF_PODS, OF_TRAINING_PODS),
            **series_of((*OF_THE_OPERATOR, *OF_DCGM), OF_EACH_SCRAPE),
        }
    )
    for rule in rules_of(windows):
        made.learn(rule)
    return made
