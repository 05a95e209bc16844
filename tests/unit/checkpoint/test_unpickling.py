"""Of a checkpoint nothing is run: whatever its pickles name, it is refused before it is called."""

import io
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.unpickling import read_metadata
from finetune_trainer.config import ExitCode
from finetune_trainer.errors import ConfigError
from support.checkpoint.checkpoint_fixtures import make_state, open_store, step_path, tensors_differ

Attack = Callable[[Path, Path], None]
TENSOR = "model.layers.0.bias"


class Runs:
    """When it is unpickled, a command makes the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


def genuine(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def replace(folder: Path, made: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(made))


def is_all_of_it(folder: Path, mark: Path) -> None:
    replace(folder, Runs(mark))


def lies_inside(folder: Path, mark: Path) -> None:
    made = genuine(folder)
    made.planner_data = {"model": Runs(mark)}
    replace(folder, made)


def is_reached_by_a_dot(folder: Path, mark: Path) -> None:
    """`torch.serialization` is allowed one name; this one starts at another."""
    names = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93"
    text = f"touch {mark}".encode()
    call = b"X" + len(text).to_bytes(4, "little") + text + b"\x85R."
    (folder / ".metadata").write_bytes(names + call)


def names_a_builtin(folder: Path, mark: Path) -> None:
    """Without being called: it would be put where a class of ours calls it."""
    replace(folder, [eval, f"open({str(mark)!r}, 'w')"])


def asks_for_an_attribute(folder: Path, mark: Path) -> None:
    """`getattr` finds members of enumerations in a record, and could find everything else."""
    names = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(b"\x80\x04" + names + b"\x8c\x08__init__tR.")


def sets_an_attribute_of_a_class(folder: Path, mark: Path) -> None:
    """The state of an object that is a class becomes attributes of that class, for everybody."""
    names = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(b"\x80\x04" + names + b"N}\x8c\x07versionK\x01s\x86b.")


def is_a_byte_object(folder: Path, mark: Path) -> None:
    """What is no tensor DCP unpickles from its own file, without any limit."""
    made = genuine(folder)
    torch.save(Runs(mark), folder / "evil.distcp")
    made.state_dict_metadata[TENSOR] = BytesStorageMetadata()
    (index,) = [one for one in made.storage_data if one.fqn == TENSOR]
    del made.storage_data[index]
    size = (folder / "evil.distcp").stat().st_size
    made.storage_data[type(index)(TENSOR)] = _StorageInfo("evil.distcp", 0, size)
    replace(folder, made)


def is_in_a_tensors_place(folder: Path, mark: Path) -> None:
    made = genuine(folder)
    torch.save(Runs(mark), folder / "evil.distcp")
    size = (folder / "evil.distcp").stat().st_size
    for index in made.storage_data:
        made.storage_data[index] = _StorageInfo("evil.distcp", 0, size)
    replace(folder, made)


def lies_outside(folder: Path, mark: Path) -> None:
    made = genuine(folder)
    for index, place in made.storage_data.items():
        made.storage_data[index] = _StorageInfo("../elsewhere.distcp", place.offset, place.length)
    replace(folder, made)


def is_no_record(folder: Path, mark: Path) -> None:
    replace(folder, {"model": 1})


def is_no_pickle(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(b"no pickle")


def seal(folder: Path) -> None:
    """Have the manifest vouch for what is in the folder now, as anybody can who writes there."""
    names = [path.name for path in folder.iterdir() if path.name != commit.MANIFEST]
    files = {name: commit.digest_file(folder / name) for name in sorted(names)}
    found = commit.read_manifest(folder)
    commit.write_manifest(folder, found.model_copy(update={"files": files}))


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        pytest.param(is_all_of_it, r"names posix\.system", id="instead of the record"),
        pytest.param(lies_inside, r"names posix\.system", id="inside the record"),
        pytest.param(is_reached_by_a_dot, r"names torch\.serialization\.os\.system", id="dotted"),
        pytest.param(names_a_builtin, r"names builtins\.eval", id="a builtin"),
        pytest.param(asks_for_an_attribute, r"reads an attribute", id="an attribute"),
        pytest.param(sets_an_attribute_of_a_class, r"changes the classes", id="a class"),
        pytest.param(is_a_byte_object, r"names \S+\.BytesStorageMetadata", id="a byte object"),
        pytest.param(is_in_a_tensors_place, r"objects other than tensors", id="a shard"),
        pytest.param(lies_outside, r"file outside its folder", id="another folder's file"),
        pytest.param(is_no_record, r"is a dict, not the record", id="another object"),
        pytest.param(is_no_pickle, r"\.metadata cannot be read", id="no pickle"),
    ],
)
def test_a_checkpoint_that_names_anything_but_tensors_is_refused_and_nothing_run(
    tmp_path: Path, attack: Attack, says: str
) -> None:
    store = open_store(tmp_path / "theirs")
    store.save(1, make_state(1))
    store.wait()
    folder, mark = step_path(tmp_path / "theirs", 1), tmp_path / "mark"
    attack(folder, mark)
    seal(folder)
    state = make_state(0)
    with pytest.raises(ConfigError, match=says) as caught:
        open_store(tmp_path / "ours", resume_from=str(folder)).restore(state)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "spec.checkpoint.resumeFrom" in str(caught.value)
    assert not mark.exists()
    assert tensors_differ(state, make_state(0)) == []


def test_what_the_allow_list_builds_is_what_was_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    state = make_state(1)
    state["model"]["ids"] = torch.arange(3)
    state["model"]["flags"] = torch.ones(2, dtype=torch.bool)
    state["model"]["wide"] = torch.ones(2, dtype=torch.float64)
    store.save(1, state)
    store.wait()
    folder = step_path(tmp_path, 1)
    found, expected = read_metadata(folder), genuine(folder)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data


def test_a_record_that_python_3_11_2_wrote_is_read(tmp_path: Path) -> None:
    """It asks getattr for a member of an enumeration; other versions call the class."""
    store = open_store(tmp_path)
    store.save(1, make_state(1))
    store.wait()
    folder = step_path(tmp_path, 1)
    expected = genuine(folder)

    class AsIn3112(pickle._Pickler):  # that of C asks no method about an enumeration's members
        def reducer_override(self, value: Any) -> Any:
            is_member = isinstance(value, Enum)
            return (getattr, (type(value), value.name)) if is_member else NotImplemented

    made = io.BytesIO()
    AsIn3112(made, 4).dump(expected)
    assert b"getattr" in made.getvalue()
    (folder / ".metadata").write_bytes(made.getvalue())
    assert read_metadata(folder).state_dict_metadata == expected.state_dict_metadata
