"""What `ftctl run` shows: the view of a job, its news, its lines and its frame."""

import io
from typing import Any

import pytest
from rich.console import Console

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.cli.live import LiveScreen, frame
from finetune_operator.cli.plain import PlainScreen
from finetune_operator.cli.view import View, duration, news, view_of
from finetune_trainer.config import (
    CheckpointRef,
    ExitCode,
    FailureClass,
    Phase,
    Progress,
    Termination,
    TrackerRun,
)
from support.api.builders import job


def checkpoint(step: int) -> CheckpointRef:
    return CheckpointRef(step=step, path=f"step-{step}", time=1.0, world_size=2)


def view(phase: str = "Running", attempt: int = 1, **progress: Any) -> View:
    """Look at a job in `phase` whose rank 0 last said `progress`; nothing when that is empty."""
    status = {"phase": phase, "attempt": attempt}
    said = Progress(phase=Phase.TRAINING, attempt=attempt, **progress) if progress else None
    return view_of(job(status=status), Observation(AttemptPhase.RUNNING, progress=said))


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_view_names_what_the_trainer_does_while_it_works() -> None:
    assert view(step=3, total_steps=10).phase == "Training"


def test_view_names_the_phase_of_the_job_when_the_trainer_does_not_work() -> None:
    assert view("Suspended", step=3, total_steps=10).phase == "Suspended"
    assert view("Pending").phase == "Pending"


def test_view_keeps_the_last_word_while_nothing_is_heard() -> None:
    before = view(step=3, total_steps=10, loss=1.5)

    after = view_of(job(status={"phase": "Restarting", "attempt": 1}), None, before)

    assert after.progress == before.progress
    assert after.phase == "Restarting"


def test_view_takes_the_last_words_over_an_older_progress() -> None:
    last = Progress(phase=Phase.DONE, step=10, total_steps=10)
    words = Termination(
        failure_class=FailureClass.COMPLETED, exit_code=ExitCode.DONE, message="", progress=last
    )
    seen = Observation(AttemptPhase.SUCCEEDED, progress=Progress(step=9), termination=words)

    assert view_of(job(), seen).progress == last


def test_news_tell_of_a_failed_attempt_and_of_the_one_that_follows() -> None:
    ended = {
        "number": 1,
        "endTime": "2026-01-01T00:00:00Z",
        "failureClass": "WorkerLost",
        "exitCode": 137,
        "message": "rank 1 was killed",
    }
    before = view(step=9)
    status = {"phase": "Running", "attempt": 2, "attempts": [ended]}
    said = Progress(attempt=2, phase=Phase.TRAINING, step=8, resumed_step=8)

    after = view_of(job(status=status), Observation(AttemptPhase.RUNNING, progress=said))

    assert news(before, after) == [
        "attempt 1 ended, WorkerLost (exit code 137): rank 1 was killed",
        "attempt 2 starts",
        "resumed from the checkpoint of step 8",
    ]
    assert news(after, after) == []


def test_news_say_nothing_of_an_attempt_that_completed() -> None:
    done = {"number": 1, "failureClass": "Completed", "exitCode": 0}
    after = view_of(job(status={"phase": "Succeeded", "attempt": 1, "attempts": [done]}), None)

    assert news(view(step=9), after) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        pytest.param(
            {"step": 0},
            {"eval_loss_before": 2.105},
            "held-out loss 2.105 before training",
            id="first evaluation",
        ),
        pytest.param(
            {"eval_loss_before": 2.105},
            {"eval_loss_before": 2.105, "eval_loss": 1.415, "step": 32},
            "held-out loss 1.415 at step 32",
            id="later evaluation",
        ),
        pytest.param(
            {"step": 7, "eval_loss": 2.0},
            {"step": 7, "eval_loss": 1.415, "exported_step": 5},
            "held-out loss 1.415 at step 5",
            id="return to the best step",
        ),
        pytest.param(
            {"checkpoint": checkpoint(8)},
            {"checkpoint": checkpoint(16)},
            "checkpoint of step 16 committed",
            id="checkpoint",
        ),
        pytest.param(
            {},
            {"trackers": (TrackerRun(type="mlflow", url="https://mlflow.test/a"),)},
            "mlflow: https://mlflow.test/a",
            id="page of a tracker",
        ),
        pytest.param(
            {"warnings": ("a",)}, {"warnings": ("a", "b")}, "warning: b", id="only the new warning"
        ),
    ],
)
def test_news_tell_each_event_once(old: dict[str, Any], new: dict[str, Any], sentence: str) -> None:
    assert news(view(**old), view(**new)) == [sentence]


def test_plain_lines_tell_steps_at_most_every_five_seconds_and_never_lose_the_last() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainScreen(out, view("Pending"), clock) as screen:
        for step in range(1, 9):
            clock.seconds = float(step)
            screen.show(view(step=step, total_steps=8))

    assert out.getvalue().splitlines() == [
        "    1s  step 1/8",
        "    1s  Training",
        "    6s  step 6/8",
        "    8s  step 8/8",
    ]


def test_plain_lines_tell_a_change_of_phase_at_once() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainScreen(out, view("Pending"), clock) as screen:
        screen.show(view("Starting"))
        screen.show(view("Starting"))
        screen.show(view("Failed"))

    assert out.getvalue().splitlines() == ["    0s  Starting", "    0s  Failed"]


def test_plain_lines_do_not_tell_the_step_of_a_checkpoint_as_a_step_that_was_made() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainScreen(out, view("Pending"), clock) as screen:
        screen.show(view(attempt=2, step=8, total_steps=32, resumed_step=8))

    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == [
        "attempt 2 starts",
        "resumed from the checkpoint of step 8",
        "Training",
    ]


def test_plain_step_line_holds_what_is_known() -> None:
    out, clock = io.StringIO(), Clock()
    with PlainScreen(out, view("Pending"), clock) as screen:
        screen.show(view(step=4, total_steps=8, loss=1.5, tokens_per_second=1234, eta_seconds=71))

    assert out.getvalue().splitlines()[0] == (
        "    0s  step 4/8  loss 1.500  1,234 tokens/s  1m11s left"
    )


def test_frame_shows_the_run_in_few_lines() -> None:
    console = Console(width=90, file=io.StringIO(), force_terminal=False)
    shown = view(
        step=12,
        total_steps=32,
        loss=1.812,
        eval_loss_before=2.105,
        eval_loss=1.7,
        tokens_per_second=1234.5,
        eta_seconds=71,
        checkpoint=checkpoint(10),
        warnings=("3 rows were truncated",),
    )

    with console.capture() as captured:
        console.print(frame(shown, 83))

    first, bar, facts, warning = captured.get().splitlines()
    assert first.split() == ["tiny", "Training", "1m23s"]
    assert bar.endswith("step 12/32  1m11s left")
    assert facts == (
        "loss 1.812   held-out 2.105 → 1.700   tokens/s 1,234   checkpoint step 10   restarts 0/3"
    )
    assert warning == "! 3 rows were truncated"


def test_frame_is_drawn_before_anything_is_known() -> None:
    console = Console(width=60, file=io.StringIO())

    with console.capture() as captured:
        console.print(frame(view("Pending"), 0))

    assert "Pending" in captured.get()
    assert "step 0/?" in captured.get()


def test_live_screen_leaves_its_events_on_the_terminal_and_no_frame() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)

    with LiveScreen(console, view("Pending"), Clock()) as screen:
        screen.show(view(step=8, total_steps=32, checkpoint=checkpoint(8)))

    kept = out.getvalue()
    assert kept.count("checkpoint of step 8 committed") == 1
    # The cursor is shown again, and the frame's lines are erased at the end.
    assert "\x1b[?25h" in kept
    assert kept.rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m")]
)
def test_duration_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text
