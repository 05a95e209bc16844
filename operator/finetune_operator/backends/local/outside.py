"""Files of a run in folders outside of its directory, and the owners of these folders.

`RunFolder` moves such files aside. A folder that a URI names may also hold other files: the run's
files are its checkpoints, its export, and the claims that name the writer. This module does not
change files.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.config import JobRef

CLAIMS = ".finetune-claims"
RECORD = "finetune-export.json"
# Name of a checkpoint that is committed, being written, or moved aside, with or without a claim's
# tag.
_CHECKPOINT = re.compile(r"step-(\d+)(\.tmp|\.aside(-\d+)?|\.(\d+-\d+-\d+-[0-9a-z]+))?")
_MANIFEST = "manifest.json"


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest committed checkpoint; its content is not read.

    A folder with a claim's tag in its name is written in place and committed by its manifest. A
    folder without a tag was written by a trainer without claims, which renamed it when it was
    complete.
    """
    steps = []
    for path in folder.glob("step-*"):
        name = _CHECKPOINT.fullmatch(path.name)
        if name and (not name[2] or (name[4] and (path / _MANIFEST).exists())):
            steps.append(int(name[1]))
    return max(steps, default=None)


def of_checkpoints(folder: Path) -> list[Path]:
    """Return the files of a run in its checkpoint folder, the claims last."""
    found = sorted(path for path in folder.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
    return [*found, *_claims(folder)]


def of_output(folder: Path) -> list[Path]:
    """Return the files of a run in its output folder: exported, staged, and the claims."""
    return [*_exported(folder), *sorted(folder.glob(".export-*")), *_claims(folder)]


def owner(folder: Path) -> JobRef | None:
    """Return the job that owns the folder; None without an owner, or if it cannot be read.

    If there are no claims, which older trainers did not write, other files name the job. A claim
    without an owner belongs to a job that was refused, or that was killed before it owned the
    folder.
    """
    held = {path.name.partition(".")[0] for path in (folder / CLAIMS).glob("*.held.*")}
    for tag in sorted(held, key=_rank, reverse=True):
        for path in (folder / CLAIMS).glob(f"{tag}.claim.*"):
            try:
                return JobRef.read(path)
            except (OSError, ValidationError):
                continue
    for path in (folder / RECORD, *sorted(folder.glob(f"step-*/{_MANIFEST}"))):
        try:
            return JobRef.model_validate(json.loads(path.read_bytes())["job"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _rank(tag: str) -> tuple[int, ...]:
    """Return epoch, attempt and generation of a claim as numbers."""
    return tuple(int(part) for part in tag.split("-")[:3] if part.isdecimal())


def _claims(folder: Path) -> list[Path]:
    return [folder / CLAIMS] if (folder / CLAIMS).is_dir() else []


def _exported(folder: Path) -> Iterator[Path]:
    try:
        names = json.loads((folder / RECORD).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # not an export of the trainer, so no file here may be moved
    for name in (*names, RECORD):
        path = folder / str(name)
        if ".." not in path.parts and folder in path.parents and path.is_file():
            yield path
