"""Records of an attempt's processes: small JSON files in its folder, replaced atomically."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from finetune_operator.errors import BackendError
from finetune_trainer.config import ContractModel

Record = TypeVar("Record", bound=ContractModel)


class AttemptRecord(ContractModel):
    """Owner of an attempt, written before its first process is started."""

    uid: str
    attempt: int
    nodes: int
    processes_per_node: int
    rendezvous: str | None = None
    output_dir: str


class NodeRecord(ContractModel):
    """The main process of a node; its start time distinguishes it from a later process."""

    pid: int
    start_time: int
    boot_id: str
    uid: int


class ExitRecord(ContractModel):
    """Exit code of a node's main process: 0 to 255, 128 + N for signal N."""

    exit_code: int


class CancelRecord(ContractModel):
    """A requested stop of the attempt.

    Attributes:
        deadline: Seconds since the epoch at which remaining processes are killed.
        grace_seconds: The grace period that led to this deadline, for messages.
        was_enforced: Whether a process was killed. Its node is then a victim, not the root cause.
    """

    deadline: float
    grace_seconds: float
    was_enforced: bool = False


def write(path: Path, record: ContractModel) -> None:
    """Replace the file in one step."""
    write_text(path, record.to_json())


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, durably; a reader sees the old text or the new."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read(path: Path, kind: type[Record]) -> Record | None:
    """Return the record, or None if the file does not exist.

    Raises:
        BackendError: The file is not a valid record.
    """
    try:
        return kind.read(path)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BackendError(
            f"{path} is damaged ({error.errors()[0]['msg']}); remove the attempt's folder if none "
            "of its processes runs, or start over with --fresh"
        ) from error
