"""Builders of what Azure ML says of an attempt, for tests of looks at it."""

from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_operator.backends.azureml.names import Report
from finetune_operator.backends.azureml.runs import RunEnd, Seen
from finetune_operator.backends.azureml.states import AttemptView, updated_view
from finetune_trainer.config import ExitCode, FailureClass, Heard, Phase, Progress, Termination

NOW = datetime(2026, 1, 1, tzinfo=UTC)
URL = "https://ml.azure.com/runs/tiny-1"
UNTIL = NOW + timedelta(minutes=1)

STEP_7 = Progress(phase=Phase.TRAINING, step=7, total_steps=10, time=7.0)
ALIVE = Heard(time=NOW.timestamp())
TRAINS = Report(STEP_7, ALIVE)


def after(seconds: float) -> datetime:
    """Return the time so many seconds after the first look."""
    return NOW + timedelta(seconds=seconds)


def look(*states: str, report: Report | None = None, **fields: Any) -> AttemptView:
    """Return what is known after looks at one state after the other, in no time."""
    found: AttemptView | None = None
    for state in states:
        found = updated_view(found, seen(state, report or Report(), **fields), NOW)
    assert found is not None
    return found


def seen(state: str, report: Report = TRAINS, **fields: Any) -> Seen:
    """Return an answer about an attempt of two nodes."""
    known = {"url": URL, "nodes": 2, "checkpoints": "azureml://datastores/d/paths/c", **fields}
    return Seen(state, report, **known)


def words(
    code: ExitCode | int, failure: FailureClass, message: str = "words", **fields: Any
) -> Termination:
    """Return a node's last words."""
    return Termination(failure_class=failure, exit_code=code, message=message, **fields)


def error(text: str, code: str = "UserError") -> RunEnd:
    """Return the end of a run that failed."""
    return RunEnd(code=code, text=text)
