"""What is declared is what a run exports: each series of its pages, and nothing else."""

import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_trainer.config import Progress, metrics
from finetune_trainer.config.metrics import Metric, MetricType, Needs, TimedPhase, combinations
from finetune_trainer.telemetry.processes import TICK_SECONDS
from support.launch.journals import journal_in
from support.launch.launches import clean_environment, train_config, until
from support.launch.tiny_run import write_inputs
from support.telemetry.node_pages import Series, ask, free_ports, read_series

DECLARED = {one.name: one for one in metrics.OF_TRAINING_NODE}
NEVER_COUNTED = {  # where nothing goes wrong but that a rank is killed
    metrics.NON_FINITE,
    metrics.CHECKPOINT_FAILURES,
}
_SUFFIXES = {
    MetricType.COUNTER: ("",),
    MetricType.GAUGE: ("",),
    MetricType.HISTOGRAM: ("_bucket", "_count", "_sum"),
}
SAMPLES = {
    f"{one.name}{suffix}": one for one in metrics.OF_TRAINING_NODE for suffix in _SUFFIXES[one.type]
}

# What only those ranks count that go on from a checkpoint.
OF_A_RESTART = {(metrics.CHECKPOINT_DURATION, ("0", "load"))}

Key = tuple[Metric, tuple[str, ...]]


def undeclared(text: str) -> list[str]:
    """Return what is on a page and not in the catalogue: names, labels and their values."""
    found = []
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        metric = SAMPLES.get(sample.name)
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        is_declared = metric is not None and labels.keys() == set(metric.label_names)
        if metric is not None and is_declared:
            allowed = {label.name: label.values for label in metric.labels}
            is_declared = all(
                not allowed[name] or value in allowed[name] for name, value in labels.items()
            )
        if not is_declared:
            found.append(f"{sample.name} {labels}")
    return found


def seen(text: str) -> set[Key]:
    """Return the series of a page, histograms by their counts; of those that count, what is not 0.

    Each by its metric and the values of its labels, the rank's first.
    """
    keys = set()
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        metric = SAMPLES[sample.name]
        is_part = sample.name.endswith(("_bucket", "_sum")) and metric.buckets
        counts = metric.type is not MetricType.GAUGE and metric not in NEVER_COUNTED
        if not is_part and not (counts and sample.value == 0):
            keys.add((metric, tuple(sample.labels[name] for name in metric.label_names)))
    return keys


def expected() -> set[Key]:
    """Return what two ranks must show that need neither a GPU nor NCCL."""
    wanted: set[Key] = set()
    for one in DECLARED.values():
        if one.needs is Needs.NOTHING and one is not metrics.INFO:
            for rank in "0" if one.is_of_rank_zero else "01":
                wanted |= {(one, (rank, *values)) for values in _of_this_run(one)}
    return wanted


def _of_this_run(metric: Metric) -> set[tuple[str, ...]]:
    """Return the labels of a metric after the rank, of one that is sparse those of DDP."""
    if not metric.is_sparse:
        of_gpu = {value for label in metric.labels for value in label.of_gpu}
        return {one for one in combinations(metric.labels[1:]) if not of_gpu & set(one)}
    ours = {"group": {"dp", "control"}, "op": {"all_reduce"}, "size": {"small"}}
    values = product(*(ours[label.name] for label in metric.labels[1:]))
    if metric in (
        metrics.COMM_SECONDS,
        metrics.COMM_BUS_BYTES,
    ):  # nobody knows when a vote was over
        return {one for one in values if "control" not in one}
    return set(values)


@pytest.mark.full
def test_a_run_of_two_processes_shows_all_that_is_declared_also_after_a_restart_in_place(
    tmp_path: Path,
) -> None:
    write_inputs(tmp_path)
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}/metrics"
    config = train_config(
        tmp_path,
        model={"path": str(tmp_path / "model")},
        data={
            "train": {"path": str(tmp_path / "train.jsonl")},
            "eval": {"path": str(tmp_path / "eval.jsonl")},
            "max_seq_len": 64,
        },
        training={"max_steps": 100_000, "eval_every_steps": 5, "micro_batch_size": 2},
        checkpoint={"every_seconds": 86_400},  # the one that the page is asked for comes before
        telemetry={
            "metrics_port": port,
            "profile": {"first_step": 2, "last_step": 2, "ranks": (0, 1)},
        },
        world={"restarts_in_place": 1},
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    began = time.time()
    run = subprocess.Popen(
        [sys.executable, "-m", "finetune_trainer", str(path)],
        env=clean_environment(PYTHONWARNINGS="default", FINETUNE_WATCH_SPEED="10"),
        stdout=subprocess.DEVNULL,
    )
    missing = expected()
    counters: Series = {}
    infos: set[tuple[str, ...]] = set()

    def look() -> str:
        assert run.poll() is None, "it trains until it is told to stop"
        text = ask(url, "GET", "/metrics").text
        assert undeclared(text) == []
        series = {key: value for key, value in read_series(text).items() if _is_counted(key[0])}
        assert {key: value for key, value in counters.items() if series[key] < value} == {}
        counters.update(series)
        keys = seen(text)
        missing.difference_update(keys)
        infos.update(values for metric, values in keys if metric is metrics.INFO)
        return text

    def has_shown_all_of_one_start() -> bool:
        asked = _since_boot()
        num_ranks = _check_phases(run.pid, look(), asked)
        return missing <= OF_A_RESTART and len(infos) == 2 == num_ranks

    def has_shown_all() -> bool:
        look()
        return not missing

    try:
        until(lambda: _answers(url))
        until(lambda: ask(url, "POST", "/checkpoint").status == 202)
        until(has_shown_all_of_one_start, timeout=120)
        _check_account(ask(url, "GET", "/progress").text, began)
        _ranks_of(run.pid)["1"].kill()
        until(has_shown_all, timeout=120)
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 75
    finally:
        run.kill()
        run.wait()
    assert {values[:5] for values in infos} == {
        (rank, "ddp", "fp32", "full", "gloo") for rank in "01"
    }
    _check_that_ranks_share_the_rows_of_a_step(Path(config.run_dir))


def _check_account(progress: str, began: float) -> None:
    """Expect that rank 0 says where its time went, all of it; the run began at `began`."""
    said = Progress.model_validate_json(progress)
    assert said.spent is not None
    spent = said.spent.model_dump()
    assert all(spent[word] > 0 for word in ("starting", "training", "evaluation", "checkpoint"))
    assert sum(spent.values()) <= said.time - began


def _check_phases(supervisor: int, text: str, asked: float) -> int:
    """Expect that the phases of each rank sum to its wall time; return how many ranks there are.

    `asked` is when, in seconds since the machine's start, as is all that the kernel says.
    """
    answered, series, checked = _since_boot(), read_series(text), 0
    for rank, process in _ranks_of(supervisor).items():
        name, started = metrics.PHASE_SECONDS.name, process.create_time() - psutil.boot_time()
        phases = [series.get((name, phase, rank), 0.0) for phase in TimedPhase]
        if any(phases):
            tolerated = 1e-3 * (asked - started) + TICK_SECONDS  # the kernel tells no more
            assert asked - tolerated <= started + sum(phases) <= answered + tolerated
            checked += 1
    return checked


def _ranks_of(supervisor: int) -> dict[str, psutil.Process]:
    """Return the processes of the ranks."""
    children = psutil.Process(supervisor).children()
    return {rank: one for one in children if (rank := one.environ().get("RANK")) is not None}


def _is_counted(name: str) -> bool:
    metric = SAMPLES[name]
    return metric.type is not MetricType.GAUGE


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _answers(url: str) -> bool:
    try:
        return ask(url, "GET", "/metrics").status == 200
    except ConnectionRefusedError:
        return False


def _check_that_ranks_share_the_rows_of_a_step(run_dir: Path) -> None:
    steps = []
    for rank in (0, 1):
        found = [one for one in journal_in(run_dir, rank) if one["event"] == "step"]
        steps.append({one["step"]: one for one in found})
    both = steps[0].keys() & steps[1].keys()  # one may be a step ahead when the other is killed
    assert both
    for one, other in ((steps[0][step], steps[1][step]) for step in both):
        assert one["rank_tokens"] + other["rank_tokens"] == one["tokens"]
        assert one["rank_samples"] + other["rank_samples"] == one["samples"]


@pytest.mark.parametrize(
    "line",
    [
        'finetune_train_surprises_total{rank="0"} 1',
        'finetune_train_steps_created{rank="0"} 1',
        'finetune_train_steps_total{rank="0",pod="x"} 1',
        'finetune_train_tokens_total{rank="0",kind="prompt"} 1',
    ],
)
def test_what_is_not_declared_would_be_found(line: str) -> None:
    assert len(undeclared(f"{line}\n")) == 1
