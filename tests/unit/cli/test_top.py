"""What `ftctl top` makes of pages, statuses and progress; older and strange ones included."""

import io
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.local import proc, records
from finetune_operator.backends.local.layout import attempt_folder
from finetune_operator.backends.local.records import AttemptRecord, NodeRecord
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.app import app
from finetune_operator.cli.top_cluster import row_of
from finetune_operator.cli.top_ranks import NodePage, ranks_of, read_page
from finetune_operator.cli.top_rows import (
    JobRow,
    RankRow,
    Screen,
    SuspectRow,
    progress_in,
    suspects_in,
)
from finetune_operator.cli.top_table import tables
from support.api.builders import manifest
from support.charts.served_pages import served


def page(node: str = "a", **ranks: str) -> NodePage:
    """Return the page of a node; `ranks` is the text of `r0` and so on, a series a line."""
    lines = []
    for name, series in ranks.items():
        for line in series.split(";"):
            metric, *label, value = line.split()
            labels = ",".join([f'rank="{name[1:]}"', *label])
            lines.append(f"finetune_{metric}{{{labels}}} {value}")
    return read_page(node, "\n".join([*lines, ""]))


def phases(data: float, forward: float, exposed: float, more: str = "") -> str:
    return (
        f'train_phase_seconds_total phase="data_wait" {data};'
        f'train_phase_seconds_total phase="forward" {forward};'
        f'train_phase_seconds_total phase="comm_exposed" {exposed};'
        f"train_last_seen_age_seconds 0.5{more}"
    )


def test_a_rank_is_in_the_phase_that_took_most_of_the_time_between_two_looks() -> None:
    before = page(r0=phases(50, 10, 5), r1=phases(50, 10, 5))
    now = page(r0=phases(50, 16, 9), r1=phases(50.5, 11, 13.5))
    first, second = ranks_of([before], [now], ["a"], 2)
    assert (first.phase, first.waiting_ratio) == ("forward", 0.4)
    assert (second.phase, second.waiting_ratio) == ("comm_exposed", 0.9)
    assert second.phase_ratios == {"data_wait": 0.05, "forward": 0.1, "comm_exposed": 0.85}


def test_one_look_or_a_process_that_began_anew_says_nothing_of_phases() -> None:
    now = page(r0=phases(1, 2, 3))
    for before in ([], [page(r0=phases(1, 2, 3))], [page(r0="train_last_seen_age_seconds 1")]):
        (rank,) = ranks_of(before, [now], ["a"], 1)
        assert (rank.phase, rank.waiting_ratio, rank.age_seconds) == (None, None, 0.5)


def test_a_rank_has_its_own_gpu_and_the_memory_of_its_process() -> None:
    info = ';train_info gpu_uuid="GPU-{}" 1;train_memory_bytes kind="host_rss" 7'
    now = page(
        r0=phases(1, 2, 3, info.format("x") + ";train_step_duration_ewma_seconds 0.25"),
        r1=phases(1, 2, 3, info.format("y")),
    )
    text = 'finetune_gpu_utilization_ratio{gpu="GPU-x"} 0.9\n'
    text += 'finetune_gpu_utilization_ratio{gpu="GPU-z"} 0.1\n'
    gpus = read_page("a", text).samples
    first, second = ranks_of([], [NodePage("a", {**now.samples, **gpus})], ["a"], 2)
    assert (first.gpu, first.gpu_utilization_ratio, first.step_seconds) == ("GPU-x", 0.9, 0.25)
    assert (second.gpu, second.gpu_utilization_ratio, second.step_seconds) == ("GPU-y", None, None)
    assert first.memory_bytes == {"host_rss": 7}


def test_ranks_of_a_node_that_does_not_answer_are_there_without_numbers() -> None:
    rows = ranks_of([], [page("b", r2=phases(1, 2, 3), r3=phases(1, 2, 3))], ["a", "b"], 2)
    assert [(row.rank, row.node, row.age_seconds) for row in rows] == [
        (0, "a", None),
        (1, "a", None),
        (2, "b", 0.5),
        (3, "b", 0.5),
    ]


def test_scores_are_of_all_ranks_and_causes_of_those_who_hold_the_others_back() -> None:
    score = ";train_straggler_score {}"
    now = page(r0=phases(1, 2, 3, score.format(0.9)), r1=phases(1, 2, 3, score.format(1.3)))
    rows = ranks_of([], [now], ["a"], 2, [SuspectRow(rank=1, cause="compute", score=1.31)])
    assert [(row.score, row.cause) for row in rows] == [(0.9, None), (1.31, "compute")]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (None, ()),
        ("nobody", ()),
        ([{"rank": "one"}, "two", {}], ()),
        (
            [{"rank": 1, "cause": "stuck", "node": "n", "score": None, "since": 3}],
            (SuspectRow(rank=1, cause="stuck"),),
        ),
        (
            [{"rank": 2, "cause": "data", "score": 1.5}],
            (SuspectRow(rank=2, cause="data", score=1.5),),
        ),
        ([{"rank": 2, "cause": "data", "score": "much"}], (SuspectRow(rank=2, cause="data"),)),
    ],
)
def test_suspects_are_read_as_far_as_they_can_be(told: Any, found: tuple[SuspectRow, ...]) -> None:
    assert suspects_in(told) == found


@pytest.mark.parametrize(
    ("status", "row"),
    [
        (None, JobRow(namespace="n", name="j", phase="Pending")),
        (
            {
                "phase": "Running",
                "attempt": 2,
                "restarts": {"counted": 1},
                "progress": {"step": 3, "totalSteps": 9, "loss": 1.5, "tokensPerSecond": 10.5},
                "suspects": [{"rank": 1, "cause": "compute", "score": 1.2}],
                "news": "of a later version",
            },
            JobRow(
                namespace="n",
                name="j",
                phase="Running",
                attempt=2,
                restarts=1,
                step=3,
                total_steps=9,
                loss=1.5,
                tokens_per_second=10.5,
                suspects=(SuspectRow(rank=1, cause="compute", score=1.2),),
            ),
        ),
        (
            {"phase": "Running", "progress": {"step": "three", "loss": [1]}, "restarts": "many"},
            JobRow(namespace="n", name="j", phase="Running"),
        ),
    ],
    ids=["none yet", "whole", "strange"],
)
def test_a_status_of_another_version_is_shown_as_far_as_it_can_be(
    status: dict[str, Any] | None, row: JobRow
) -> None:
    assert row_of({"metadata": {"namespace": "n", "name": "j"}, "status": status}) == row


def test_reason_and_age_of_a_job_match_kubectl_get() -> None:
    conditions = [
        {"type": "Running", "status": "False", "reason": "Provisioning"},
        {"type": "Ready", "status": "False", "reason": "Unschedulable"},
    ]
    created = (datetime.now(UTC) - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {"namespace": "n", "name": "j", "creationTimestamp": created}
    row = row_of({"metadata": metadata, "status": {"conditions": conditions}})
    assert row.reason == "Unschedulable"
    assert row.age_seconds == pytest.approx(7200, abs=60)


def run_of_this_process(folder: Path, port: int) -> None:
    """Make a run directory in which this process is the one node of a job, with two ranks."""
    made = manifest(observability__metrics_port=port)
    attempt = attempt_folder(folder, 1)
    attempt.node(0).parent.mkdir(parents=True)
    RunFolder(folder).save(FineTuneJob.model_validate(made))
    whose = AttemptRecord(uid="u", attempt=1, nodes=1, processes_per_node=2, output_dir="x")
    records.write(attempt.attempt, whose)
    process = proc.look_up(os.getpid())
    assert process is not None
    node = NodeRecord(
        pid=process.pid, start_time=process.start_time, boot_id=process.boot_id, uid=os.getuid()
    )
    records.write(attempt.node(0), node)


AGES = "".join(f'finetune_train_last_seen_age_seconds{{rank="{rank}"}} 1\n' for rank in (0, 1))


@pytest.mark.parametrize(
    ("text", "missing"),
    [(AGES, 1), (AGES[: len(AGES) // 2 + 20], 0), ("{}", 0)],
    ids=["cut off", "cut off where it counts itself", "of something else"],
)
def test_a_page_that_cannot_be_read_leaves_its_ranks_without_numbers(
    tmp_path: Path, text: str, missing: int
) -> None:
    progress = json.dumps({"phase": "Training", "step": 7})
    pages = {"/metrics": lambda: text, "/progress": lambda: progress}
    with served(pages, missing=missing) as address:
        run_of_this_process(tmp_path, int(address.rpartition(":")[2]))
        (tmp_path / "progress.json").write_text(progress)
        done = CliRunner().invoke(app, ["top", str(tmp_path), "--once", "-o", "json"])
    assert (done.exit_code, done.exception) == (0, None)
    told = json.loads(done.stdout)
    assert [(one["rank"], one["node"], one["ageSeconds"]) for one in told["ranks"]] == [
        (0, "node-0", None),
        (1, "node-0", None),
    ]
    assert (told["job"]["phase"], told["job"]["step"]) == ("Training", 7)
    (note,) = told["notes"]
    assert note.startswith("the page of node-0 cannot be read (")


def test_a_step_that_is_no_number_is_not_known() -> None:
    (rank,) = ranks_of([], [page(r0=phases(1, 2, 3, ";train_global_step Inf"))], ["a"], 1)
    assert rank.step is None
    assert progress_in({"step": float("nan"), "loss": float("inf")})["step"] is None


def shown(screen: Screen) -> list[list[str]]:
    """Return the words of each line."""
    out = io.StringIO()
    Console(file=out, width=200).print(tables(screen))
    return [line.split() for line in out.getvalue().splitlines()]


def test_what_is_not_known_is_a_dash() -> None:
    screen = Screen(
        jobs=(JobRow(namespace="n", name="j", phase="Queued"),),
        ranks=(RankRow(rank=0),),
        notes=("the pod is silent",),
    )
    head, job, _, ranks, rank, note = shown(screen)
    assert head[:4] == ["JOB", "PHASE", "REASON", "STEP"]
    assert job == ["n/j", "Queued", "-", "-", "-", "-", "-", "0", "-", "-"]
    assert ranks == [
        "RANK",
        "NODE",
        "PHASE",
        "STEP",
        "STEP",
        "TIME",
        "WAITS",
        "SCORE",
        "MEMORY",
        "GPU",
        "SEEN",
    ]
    assert rank == ["0", *"-" * 9]
    assert note == ["!", "the", "pod", "is", "silent"]


def test_what_is_known_is_in_the_units_that_people_use() -> None:
    suspect = SuspectRow(rank=1, cause="compute", score=1.234)
    job = JobRow(
        namespace="n",
        name="j",
        phase="Training",
        reason="CheckpointFailed",
        step=3,
        total_steps=9,
        loss=1.5,
        tokens_per_second=12345.6,
        eta_seconds=125,
        age_seconds=3 * 86_400 + 5 * 3600,
        suspects=(suspect,),
    )
    rank = RankRow(
        rank=1,
        node="a",
        step=3,
        phase="forward",
        step_seconds=0.0512,
        waiting_ratio=0.256,
        score=1.234,
        cause="compute",
        memory_bytes={"host_rss": 2**30, "allocated": 3 * 2**29},
        gpu_utilization_ratio=0.75,
        age_seconds=0.2,
    )
    _, told, _, _, row = shown(Screen(jobs=(job,), ranks=(rank,)))
    assert " ".join(told) == (
        "n/j Training CheckpointFailed 3/9 1.500 12,346 2m05s 0 3d05h rank 1 (compute 1.23)"
    )
    assert " ".join(row) == "1 a forward 3 51 ms 26 % 1.23 compute 1.50 GiB 75 % 0s ago"


def test_runs_of_one_job_are_told_apart_by_their_folders() -> None:
    one = JobRow(namespace="n", name="j", phase="Running", run_directory="runs/n/j")
    old = one.model_copy(update={"phase": "Succeeded", "run_directory": "runs/n/j.1"})
    other = one.model_copy(update={"name": "k", "run_directory": "runs/n/k"})
    _, *rows = shown(Screen(jobs=(one, old, other)))
    assert [" ".join(row[:4]) for row in rows] == [
        "n/j in runs/n/j Running",
        "n/j in runs/n/j.1 Succeeded",
        "n/k Running - -",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-o", "json"], "add --once"),
        ([], "the output is not a terminal"),
        (["-A", "-n", "x", "--once"], "--all-namespaces shows all jobs"),
        (["tiny", "-A", "--once"], "--all-namespaces shows all jobs"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["top", *words])
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
