"""Only a folder whose every byte is as it was committed counts as a checkpoint."""

from pathlib import Path

import pytest

from finetune_trainer.checkpoint.commit import (
    MANIFEST,
    FileDigest,
    Manifest,
    begin_lineage,
    delete,
    digest_file,
    ledger,
    newest_verified,
    read_manifest,
    remove_leftovers,
    verify,
    write_manifest,
)
from finetune_trainer.checkpoint.retention import retire
from finetune_trainer.claims.names import CLAIMS, Claim
from finetune_trainer.errors import CheckpointError
from support.checkpoint.checkpoint_fixtures import FINGERPRINT, JOB, flip_a_bit, steps_in


def committed(root: Path, step: int, *, eval_loss: float | None = None, tag: str = "") -> Path:
    """Commit a folder of one small file, as the store would, and return it."""
    folder = root / (f"step-{step}.{tag}" if tag else f"step-{step}")
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"weights" * step)
    manifest = Manifest(
        step=step,
        world_size=1,
        time=1000.0,
        job=JOB,
        fingerprint=FINGERPRINT,
        eval_loss=eval_loss,
        files={"data": digest_file(folder / "data")},
    )
    write_manifest(folder, manifest)
    return folder


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


def test_only_committed_step_folders_count_and_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        committed(tmp_path, step)
    committed(tmp_path, 11, tag="0-1-1-ab")
    (tmp_path / "step-12.tmp").mkdir()
    (tmp_path / "step-13").mkdir()
    (tmp_path / "step-14.0-1-1-ab").mkdir()
    (tmp_path / "step-15").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert [ref.step for ref in ledger(tmp_path)] == [11, 10, 9, 2]


def claim_on(root: Path, tag: str) -> Claim:
    epoch, attempt, generation, nonce = tag.split("-")
    (root / CLAIMS).mkdir(parents=True, exist_ok=True)
    return Claim(int(epoch), int(attempt), int(generation), nonce, JOB.uid)


def test_leftovers_of_lower_claims_are_removed_and_nothing_else(tmp_path: Path) -> None:
    stay = ["step-1", "step-2.0-1-1-aa", "step-3.0-2-1-aa", "step-3.0-2-2-aa", "step-3.1-1-1-aa"]
    committed(tmp_path, 1)
    committed(tmp_path, 2, tag="0-1-1-aa")
    for name in (*stay[2:], "mine.tmp", "step-2.tmp", "step-4.0-1-9-zz", "step-5.0-1-1-aa"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path, claim_on(tmp_path, "0-2-1-aa"))
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != CLAIMS)
    assert names == ["mine.tmp", *stay]


def test_what_lies_beyond_a_start_stays_and_counts_no_more(tmp_path: Path) -> None:
    first, second = (claim_on(tmp_path, f"0-{attempt}-1-aa") for attempt in (1, 2))
    begin_lineage(tmp_path, first, 0)
    for step in (1, 2, 3):
        committed(tmp_path, step, tag=first.tag)

    lineage, later = begin_lineage(tmp_path, second, 1)
    assert later == [f"step-{step}.{first.tag}" for step in (3, 2)]
    committed(tmp_path, 2, tag=second.tag)
    committed(tmp_path, 4, tag=first.tag)  # a writer that was overtaken before it had committed

    own = [str(tmp_path / f"step-2.{second.tag}"), str(tmp_path / f"step-1.{first.tag}")]
    assert [ref.path for ref in ledger(tmp_path)] == own
    assert [ref.path for ref in ledger(tmp_path, lineage)] == own
    retire(tmp_path, 1, lineage, lambda: None)
    assert steps_in(tmp_path) == ["step-2", "step-2", "step-3", "step-4"], "nobody's to delete"


def test_a_start_that_was_killed_while_it_was_written_changes_nothing(tmp_path: Path) -> None:
    first = claim_on(tmp_path, "0-1-1-aa")
    begin_lineage(tmp_path, first, 0)
    committed(tmp_path, 5, tag=first.tag)
    (tmp_path / CLAIMS / f"0-2-1-aa.start.{JOB.uid}").write_text('{"kept": [')
    assert [ref.step for ref in ledger(tmp_path)] == [5]


def test_the_manifest_reads_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = verify(committed(tmp_path, 2, eval_loss=1.25))
    assert manifest.files == {"data": FileDigest.model_validate(manifest.files["data"])}
    assert (manifest.step, manifest.eval_loss, manifest.is_intact()) == (2, 1.25, True)


def test_a_record_of_a_version_that_knew_no_content_of_weights_is_intact() -> None:
    made = Manifest.model_validate(
        {
            "job": {"namespace": "default", "name": "tiny", "uid": "uid-1", "attempt": 1},
            "step": 3,
            "worldSize": 1,
            "time": 1000.0,
            "fingerprint": {"model": "m", "method": "lora", "data": "d", "order": "o"},
            "files": {"a": {"size": 1, "sha256": "00"}},
            "digest": "d20ad0ad4c671fe6359358f41b9893a4fbab1d179088964d111bdb48adc5576e",
        }
    )
    assert made.is_intact()
    known = made.fingerprint.model_copy(update={"weights": "w"})
    other = made.model_copy(update={"fingerprint": known})
    assert not other.is_intact()
    assert Manifest.model_validate_json(other.sealed().to_json()).fingerprint == known


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
    retire(tmp_path, keep, None, lambda: None)
    assert [ref.step for ref in ledger(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left)


@pytest.mark.parametrize("name", ["../outside", "{root}/outside", "a/../../outside", "."])
def test_a_manifest_names_files_below_its_folder_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("another job's")
    folder = committed(tmp_path, 3)
    name = name.format(root=tmp_path)
    manifest = Manifest.model_construct(
        **{
            **dict(read_manifest(folder)),
            "files": {name: digest_file(tmp_path / "outside")},
        }
    )
    (folder / MANIFEST).write_text(manifest.sealed().to_json())
    for use in (verify, delete):
        with pytest.raises(CheckpointError, match="not a valid manifest"):
            use(folder)
    assert (tmp_path / "outside").read_text() == "another job's"


def test_a_link_leads_a_manifest_to_no_other_folder(tmp_path: Path) -> None:
    outside = tmp_path / "other"
    outside.mkdir()
    (outside / "data").write_text("another job's")
    folder = committed(tmp_path, 3)
    (folder / "link").symlink_to(outside)
    files = {"link/data": digest_file(outside / "data")}
    manifest = read_manifest(folder).model_copy(update={"files": files})
    (folder / MANIFEST).write_text(manifest.sealed().to_json())
    with pytest.raises(CheckpointError, match=r"link/data is in another folder, through a symbol"):
        verify(folder)
    delete(folder)
    assert not folder.exists()
    assert (outside / "data").read_text() == "another job's"
