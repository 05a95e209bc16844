"""Publish a finished export, and delete the files of an older export.

`export` calls it. All files are written to a staging folder in the output first. Then they are
moved one by one, and the record that marks the export as complete is moved last. Only files of an
earlier export are replaced or deleted. Because programs load an export by fixed file names, its
names cannot contain the writer's claim, unlike a checkpoint's. The fence is therefore checked
before each file.
"""

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from finetune_trainer.claims.fence import Fence
from finetune_trainer.claims.names import TAG, Claim
from finetune_trainer.config import ContractModel, JobRef, PathBelow
from finetune_trainer.errors import OutputNotWritableError
from finetune_trainer.failpoints import failpoint
from finetune_trainer.files import (
    copy_permissions,
    leaves,
    move_file,
    recreate,
    remove_tree,
    sync,
    sync_tree,
)

RECORD = "finetune-export.json"
_STAGING = re.compile(rf"\.export-{TAG}")


class ExportRecord(ContractModel):
    """Record of the files of an export, which a later export may replace."""

    job: JobRef
    step: int
    files: tuple[PathBelow, ...]
    is_whole: bool = Field(
        True, description="False while files are moved in, and if a part is missing."
    )


def refuse_foreign(output: Path, names: Iterable[str]) -> None:
    """Refuse to replace a file in `output` that no earlier export recorded.

    `names` are the relative paths that an export would write; most of them need not exist.

    Raises:
        OutputNotWritableError: there is such a file; the message names the first one.
    """
    record = _record(output)
    ours = {RECORD, *(record.files if record else ())}
    foreign = sorted(name for name in names if name not in ours and os.path.lexists(output / name))
    if foreign:
        raise OutputNotWritableError(
            f"spec.output.uri {output} contains {foreign[0]}, which no earlier export wrote and "
            "this one would replace; move it away or set another spec.output.uri"
        )


def job_of_export(output: Path) -> JobRef | None:
    """Return the job whose export is in `output`; None if there is no export."""
    record = _record(output)
    return record.job if record else None


def open_staging(output: Path, claim: Claim) -> Path:
    """Return a new empty folder in `output`; delete leftovers of exports with a lower claim.

    Raises:
        OSError: the folder cannot be written.
    """
    for left in output.glob(".export-*"):
        match = _STAGING.fullmatch(left.name)
        owner = (*map(int, match.groups()[:3]), match[4]) if match else ()
        if owner < claim[:4]:
            remove_tree(left)
    return recreate(output / f".export-{claim.tag}")


def files_of_export(output: Path) -> tuple[str, ...]:
    """Return the relative paths of the files in `output` that exports have written."""
    record = _record(output)
    return record.files if record else ()


def publish(
    staged: Path,
    output: Path,
    step: int,
    fence: Fence,
    *,
    earlier_files: Iterable[str] = (),
    is_last: bool = True,
) -> None:
    """Sync `staged` to disk, move its files to `output`, and delete `staged`.

    All files of an older export are deleted except `earlier_files`; foreign files remain. If the
    process is killed midway, the folder has files of both exports, and the record marks it as
    incomplete: the next attempt completes it. The record also marks an export as incomplete until
    its last part is written. The files have the mode of all files that this process creates.

    Args:
        staged: Folder from `open_staging` with the new files.
        output: Folder of the export.
        step: Step of the weights.
        fence: Holds `output`.
        earlier_files: Relative paths of an earlier part of the same export.
        is_last: Whether this is the last part.

    Raises:
        OvertakenError: the check before a file found a higher claim.
        OutputNotWritableError: `output` has a foreign file of the same name.
        OSError: the disk is full or fails.
    """
    holding = fence.holding(output)
    time.sleep(2 * holding.pace.lag_seconds)  # a stop interrupts it, and with it the export
    files = _files_in(staged)
    refuse_foreign(output, files)
    kept = sorted({*files, *earlier_files})
    stale = set(files_of_export(output)) - set(kept)
    job = holding.wanted.job
    done = ExportRecord(job=job, step=step, files=tuple(kept), is_whole=is_last)
    # If the process is killed midway, the next attempt finds every file in this record.
    half = done.model_copy(update={"files": (*kept, *sorted(stale)), "is_whole": False})
    records = staged / ".half", staged / ".whole"
    for path, record in zip(records, (half, done), strict=True):
        path.write_text(record.to_json())
    for name in files:
        copy_permissions(staged / name, records[0])
    sync_tree(staged)
    failpoint("before-publish", step)
    fence.check()
    move_file(records[0], output / RECORD)
    for name in files:
        fence.check()
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        move_file(staged / name, target)
    for name in stale:
        if leaves(output, name):
            continue
        fence.check()
        (output / name).unlink(missing_ok=True)
    fence.check()
    move_file(records[1], output / RECORD)
    remove_tree(staged)
    sync(output)


def _files_in(folder: Path) -> tuple[str, ...]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(sorted(found))


def _record(folder: Path) -> ExportRecord | None:
    try:
        return ExportRecord.read(folder / RECORD)
    except (OSError, ValidationError):
        return None  # not an export, so no file in it may be deleted
