"""What a rank's reports become: progress, journal, metrics."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import (
    CheckpointRef,
    DataReport,
    Phase,
    Progress,
    SampleAnswer,
    metrics,
)
from finetune_trainer.telemetry import Gpu, GpuMemory, StepReport, Telemetry
from finetune_trainer.telemetry.boundary import read_boundary
from finetune_trainer.telemetry.node.node_ranks import NodeRanks
from finetune_trainer.telemetry.node.page import RankCollector
from finetune_trainer.telemetry.numbers import info_labels
from finetune_trainer.telemetry.shared import NodePage, Shared, block_file, info_file
from finetune_trainer.telemetry.slots import Block, Word
from support.launch.journals import journal_in
from support.launch.launches import train_config
from support.telemetry.node_pages import Series, read_series


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
    return journal_in(folder / "run", rank)


def test_a_phase_is_on_disk_at_once(telemetry: Telemetry, tmp_path: Path) -> None:
    for phase in (Phase.LOADING, Phase.TRAINING):
        telemetry.phase(phase)
        assert on_disk(tmp_path).phase is phase


def test_steps_reach_the_disk_every_two_seconds(
    telemetry: Telemetry, clock: Clock, tmp_path: Path
) -> None:
    telemetry.step(report(1))
    clock.wait(1.2)
    telemetry.step(report(2))
    assert (on_disk(tmp_path).step, telemetry.progress.step) == (1, 2)
    clock.wait(1.2)
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


def test_profiled_steps_are_left_out_of_speed_time_left_and_comparisons(
    tmp_path: Path, clock: Clock
) -> None:
    shared = Shared(NodePage(), 0)
    config = train_config(tmp_path)
    telemetry = Telemetry(config, rank=0, world_size=2, clock=clock, shared=shared)
    telemetry.plan(10)
    for step in range(1, 4):
        telemetry.step(report(step, seconds=0.5))
    known = telemetry.progress
    before = read_boundary(shared.block.snapshot())
    telemetry.is_recording_profile = True
    telemetry.step(report(4, seconds=30.0, is_profiled=True))
    profiled = read_boundary(shared.block.snapshot())
    telemetry.is_recording_profile = False
    telemetry.step(report(5, seconds=0.1, profiling_seconds=20.0))
    assert telemetry.progress.tokens_per_second == pytest.approx(known.tokens_per_second)
    assert telemetry.progress.eta_seconds == pytest.approx(5 * 0.5)
    after = read_boundary(shared.block.snapshot())
    assert before is not None
    assert profiled is not None
    assert after is not None
    assert (before.apart_seconds, after.steps) == (0, 5)
    assert profiled.apart_seconds == after.apart_seconds == pytest.approx(profiled.at - before.at)
    telemetry.close()


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


def test_a_rank_beside_the_first_writes_its_journal_and_nothing_else(
    tmp_path: Path, clock: Clock
) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=1, world_size=2, clock=clock)
    telemetry.step(report(1))
    telemetry.evaluated(1, 2.0, 1.0)
    telemetry.close()
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("run/logs/attempt-1.1/rank-1.jsonl")]
    assert {line["rank"] for line in journal(tmp_path, 1)} == {1}


def test_each_start_of_an_attempt_writes_a_journal_of_its_own(tmp_path: Path, clock: Clock) -> None:
    starts = [(1, 1), (1, 2), (2, 1)]
    for attempt, generation in starts:
        config = train_config(tmp_path, job={"attempt": attempt})
        Telemetry(config, rank=1, world_size=2, clock=clock, generation=generation).close()
    files = sorted((tmp_path / "run" / "logs").glob("*/rank-1.jsonl"))
    assert [file.parent.name for file in files] == ["attempt-1.1", "attempt-1.2", "attempt-2.1"]
    for file, (attempt, _) in zip(files, starts, strict=True):
        assert json.loads(file.read_text())["attempt"] == attempt


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


class Node:
    """Two ranks of a node, and its page, in this process."""

    def __init__(self, folder: Path) -> None:
        self.page = NodePage(folder=str(folder))
        self.ranks = NodeRanks(folder, range(2))

    def rank(self, number: int) -> Shared:
        return Shared(self.page, number)

    def series(self) -> Series:
        return read_series(RankCollector(self.ranks).render().decode())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    folder = tmp_path / "node"
    folder.mkdir()
    return Node(folder)


@pytest.mark.parametrize("is_known", [True, False], ids=["this attempt", "an earlier attempt"])
def test_the_losses_belong_to_the_exported_weights(
    tmp_path: Path, node: Node, is_known: bool
) -> None:
    config = train_config(tmp_path)
    telemetry = Telemetry(config, rank=0, world_size=1, shared=node.rank(0))
    if is_known:
        telemetry.step(report(1, loss=3.0))
        telemetry.evaluated(1, 2.0, 1.0)
    telemetry.step(report(2, loss=4.0))
    telemetry.evaluated(2, 5.0, 1.0)
    best = CheckpointRef(step=1, path="x", time=1.0, world_size=1, eval_loss=2.0)
    telemetry.went_back(best)
    progress = telemetry.progress
    telemetry.close()
    assert (progress.step, progress.exported_step, progress.eval_loss) == (2, 1, 2.0)
    assert progress.loss == (3.0 if is_known else None)
    assert node.series()["finetune_train_eval_loss", "0"] == 2.0


def test_what_a_rank_reports_is_on_the_page_of_its_node(tmp_path: Path, node: Node) -> None:
    config = train_config(tmp_path, job={"attempt": 3})
    clock = Clock()
    telemetry = Telemetry(config, rank=0, world_size=2, clock=clock, shared=node.rank(0))
    steps = {"rank_tokens": 60, "rank_samples": 3, "rank_padding": 4, "rank_flops": 1e9}
    telemetry.step(report(1, **steps))
    clock.wait(235)
    telemetry.step(report(2, grad_norm=math.inf, **steps))
    telemetry.evaluated(2, 1.5, seconds=2.0)
    telemetry.checkpointed(CheckpointRef(step=2, path="x", time=77.0, world_size=2))
    costs = telemetry.checkpoint_costs
    costs.loaded(3)
    costs.blocked(0.5, 600)
    costs.committed(7, 4096, 600)
    costs.failed()
    telemetry.close()
    page = node.series()
    expected = {
        ("steps_total",): 2,
        ("global_step",): 2,
        ("last_step_timestamp_seconds",): 1235,
        ("step_duration_ewma_seconds",): 0.5,
        ("tokens_total", "nonpad"): 120,
        ("tokens_total", "pad"): 8,
        ("model_flops_total",): 2e9,
        ("samples_total",): 6,
        ("loss",): 2.0,
        ("grad_norm",): math.inf,
        ("learning_rate",): 1e-3,
        ("epoch_ratio",): 0.2,
        ("eval_loss",): 1.5,
        ("nonfinite_total", "grad"): 1,
        ("nonfinite_total", "loss"): 0,
        ("restart_attempt",): 3,
        ("checkpoint_last_success_timestamp_seconds",): 77,
        ("checkpoint_last_step",): 2,
        ("step_duration_seconds_count",): 2,
        ("step_duration_seconds_sum",): 1,
        ("checkpoint_duration_seconds_count", "save_blocking"): 1,
        ("checkpoint_duration_seconds_sum", "save_async"): 7,
        ("checkpoint_duration_seconds_count", "load"): 1,
        ("checkpoint_bytes_total",): 4096,
        ("checkpoint_failures_total",): 1,
        ("checkpoint_interval_seconds",): 600,
    }
    found = {key: page[f"finetune_train_{key[0]}", *key[1:], "0"] for key in expected}
    assert found == expected
    assert page["finetune_train_memory_bytes", "host_rss", "0"] > 1e6


def test_what_rank_0_alone_knows_is_of_no_other_rank(tmp_path: Path, node: Node) -> None:
    for rank in (0, 1):
        config = train_config(tmp_path)
        telemetry = Telemetry(config, rank=rank, world_size=2, shared=node.rank(rank))
        telemetry.step(report(1))
        telemetry.evaluated(1, 2.0, 1.0)
        telemetry.checkpointed(CheckpointRef(step=1, path="x", time=1.0, world_size=2))
        telemetry.checkpoint_costs.blocked(1.0, 60.0)
        telemetry.close()
    names: dict[str, set[str]] = {"0": set(), "1": set()}
    for key in node.series():
        names[key[-1] if key[0] != "finetune_train_info" else key[4]].add(key[0])
    of_rank_zero = {one.name for one in metrics.OF_TRAINING_NODE if one.is_of_rank_zero}
    only = {re.sub("_(bucket|count|sum)$", "", name) for name in names["0"] - names["1"]}
    assert only == of_rank_zero
    assert names["1"] <= names["0"]


def test_a_gpu_is_in_the_info_and_its_memory_is_looked_at_now_and_then(
    tmp_path: Path, node: Node
) -> None:
    config, clock = train_config(tmp_path, training={"precision": "bf16"}), Clock()
    telemetry = Telemetry(config, rank=1, world_size=2, clock=clock, shared=node.rank(1))
    looks = iter(
        [GpuMemory(10, 20, 15, alloc_retries=1), GpuMemory(11, 30, 25, alloc_retries=3, ooms=1)]
    )
    gpu = Gpu("NVIDIA H200", "GPU-1a2b", "2.27.3", lambda: next(looks))
    before = node.series()
    assert not [key for key in before if key[1:2] == ("allocated",) or "ooms" in key[0]]
    telemetry.device(gpu)
    telemetry.step(report(1))
    telemetry.step(report(2))  # at once: not looked at again
    clock.wait(10)
    telemetry.step(report(3))
    telemetry.close()
    page = node.series()
    assert page["finetune_train_memory_bytes", "allocated", "1"] == 11
    assert page["finetune_train_memory_bytes", "reserved", "1"] == 30
    assert page["finetune_train_memory_bytes", "peak_allocated", "1"] == 25
    assert page["finetune_train_alloc_retries_total", "1"] == 3
    assert page["finetune_train_ooms_total", "1"] == 1
    assert page["finetune_train_peak_flops_per_second", "1"] == 989.4e12
    (info,) = (key for key in page if key[0] == "finetune_train_info")
    assert {"NVIDIA H200", "GPU-1a2b", "2.27.3"} <= set(info)


@pytest.mark.parametrize(
    ("source", "uuid"), [("own", "GPU-1a2b"), ("dcgm", "GPU-1a2b"), ("none", "")]
)
def test_the_uuid_by_which_metrics_of_gpus_are_joined_is_there_where_they_are_wanted(
    tmp_path: Path, source: str, uuid: str
) -> None:
    config = train_config(tmp_path, telemetry={"gpu_metrics": source})
    gpu = Gpu("NVIDIA H200", "GPU-1a2b", "2.27.3", GpuMemory)
    assert info_labels(config, 0, gpu)["gpu_uuid"] == uuid
    assert info_labels(config, 0)["gpu_uuid"] == ""


def test_flops_that_are_not_known_are_absent(tmp_path: Path, node: Node) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=node.rank(0))
    telemetry.step(report(1, rank_flops=None))
    telemetry.close()
    assert ("finetune_train_model_flops_total", "0") not in node.series()


def test_a_rank_that_has_reported_nothing_has_an_age_and_counters_at_0(node: Node) -> None:
    assert node.series() == {}
    Block.open(Path(node.page.folder or "") / block_file(1))  # made, and nothing in it yet
    assert node.series() == {}
    node.rank(1)
    page = node.series()
    assert page["finetune_train_last_seen_age_seconds", "1"] >= 0
    assert page["finetune_train_steps_total", "1"] == 0
    assert not {"finetune_train_loss", "finetune_train_global_step"} & {key[0] for key in page}


def test_a_gradient_norm_that_is_no_number_is_counted_and_not_shown(
    tmp_path: Path, node: Node
) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=node.rank(0))
    telemetry.step(report(1, grad_norm=math.nan))
    telemetry.close()
    page = node.series()
    assert page["finetune_train_nonfinite_total", "grad", "0"] == 1
    assert ("finetune_train_grad_norm", "0") not in page


def test_a_loss_that_is_no_number_is_counted(tmp_path: Path, node: Node) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=1, world_size=2, shared=node.rank(1))
    telemetry.loss_was_not_finite(4)
    telemetry.close()
    assert node.series()["finetune_train_nonfinite_total", "loss", "1"] == 1


def test_a_page_has_the_same_series_after_10_and_after_1000_steps(
    tmp_path: Path, node: Node
) -> None:
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=node.rank(0))
    series = []
    for steps in (range(1, 11), range(11, 1001)):
        for step in steps:
            telemetry.step(report(step, seconds=step / 10))
        series.append(node.series().keys())
    telemetry.close()
    assert series[0] == series[1]


def test_a_later_process_of_a_rank_continues_its_counters(tmp_path: Path, node: Node) -> None:
    for _ in range(2):
        telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=node.rank(0))
        telemetry.step(report(1))
        telemetry.close()
    page = node.series()
    assert page["finetune_train_steps_total", "0"] == 2
    assert page["finetune_train_step_duration_seconds_bucket", "+Inf", "0"] == 2


def test_the_memory_of_another_process_of_the_same_number_is_not_shown(node: Node) -> None:
    node.rank(0).block.numbers[Word.PROCESS_START] += 1
    assert ("finetune_train_memory_bytes", "host_rss", "0") not in node.series()


def test_a_request_to_save_is_taken_once_also_by_a_later_process(node: Node) -> None:
    assert not node.ranks.request_save()  # there is nobody yet who would hear of it
    first = node.rank(0)
    assert not first.take_save_request()
    assert node.ranks.request_save()
    assert first.take_save_request()
    assert not first.take_save_request()
    assert node.ranks.request_save()
    again = node.rank(0)
    assert again.take_save_request()
    assert not again.take_save_request()


def test_a_page_that_has_no_room_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    shared = Shared(NodePage(folder=str(tmp_path / "nowhere")), 0)
    telemetry = Telemetry(train_config(tmp_path), rank=0, world_size=1, shared=shared)
    telemetry.step(report(1))
    telemetry.close()
    about_texts, about_numbers = telemetry.progress.warnings
    assert about_texts.startswith("the page of this node cannot be updated (No such file")
    assert about_numbers.endswith("training continues without rank 0 on the page of its node")
    assert on_disk(tmp_path).step == 1


@pytest.mark.parametrize("text", ['{"strategy": "dd', '{"strategy": "ddp"}', "[]", ""])
def test_labels_that_are_cut_off_or_of_another_version_leave_the_rest_on_the_page(
    tmp_path: Path, node: Node, text: str
) -> None:
    node.rank(0)
    (tmp_path / "node" / info_file(0)).write_text(text)
    names = {key[0] for key in node.series()}
    assert "finetune_train_steps_total" in names
    assert "finetune_train_info" not in names


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
