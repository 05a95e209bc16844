"""Only a folder whose every byte is as it was committed counts as a checkpoint."""

from pathlib import Path

import pytest

from checkpoint_fixtures import FINGERPRINT, JOB, flip_a_bit
from finetune_trainer.checkpoint.commit import (
    MANIFEST,
    FileDigest,
    Manifest,
    commit,
    digest_file,
    ledger,
    newest_verified,
    read_manifest,
    remove_leftovers,
    set_aside_newer,
    verify,
    write_manifest,
)
from finetune_trainer.checkpoint.retention import retire
from finetune_trainer.errors import CheckpointError


def committed(root: Path, step: int, *, eval_loss: float | None = None) -> Path:
    """Commit a folder of one small file, as the store would, and return it."""
    tmp = root / f"step-{step}.tmp"
    tmp.mkdir(parents=True)
    (tmp / "data").write_bytes(b"weights" * step)
    manifest = Manifest(
        step=step,
        world_size=1,
        time=1000.0,
        job=JOB,
        fingerprint=FINGERPRINT,
        eval_loss=eval_loss,
        files={"data": digest_file(tmp / "data")},
    )
    write_manifest(tmp, manifest)
    final = root / f"step-{step}"
    commit(tmp, final)
    return final


def test_no_bit_of_a_manifest_can_flip_unnoticed(tmp_path: Path) -> None:
    path = committed(tmp_path, 3, eval_loss=2.5) / MANIFEST
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[position] ^= 1 << bit
            path.write_bytes(broken)
            with pytest.raises(CheckpointError):
                read_manifest(path.parent)


def test_without_any_whole_checkpoint_there_is_none(tmp_path: Path) -> None:
    flip_a_bit(committed(tmp_path, 1) / "data")
    warnings: list[str] = []
    assert newest_verified(tmp_path, warnings.append) is None
    assert len(warnings) == 1
    assert newest_verified(tmp_path / "absent", warnings.append) is None


def test_only_step_folders_count_and_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        committed(tmp_path, step)
    (tmp_path / "step-11.tmp").mkdir()
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-13").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert [ref.step for ref in ledger(tmp_path)] == [10, 9, 2]


def test_leftovers_of_a_killed_process_are_removed_and_nothing_else(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "mine.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.tmp", "step-1"]


def test_what_lies_beyond_the_start_is_renamed_and_never_overwrites_what_was_renamed_before(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        committed(tmp_path, 1 if not (tmp_path / "step-1").exists() else 3)
        committed(tmp_path, 2)
        set_aside_newer(tmp_path, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-1", "step-2.aside", "step-2.aside-2", "step-3.aside"]


def test_a_commit_never_replaces_a_checkpoint(tmp_path: Path) -> None:
    final = committed(tmp_path, 1)
    before = read_manifest(final)
    tmp = tmp_path / "step-1.tmp"
    tmp.mkdir()
    with pytest.raises(OSError, match="not empty"):
        commit(tmp, final)
    assert verify(final) == before


def test_the_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = verify(committed(tmp_path, 2, eval_loss=1.25))
    assert manifest.files == {"data": FileDigest.model_validate(manifest.files["data"])}
    assert (manifest.step, manifest.eval_loss, manifest.is_intact()) == (2, 1.25, True)


@pytest.mark.parametrize(
    ("losses", "keep", "left"),
    [
        pytest.param([None] * 4, 2, [4, 3], id="the newest stay"),
        pytest.param([1.0, 3.0, 2.5, 2.0], 2, [4, 3, 1], id="the best stays too"),
        pytest.param([2.0, 2.0, None, None], 1, [4, 2], id="the newest of equally good ones stays"),
        pytest.param([None], 3, [1], id="fewer than may stay"),
    ],
)
def test_retention_keeps_the_newest_and_the_best(
    tmp_path: Path, losses: list[float | None], keep: int, left: list[int]
) -> None:
    for step, loss in enumerate(losses, start=1):
        committed(tmp_path, step, eval_loss=loss)
    retire(tmp_path, keep)
    assert [ref.step for ref in ledger(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left)
