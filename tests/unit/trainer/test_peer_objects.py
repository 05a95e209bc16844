"""Objects of other ranks contain no code, and failures of DCP arrive in full."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.peer_objects import guard_object_collectives

CPU = torch.device("cpu")
GROUP: Any = None  # only a debug level of torch reads it


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    guard_object_collectives()


def received(value: object) -> Any:
    """Return `value` as another rank receives it from an object collective of torch."""
    tensor, size = distributed_c10d._object_to_tensor(value, CPU, GROUP)
    return distributed_c10d._tensor_to_object(tensor, int(size), GROUP)


def received_bytes(pickled: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(tensor, len(pickled), GROUP)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as found:
        return found


def test_torch_alone_executes_the_code_of_a_peer(tmp_path: Path) -> None:
    received(Code(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


@pytest.mark.usefixtures("_guarded")
@pytest.mark.parametrize("place", [lambda code: code, lambda code: [SavePlan([]), {1: code}]])
def test_code_is_refused_and_not_executed(place, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"another rank sent names posix\.mkdir, which is not"):
        received(place(Code(tmp_path / "mark")))
    assert not (tmp_path / "mark").exists()


@pytest.mark.usefixtures("_guarded")
@pytest.mark.parametrize(
    ("pickled", "sentence"),
    [
        pytest.param(pickle.dumps(eval), r"names builtins\.eval, which", id="a function"),
        pytest.param(pickle.dumps(SystemExit(3)), r"names builtins\.SystemExit", id="an exit"),
        pytest.param(
            b"cbuiltins\ngetattr\n(ctorch\nSize\n\x8c\x08__init__tR.",
            "reads an attribute",
            id="an attribute",
        ),
        pytest.param(
            b"ctorch.distributed.checkpoint.planner\nSavePlan\nN}\x8c\x0dfinetune_testK\x01s\x86b.",
            "changes the classes",
            id="a changed class",
        ),
        pytest.param(
            b"ctraceback\nFrameSummary\n(\x8c\x0a/etc/hostsK\x01\x8c\x01xtR.",
            r"names traceback\.FrameSummary",
            id="a line of a file",
        ),
        pytest.param(b"P1\n.", "outside the pickle", id="a persistent object"),
        pytest.param(b"no pickle", "cannot be read", id="not a pickle"),
    ],
)
def test_other_abuse_of_a_pickle_is_refused(pickled: bytes, sentence: str) -> None:
    with pytest.raises(TrainerError, match=sentence):
        received_bytes(pickled)
    if "changes" in sentence:
        delattr(SavePlan, "finetune_test")


@pytest.mark.usefixtures("_guarded")
def test_values_of_dcp_and_of_the_compiler_pass() -> None:
    values = [SavePlan([]), torch.float32, torch.Size((2, 3)), WriteItemType.SHARD, [0.5, "name"]]
    assert received(values) == values


@pytest.mark.usefixtures("_guarded")
def test_a_failure_arrives_with_its_message_and_its_place() -> None:
    errors = [
        OSError(28, "No space left on device", "/checkpoints/step-1"),
        KeyError("weight"),
        pickle.UnpicklingError("weights only"),
        ConfigError("spec.model.source is wrong"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ExceptionGroup("several", [ValueError("one")]),
        KeyboardInterrupt(),
    ]
    failures = {rank: _wrap_exception(raised(error)) for rank, error in enumerate(errors)}
    found: CheckpointException = received(CheckpointException("write", failures))
    assert [repr(error) for error, _ in found.failures.values()] == [
        "OSError(28, 'No space left on device')",
        "KeyError('weight')",
        "UnpicklingError('weights only')",
        "RuntimeError('ConfigError: spec.model.source is wrong')",
        "RuntimeError('OutOfMemoryError: CUDA out of memory')",
        "RuntimeError('ExceptionGroup: several (1 sub-exception)')",
        "RuntimeError('KeyboardInterrupt: ')",
    ]
    assert isinstance(full := found.failures[0][0], OSError)
    assert full.filename == "/checkpoints/step-1"
    assert str(found).count("in raised\n") == len(errors)
