"""The catalogue of metrics follows the rules of Prometheus, and its reference follows from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer.config import gpu_metrics, metrics
from finetune_trainer.config.metrics import Metric, MetricType, Needs, combinations
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.shared import NodePage, Shared

ROOT = Path(__file__).parents[3]
MOST_SERIES_OF_A_RANK = 200
MOST_SERIES_OF_A_GPU = 120
# The scrape configuration adds them; those of a page would become `exported_namespace` and so on.
OF_THE_SCRAPE = {"namespace", "finetunejob", "job", "pod", "node", "instance"}

every_metric = pytest.mark.parametrize(
    "metric", [pytest.param(one, id=one.name) for one in metrics.OF_TRAINING_NODE]
)


@every_metric
def test_a_name_says_type_and_unit(metric: Metric) -> None:
    assert metric.name.startswith(("finetune_train_", "finetune_comm_"))
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    if metric.unit in ("seconds", "bytes"):
        assert metric.unit in metric.name.removesuffix("_total").split("_")[-1]
    assert metric.help.endswith(".")


@every_metric
def test_labels_begin_with_the_rank_and_name_no_job(metric: Metric) -> None:
    assert metric.labels[0] == metrics.RANK
    assert len(set(metric.label_names)) == len(metric.labels)
    assert not OF_THE_SCRAPE & set(metric.label_names)


@every_metric
def test_histograms_alone_have_buckets_that_rise(metric: Metric) -> None:
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_each_metric_is_declared_once() -> None:
    declared = [one for one in vars(metrics).values() if isinstance(one, Metric)]
    assert sorted(one.name for one in declared) == sorted(
        one.name for one in metrics.OF_TRAINING_NODE
    )
    assert len({one.name for one in declared}) == len(declared)


of_a_gpu = pytest.mark.parametrize(
    "metric", [pytest.param(one, id=one.name) for one in gpu_metrics.OF_GPU]
)


@of_a_gpu
def test_a_metric_of_a_gpu_says_type_and_unit_and_begins_with_its_uuid(metric: Metric) -> None:
    assert metric.name.startswith("finetune_gpu_")
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    if metric.unit in ("seconds", "bytes", "joules", "watts", "hertz", "ratio"):
        assert metric.unit == metric.name.removesuffix("_total").split("_")[-1]
    assert metric.help.endswith(".")
    assert metric.labels[0] == gpu_metrics.GPU
    assert not OF_THE_SCRAPE & set(metric.label_names)
    assert metric.needs is Needs.GPU


def test_each_metric_of_a_gpu_is_declared_once() -> None:
    declared = [one for one in vars(gpu_metrics).values() if isinstance(one, Metric)]
    names = [one.name for one in gpu_metrics.OF_GPU]
    assert sorted(one.name for one in declared) == sorted(names)
    assert len(set(names)) == len(names)


def test_a_gpu_has_no_more_series_than_its_share() -> None:
    of_xids = sum(one.label_names[1:] == ("xid",) for one in gpu_metrics.OF_GPU)
    known = sum(len(combinations(one.labels[1:])) for one in gpu_metrics.OF_GPU)
    assert known + of_xids * gpu_metrics.MOST_XIDS <= MOST_SERIES_OF_A_GPU


def test_a_rank_has_no_more_series_than_its_share() -> None:
    series = sum(
        (one.most_series or max(1, len(combinations(one.labels[1:]))))
        * (len(one.buckets) + 3 if one.buckets else 1)
        for one in metrics.OF_TRAINING_NODE
    )
    assert series <= MOST_SERIES_OF_A_RANK


def test_a_page_has_no_series_of_when_it_was_made(tmp_path: Path) -> None:
    Shared(NodePage(folder=str(tmp_path)), 0)
    text = RankCollector(NodeRanks(tmp_path, range(1))).render().decode()
    assert "finetune_train_steps_total{" in text
    assert "_created" not in text


def test_the_reference_is_what_the_catalogue_makes() -> None:
    command = [sys.executable, str(ROOT / "docs/reference/generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
