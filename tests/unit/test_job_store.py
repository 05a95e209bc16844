"""Which folders the store of a job takes for its own."""

from pathlib import Path

import pytest

from finetune_operator.reconcile.store import JobStore


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("step-7", True),
        ("step-7.tmp", True),
        ("step-7.aside", True),
        ("step-7.aside-2", True),
        ("step-by-step", False),
        ("step-7.bak", False),
        ("notes", False),
    ],
)
def test_only_checkpoints_of_an_outside_folder_are_the_runs(
    tmp_path: Path, name: str, is_ours: bool
) -> None:
    (tmp_path / "saved" / name).mkdir(parents=True)
    with JobStore(tmp_path / "run", tmp_path / "saved") as store:
        store.move_aside()
    assert (tmp_path / "saved.1" / name).is_dir() is is_ours
    assert (tmp_path / "saved" / name).is_dir() is not is_ours


def test_the_newest_step_is_the_highest_number_that_was_committed(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    assert store.newest_step() is None
    for name in ("step-9", "step-10", "step-11.tmp", "step-12.aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert store.newest_step() == 10
