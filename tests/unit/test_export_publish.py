"""An older export is replaced as a whole; what somebody else put there stays."""

from pathlib import Path

import pytest

from finetune_trainer.config import JobRef
from finetune_trainer.errors import OutputNotWritableError
from finetune_trainer.export import check_writable
from finetune_trainer.export.publish import RECORD, open_staging, publish


def publish_files(output: Path, **files: str) -> None:
    staged = open_staging(output)
    for name, content in files.items():
        path = staged / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    publish(staged, output, JobRef(name="tiny", uid="1"), step=3)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD
    }


def test_a_first_export_appears_whole(tmp_path: Path) -> None:
    publish_files(tmp_path / "deep" / "output", weights="new", adapter__config="new")
    assert contents(tmp_path / "deep") == {"output/weights": "new", "output/adapter/config": "new"}


def test_an_older_export_is_replaced_and_nothing_of_it_stays(tmp_path: Path) -> None:
    output = tmp_path / "output"
    publish_files(output, weights="old", shard="old")
    publish_files(output, weights="new")
    assert contents(output) == {"weights": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_an_empty_folder_gives_way(tmp_path: Path) -> None:
    output = tmp_path / "output"
    check_writable(str(output))
    assert list(output.iterdir()) == []
    publish_files(output, weights="new")
    assert contents(output) == {"weights": "new"}


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
        f"spec.output.uri {output} holds weights, which no earlier export wrote and this one would "
        "replace; move it away or set another spec.output.uri"
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


def test_an_export_that_was_being_replaced_comes_back_when_the_new_one_never_came(
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    publish_files(output, weights="old")
    output.rename(tmp_path / ".output.replaced")  # killed between the two renames
    open_staging(output)
    assert contents(output) == {"weights": "old"}


def test_leftovers_of_a_killed_export_do_not_get_into_the_next(tmp_path: Path) -> None:
    output = tmp_path / "output"
    (open_staging(output) / "half").write_text("old")
    publish_files(output, weights="new")
    assert contents(tmp_path) == {"output/weights": "new"}


def test_writable_folders_are_made_and_left_empty(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "b", tmp_path / "c"]
    check_writable(*map(str, folders))
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "output"
    file.write_text("a file")
    with pytest.raises(OutputNotWritableError) as caught:
        check_writable(str(tmp_path / "fine"), str(file / below))
    assert f"{file} is a file" in str(caught.value)
