"""Which folders the store of a job takes for its own."""

import json
from pathlib import Path

import pytest

from finetune_operator.backends.local import outside
from finetune_operator.backends.local.run_folder import RunFolder, RunFolderError
from finetune_trainer.claims.enter import Pace, Wanted, enter
from finetune_trainer.claims.names import CLAIMS
from finetune_trainer.config import JobRef
from finetune_trainer.errors import FolderTakenError
from finetune_trainer.export.publish import RECORD
from support.api.builders import job

ME = job(name="mine").metadata


def claim(folder: Path, name: str, tag: str = "0-1-1-a", *, is_held: bool = True) -> None:
    """Write a claim on the folder, as the trainer of a job of that name does."""
    claims = folder / ".finetune-claims"
    claims.mkdir(parents=True, exist_ok=True)
    about = {"namespace": "default", "name": name, "uid": f"of-{name}"}
    (claims / f"{tag}.claim.of-{name}").write_text(json.dumps(about))
    if is_held:
        (claims / f"{tag}.held.of-{name}").touch()


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("step-7", True),
        ("step-7.tmp", True),
        ("step-7.aside", True),
        ("step-7.aside-2", True),
        ("step-7.0-2-1-k3f9a2", True),
        (".finetune-claims", True),
        ("step-by-step", False),
        ("step-7.bak", False),
        ("notes", False),
    ],
)
def test_only_checkpoints_and_claims_of_an_outside_folder_are_the_runs(
    tmp_path: Path, name: str, is_ours: bool
) -> None:
    (tmp_path / "saved" / name).mkdir(parents=True)
    with RunFolder(tmp_path / "run", tmp_path / "saved") as store:
        store.move_aside(ME)
    assert (tmp_path / "saved.1" / name).is_dir() is is_ours
    assert (tmp_path / "saved" / name).is_dir() is not is_ours


def test_an_export_outside_goes_aside_with_its_claims_and_leaves_what_is_not_its_own(
    tmp_path: Path,
) -> None:
    out = tmp_path / "model"
    for name in ("adapter.safetensors", "merged/model.safetensors", "mine.txt", "../other.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    ours = ["adapter.safetensors", "merged/model.safetensors"]
    listed = [*ours, "../other.txt", "gone.json"]
    (out / "finetune-export.json").write_text(json.dumps({"files": listed}))
    claim(out, "mine")
    with RunFolder(tmp_path / "run", output=out) as store:
        store.move_aside(ME)
    claims = {f".finetune-claims/0-1-1-a.{mark}.of-mine" for mark in ("claim", "held")}
    assert below(tmp_path / "model.1") == {*ours, *claims, "finetune-export.json"}
    assert below(out) == {"mine.txt"}
    assert (tmp_path / "other.txt").exists()


@pytest.mark.parametrize(("place", "field"), [("saved", "checkpoint"), ("model", "output")])
def test_what_another_job_has_claimed_is_not_moved(tmp_path: Path, place: str, field: str) -> None:
    claim(tmp_path / place, "first")
    claim(tmp_path / place, "mine", "0-9-1-b", is_held=False)  # it was refused there
    (tmp_path / "saved" / "step-3").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").touch()
    said = rf"^spec\.{field}\.uri .*/{place} belongs to the job default/first \(uid of-first\)"
    store = RunFolder(tmp_path / "run", tmp_path / "saved", tmp_path / "model")
    with store, pytest.raises(RunFolderError, match=said):
        store.move_aside(ME)
    assert not list(tmp_path.glob("*.1"))


def test_a_fresh_run_is_let_in_where_the_trainer_of_the_old_one_had_claimed(tmp_path: Path) -> None:
    assert (outside.CLAIMS, outside.RECORD) == (CLAIMS, RECORD)
    folders = [tmp_path / name for name in ("run", "saved", "model")]

    def start(uid: str) -> None:
        ref = JobRef(name="mine", uid=uid, attempt=1)
        enter([Wanted(folder, "spec.x", ref) for folder in folders], Pace(rival_wait_seconds=0.0))

    with RunFolder(*folders) as store:
        start("old")
        with pytest.raises(FolderTakenError):
            start("new")
        store.move_aside(ME)
        start("new")
        assert outside.owner(folders[1]) == JobRef(name="mine", uid="new", attempt=1)
    assert all((tmp_path / f"{one.name}.1" / CLAIMS).is_dir() for one in folders)


def test_the_last_of_several_jobs_that_had_a_folder_has_it(tmp_path: Path) -> None:
    claim(tmp_path / "saved", "first", "2-11-1-a")
    claim(tmp_path / "saved", "mine", "10-1-1-b")
    with RunFolder(tmp_path / "run", tmp_path / "saved") as store:
        store.move_aside(ME)
    assert (tmp_path / "saved.1" / ".finetune-claims").is_dir()


def test_the_newest_step_is_the_highest_number_that_was_committed(tmp_path: Path) -> None:
    store = RunFolder(tmp_path)
    assert store.newest_step() is None
    names = ("step-9", "step-10", "step-11.tmp", "step-12.aside", "step-14.0-1-1-a")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert store.newest_step() == 10
    (tmp_path / "checkpoints" / "step-13.0-1-1-a").mkdir()
    (tmp_path / "checkpoints" / "step-13.0-1-1-a" / "manifest.json").touch()
    assert store.newest_step() == 13
