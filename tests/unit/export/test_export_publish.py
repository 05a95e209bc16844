"""Of an older export nothing stays; what somebody else put there does."""

import json
from pathlib import Path

import pytest

from finetune_trainer.claims.fence import Fence
from finetune_trainer.claims.names import CLAIMS, Claim
from finetune_trainer.config import JobRef
from finetune_trainer.errors import OutputNotWritableError, OvertakenError
from finetune_trainer.export.publish import RECORD, ExportRecord, open_staging, publish
from support.checkpoint.export_fixtures import claimed_output

JOB = JobRef(name="tiny", uid="1")


def publish_files(output: Path, **files: str) -> None:
    fence = claimed_output(output, JOB)
    staged = open_staging(output, fence.holding(output).claim)
    for name, content in files.items():
        path = staged / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    publish(staged, output, 3, fence)


def contents(folder: Path) -> dict[str, str]:
    """Return what loaders see: neither claims nor what is being staged."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {
        name: path.read_text()
        for name, path in found.items()
        if path.is_file() and path.name != RECORD and "/." not in f"/{name}"
    }


def test_a_first_export_appears_whole(tmp_path: Path) -> None:
    publish_files(tmp_path / "deep" / "output", weights="new", adapter__config="new")
    assert contents(tmp_path / "deep") == {"output/weights": "new", "output/adapter/config": "new"}


def test_an_older_export_is_replaced_and_nothing_of_it_stays(tmp_path: Path) -> None:
    output = tmp_path / "output"
    publish_files(output, weights="old", shard="old")
    publish_files(output, weights="new")
    assert contents(output) == {"weights": "new"}
    assert sorted(path.name for path in output.iterdir()) == [CLAIMS, RECORD, "weights"]


def test_files_of_somebody_else_stay(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "notes").write_text("mine")
    publish_files(output, weights="old", shard="old", adapter__config="old")
    publish_files(output, weights="new", adapter__config="new")
    assert contents(output) == {"notes": "mine", "weights": "new", "adapter/config": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "weights").write_text("mine")
    with pytest.raises(OutputNotWritableError) as caught:
        publish_files(output, config="new", weights="new")
    assert str(caught.value) == (
        f"spec.output.uri {output} contains weights, which no earlier export wrote and this one "
        "would replace; move it away or set another spec.output.uri"
    )
    assert contents(output) == {"weights": "mine"}


def test_files_that_were_moved_in_before_a_failure_are_ours_to_replace(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    (output / "notes").write_text("mine")
    (output / "z").write_text("a file where a folder is needed")
    with pytest.raises(OSError, match="File exists"):
        publish_files(output, a="old", z__config="old")
    assert contents(output) == {"a": "old", "notes": "mine", "z": "a file where a folder is needed"}

    (output / "z").unlink()
    publish_files(output, a="new", z__config="new")
    assert contents(output) == {"a": "new", "notes": "mine", "z/config": "new"}


def test_an_export_that_was_broken_off_says_so_until_it_is_completed(tmp_path: Path) -> None:
    output = tmp_path / "output"
    publish_files(output, config="old", weights="old")
    fence = claimed_output(output, JOB)
    staged = open_staging(output, fence.holding(output).claim)
    for name in ("config", "weights"):
        (staged / name).write_text("new")

    class OvertakenAfterTheFirst(Fence):
        def check(self) -> None:
            if (output / "config").read_text() == "new":
                raise OvertakenError("by a later attempt")

    with pytest.raises(OvertakenError):
        publish(staged, output, 3, OvertakenAfterTheFirst([fence.holding(output)]))
    left = {"config": "new", "weights": "old"}
    assert {name: (output / name).read_text() for name in left} == left
    assert not ExportRecord.read(output / RECORD).is_whole

    publish_files(output, config="newer", weights="newer")
    assert contents(output) == {"config": "newer", "weights": "newer"}
    assert ExportRecord.read(output / RECORD).is_whole


def test_leftovers_of_a_killed_export_go_and_those_of_a_higher_claim_stay(tmp_path: Path) -> None:
    output = tmp_path / "output"
    claim = claimed_output(output, JOB).holding(output).claim
    (open_staging(output, claim) / "half").write_text("old")
    (output / ".export-tmp").mkdir()  # of a trainer before claims
    later = Claim(0, 7, 1, "ab", JOB.uid)
    (open_staging(output, later) / "half").write_text("of a later attempt")
    open_staging(output, claim)
    names = sorted(path.name for path in output.iterdir())
    assert names == [f".export-{claim.tag}", f".export-{later.tag}", CLAIMS]
    publish_files(output, weights="new")
    assert (output / f".export-{later.tag}" / "half").exists()


@pytest.mark.parametrize("name", ["../notes", "{root}/notes", "link/notes"])
def test_no_file_outside_the_output_is_deleted(tmp_path: Path, name: str) -> None:
    """A record is a file that others may have written."""
    output = tmp_path / "output"
    publish_files(output, weights="old")
    (tmp_path / "notes").write_text("mine")
    (output / "link").symlink_to(tmp_path)
    record = json.loads((output / RECORD).read_text())
    record["files"] = [name.format(root=tmp_path), "weights"]
    (output / RECORD).write_text(json.dumps(record))
    if name.startswith("link"):
        publish_files(output, weights="new")
    else:
        with pytest.raises(OutputNotWritableError, match="no earlier export wrote"):
            publish_files(output, weights="new")
    assert (tmp_path / "notes").read_text() == "mine"
