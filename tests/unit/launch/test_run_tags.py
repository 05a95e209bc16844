"""What a run of Azure ML has in its tags: always within the limit, and read back as it was."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.config import (
    MAX_TAG_LENGTH,
    CheckpointRef,
    DataReport,
    Phase,
    Progress,
    SampleAnswer,
    StopRequest,
    TimeSpent,
)
from finetune_trainer.launch.azureml.tags import progress_text

FOLDER = Path("/mnt/azureml/cr/j/9f/cap/data-capability/wd/checkpoints")
NUMBERS = {
    "epoch": 1.2345678901234567,
    "loss": 2.2250738585072014e-308,
    "grad_norm": 1.7976931348623157e308,
    "learning_rate": 1.0000000000000001e-05,
    "eval_loss_before": 12.345678901234567,
    "eval_loss": 11.345678901234567,
    "tokens_per_second": 123456.78901234567,
    "eta_seconds": 123456.78901234567,
    "first_step_seconds": 123.45678901234567,
    "spent": TimeSpent(**dict.fromkeys(TimeSpent.model_fields, 1234567.891)),
}


def checkpoint(step: int, folder: Path = FOLDER) -> CheckpointRef:
    path = str(folder / f"step-{step}.1-2-3-0123456789abcdef")
    return CheckpointRef(step=step, path=path, time=1.7e9 + 0.1, world_size=128, eval_loss=1 / 3)


def progress(**changes: object) -> Progress:
    values = {
        "attempt": 12,
        "phase": Phase.EVALUATING,
        "time": 1763910000.1234567,
        "step": 123456,
        "total_steps": 1234567,
        "resumed_step": 123455,
        "skipped_steps": 3,
        "checkpoint": checkpoint(123456),
        "best_checkpoint": checkpoint(12345),
        **NUMBERS,
    }
    return Progress.model_validate(values | changes)


def read(text: str) -> Progress:
    return Progress.model_validate_json(text)


def test_all_numbers_of_a_long_run_and_both_checkpoints_fit() -> None:
    told = read(progress_text(progress(), FOLDER))
    assert told == progress(
        checkpoint=checkpoint(123456, Path()), best_checkpoint=checkpoint(12345, Path())
    )


def test_answers_data_and_the_address_of_a_node_stay_behind() -> None:
    private = {
        "samples": (SampleAnswer(prompt="p", before="b"),),
        "train_data": DataReport(rows=4),
        "eval_data": DataReport(rows=2),
        "metrics_url": "http://127.0.0.1:9464/metrics",
    }
    assert progress_text(progress(**private), FOLDER) == progress_text(progress(), FOLDER)


def test_a_warning_that_does_not_fit_leaves_room_for_an_older_one() -> None:
    told = read(progress_text(Progress(warnings=("first", "x" * 2000, "ä" * 400)), FOLDER))
    assert told.warnings == ("first", "ä" * 400)


def test_a_path_elsewhere_stays_as_it_is() -> None:
    elsewhere = checkpoint(3, Path("/elsewhere"))
    told = read(progress_text(Progress(checkpoint=elsewhere), FOLDER))
    assert told.checkpoint == elsewhere


def test_a_path_longer_than_any_run_has_leaves_the_step() -> None:
    far = checkpoint(123456, Path("/" + MAX_TAG_LENGTH * "x"))
    told = read(progress_text(progress(checkpoint=far), FOLDER))
    assert told.checkpoint is None
    assert (told.attempt, told.phase, told.step) == (12, Phase.EVALUATING, 123456)


TEXTS = st.text(max_size=1200)
CHECKPOINTS = st.builds(CheckpointRef, path=TEXTS, time=st.floats(0, 2e9), eval_loss=st.none())


@given(
    st.builds(
        Progress,
        warnings=st.lists(TEXTS).map(tuple),
        checkpoint=st.none() | CHECKPOINTS,
        loss=st.none() | st.floats(),
    )
)
def test_any_progress_fits_and_is_read_back(any_progress: Progress) -> None:
    text = progress_text(any_progress, FOLDER)
    assert len(text.encode()) <= MAX_TAG_LENGTH
    assert read(text).step == any_progress.step


def test_a_request_to_stop_needs_a_time_zone() -> None:
    text = '{"until":"2026-11-23T16:00:00Z"}'
    assert StopRequest.model_validate_json(text).model_dump_json(by_alias=True) == text
    with pytest.raises(ValueError, match="timezone"):
        StopRequest.model_validate_json('{"until":"2026-11-23T16:00:00"}')
