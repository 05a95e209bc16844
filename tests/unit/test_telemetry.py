"""What a rank's reports become: progress, journal, metrics."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from finetune_trainer.config import CheckpointRef, DataReport, Phase, Progress, SampleAnswer
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.telemetry.metrics import Metrics
from launches import train_config


class Clock:
    """Time that only passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(tmp_path: Path, clock: Clock) -> Any:
    opened = Telemetry(train_config(tmp_path), rank=0, world_size=2, clock=clock, started=990.0)
    yield opened
    opened.close()


def report(step: int, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "step": step,
        "epoch": step / 10,
        "loss": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens": 100,
        "samples": 4,
        "seconds": 0.5,
    }
    return StepReport(**(values | changes))


def on_disk(folder: Path) -> Progress:
    return Progress.read(folder / "run" / "progress.json")


def journal(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / "run" / "logs" / f"rank-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_phase_is_on_disk_at_once(telemetry: Telemetry, tmp_path: Path) -> None:
    for phase in (Phase.LOADING, Phase.TRAINING):
        telemetry.phase(phase)
        assert on_disk(tmp_path).phase is phase


def test_steps_reach_the_disk_once_a_second(
    telemetry: Telemetry, clock: Clock, tmp_path: Path
) -> None:
    telemetry.step(report(1))
    clock.wait(0.6)
    telemetry.step(report(2))
    assert (on_disk(tmp_path).step, telemetry.progress.step) == (1, 2)
    clock.wait(0.6)
    telemetry.step(report(3))
    assert on_disk(tmp_path).step == 3
    telemetry.step(report(4))
    telemetry.close()
    assert on_disk(tmp_path).step == 4


def test_start_up_time_leaves_out_evaluation_and_sample_answers(
    telemetry: Telemetry, clock: Clock
) -> None:
    telemetry.phase(Phase.LOADING)
    clock.wait(3)
    telemetry.phase(Phase.EVALUATING)
    clock.wait(20)
    telemetry.phase(Phase.ANSWERING)
    clock.wait(7)
    telemetry.phase(Phase.TRAINING)
    clock.wait(2)
    telemetry.step(report(1))
    clock.wait(2)
    telemetry.step(report(2))
    assert telemetry.progress.first_step_seconds == 10 + 3 + 2


def test_speed_and_time_left_follow_the_steps(telemetry: Telemetry) -> None:
    telemetry.plan(10)
    telemetry.step(report(1, tokens=100, seconds=0.5))
    assert telemetry.progress.tokens_per_second == pytest.approx(200)
    assert telemetry.progress.eta_seconds == pytest.approx(9 * 0.5)
    for step in range(2, 200):
        telemetry.step(report(step, tokens=50, seconds=0.5))
    assert telemetry.progress.tokens_per_second == pytest.approx(100, rel=1e-3)
    assert telemetry.progress.eta_seconds == 0


def test_only_the_evaluation_before_the_first_step_counts_as_before(telemetry: Telemetry) -> None:
    telemetry.evaluated(0, 3.0, 1.0)
    telemetry.evaluated(10, 2.0, 1.0)
    progress = telemetry.progress
    assert (progress.eval_loss_before, progress.eval_loss) == (3.0, 2.0)


def test_a_resumed_run_has_no_loss_before_training_of_its_own(telemetry: Telemetry) -> None:
    telemetry.resumed(5)
    telemetry.evaluated(6, 2.0, 1.0)
    progress = telemetry.progress
    assert (progress.resumed_step, progress.step) == (5, 5)
    assert (progress.eval_loss_before, progress.eval_loss) == (None, 2.0)


def test_both_answers_to_a_prompt_end_up_together_in_the_order_of_prompts(
    telemetry: Telemetry,
) -> None:
    telemetry.answered("Who?", before="him")
    telemetry.answered("Why?", before="because")
    telemetry.answered("Who?", after="her")
    assert telemetry.progress.samples == (
        SampleAnswer(prompt="Who?", before="him", after="her"),
        SampleAnswer(prompt="Why?", before="because"),
    )


def test_a_warning_is_said_once_everywhere(
    telemetry: Telemetry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.warn("3 rows were cut")
    telemetry.warn("3 rows were cut")
    assert capsys.readouterr().err == "warning: 3 rows were cut\n"
    assert on_disk(tmp_path).warnings == ("3 rows were cut",)
    assert [e["message"] for e in journal(tmp_path) if e["event"] == "warning"] == [
        "3 rows were cut"
    ]


def test_progress_keeps_what_was_reported_about_data_and_checkpoints(
    telemetry: Telemetry, tmp_path: Path
) -> None:
    train, held_out = DataReport(rows=10, truncated_rows=1), DataReport(rows=2)
    newest = CheckpointRef(step=4, path="step-4", time=5.0, world_size=2)
    telemetry.data(train)
    telemetry.data(eval=held_out)
    telemetry.plan(7)
    telemetry.checkpointed(newest, best=newest)
    progress = on_disk(tmp_path)
    assert (progress.train_data, progress.eval_data) == (train, held_out)
    assert (progress.checkpoint, progress.best_checkpoint) == (newest, newest)
    assert progress.total_steps == 7


def test_a_request_to_save_is_taken_once(telemetry: Telemetry) -> None:
    assert not telemetry.take_save_request()
    telemetry.request_save()
    assert telemetry.take_save_request()
    assert not telemetry.take_save_request()


def test_a_rank_beside_the_first_writes_its_journal_and_nothing_else(
    tmp_path: Path, clock: Clock
) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=1, world_size=2, clock=clock)
    telemetry.step(report(1))
    telemetry.evaluated(1, 2.0, 1.0)
    telemetry.close()
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("run/logs/rank-1.jsonl")]
    assert {line["rank"] for line in journal(tmp_path, 1)} == {1}


def test_the_journal_is_continued_by_the_next_attempt(tmp_path: Path, clock: Clock) -> None:
    for attempt in (1, 2):
        config = train_config(tmp_path, job={"attempt": attempt})
        Telemetry(config, rank=1, world_size=2, clock=clock).close()
    attempts = [line["attempt"] for line in journal(tmp_path, 1)]
    assert attempts == [1, 2]


def test_a_line_cut_off_by_a_kill_does_not_spoil_the_next_one(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "run" / "logs" / "rank-1.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"event": "ste')
    Telemetry(train_config(tmp_path), rank=1, world_size=2, clock=clock).close()
    first, second = path.read_text().splitlines()
    assert first == '{"event": "ste'
    assert json.loads(second)["event"] == "started"


def test_a_loss_that_is_no_number_is_still_json(telemetry: Telemetry, tmp_path: Path) -> None:
    telemetry.step(report(1, loss=math.nan, grad_norm=math.inf))
    step = next(line for line in journal(tmp_path) if line["event"] == "step")
    assert (step["loss"], step["grad_norm"]) == ("NaN", "Infinity")
    assert on_disk(tmp_path).loss is None


def test_closing_twice_and_reporting_late_does_no_harm(
    telemetry: Telemetry, tmp_path: Path
) -> None:
    telemetry.close()
    telemetry.close()
    telemetry.warn("the saver was late")
    assert on_disk(tmp_path).warnings == ("the saver was late",)


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the page's values by name and by the label beside the rank."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = {}
    for sample in (s for family in families for s in family.samples):
        labels = {k: v for k, v in sample.labels.items() if k != "rank"}
        found[sample.name, ",".join(labels.values())] = sample.value
    return found


def test_metrics_of_a_step_have_the_names_of_the_catalogue(tmp_path: Path) -> None:
    metrics = Metrics(train_config(tmp_path, job={"attempt": 3}), rank=0)
    first = report(1, data_wait_seconds=0.1, checkpoint_blocking_seconds=0.15)
    metrics.step(first, seconds_per_step=0.5, now=1234.0)
    metrics.step(report(2, loss=math.nan), seconds_per_step=0.5, now=1235.0)
    metrics.evaluated(1.5, seconds=2.0)
    metrics.checkpointed(CheckpointRef(step=2, path="x", time=77.0, world_size=2))
    page = samples(metrics)
    expected = {
        ("finetune_train_steps_total", ""): 2,
        ("finetune_train_global_step", ""): 2,
        ("finetune_train_last_step_timestamp_seconds", ""): 1235,
        ("finetune_train_tokens_total", "nonpad"): 200,
        ("finetune_train_samples_total", ""): 8,
        ("finetune_train_grad_norm", ""): 0.5,
        ("finetune_train_learning_rate", ""): 1e-3,
        ("finetune_train_epoch_ratio", ""): 0.2,
        ("finetune_train_eval_loss", ""): 1.5,
        ("finetune_train_nonfinite_total", "loss"): 1,
        ("finetune_train_restart_attempt", ""): 3,
        ("finetune_train_checkpoint_last_success_timestamp_seconds", ""): 77,
        ("finetune_train_checkpoint_last_step", ""): 2,
        ("finetune_train_step_duration_seconds_count", ""): 2,
        ("finetune_train_step_duration_seconds_sum", ""): 1,
        ("finetune_train_checkpoint_duration_seconds_count", "save_blocking"): 1,
    }
    assert {key: page[key] for key in expected} == expected
    assert page["finetune_train_memory_bytes", "host_rss"] > 1e6


def test_the_phases_of_the_metrics_add_up_to_the_time_that_passed(tmp_path: Path) -> None:
    metrics = Metrics(train_config(tmp_path), rank=0)
    first = report(1, seconds=0.5, data_wait_seconds=0.1, checkpoint_blocking_seconds=0.15)
    metrics.step(first, seconds_per_step=0.5, now=1.0)
    metrics.evaluated(1.5, seconds=2.0)
    name = "finetune_train_phase_seconds_total"
    phases = {phase: value for (metric, phase), value in samples(metrics).items() if metric == name}
    assert phases == pytest.approx(
        {"data_wait": 0.1, "checkpoint_blocking": 0.15, "other": 0.25, "eval": 2.0}
    )


def test_a_metric_without_a_value_is_not_on_the_page(tmp_path: Path) -> None:
    names = {name for name, _ in samples(Metrics(train_config(tmp_path), rank=0))}
    assert names == {
        "finetune_train_info",
        "finetune_train_memory_bytes",
        "finetune_train_restart_attempt",
    }


def test_no_metric_names_its_job(tmp_path: Path) -> None:
    page = Metrics(train_config(tmp_path), rank=0).render().decode()
    labels = {
        label
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for label in sample.labels
    }
    assert not labels & {"namespace", "finetunejob", "job", "pod", "node", "instance"}


def test_phases_that_report_nothing_until_they_end_are_not_idle(telemetry: Telemetry) -> None:
    telemetry.phase(Phase.EXPORTING)
    assert telemetry.idle_seconds == 0.0
    telemetry.phase(Phase.TRAINING)
    first = telemetry.idle_seconds
    assert 0.0 < first < telemetry.idle_seconds


def test_skipped_steps_are_counted_over_all_attempts(telemetry: Telemetry) -> None:
    telemetry.resumed(5, skipped_steps=2)
    telemetry.step(report(6, grad_norm=math.inf))
    assert telemetry.progress.skipped_steps == 3


def test_the_log_of_a_pod_tells_how_training_goes_without_a_line_for_each_step(
    telemetry: Telemetry, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.plan(40)
    telemetry.phase(Phase.TRAINING)
    for step in range(1, 41):
        clock.wait(0.5)
        telemetry.step(report(step))
    telemetry.evaluated(40, 1.25, seconds=1.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Training"
    assert lines[-1] == "held-out loss 1.25 at step 40"
    steps = [line.split("  ")[0] for line in lines if line.startswith("step ")]
    assert steps == ["step 1/40", "step 21/40", "step 40/40"]
    assert "loss 2  grad norm 0.5  learning rate 0.001  tokens/s 200" in lines[1]
