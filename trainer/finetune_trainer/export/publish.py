"""Put the files of a finished export in the place of an older one's.

`export` calls it. Everything is written into a staging folder in the output first; then the files
move in one by one, and the record that says the export is whole comes last. Only what an earlier
export wrote is ever replaced or deleted. Loaders want fixed names, so unlike a checkpoint an export
cannot carry its writer's claim: the fence is asked before each file.
"""

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from finetune_trainer.claims.fence import Fence
from finetune_trainer.claims.names import TAG, Claim
from finetune_trainer.config import ContractModel, JobRef
from finetune_trainer.errors import OutputNotWritableError
from finetune_trainer.failpoints import reach
from finetune_trainer.files import make_anew, move_file, remove_tree, share_as, sync, sync_tree

RECORD = "finetune-export.json"
_STAGING = re.compile(rf"\.export-{TAG}")


class ExportRecord(ContractModel):
    """What an export wrote, beside it: which files are ours to replace."""

    job: JobRef
    step: int
    files: tuple[str, ...]
    is_whole: bool = Field(
        True, description="False while files are moved in, and where a part never came."
    )


def refuse_foreign(output: Path, names: Iterable[str]) -> None:
    """Refuse to replace a file in `output` that no earlier export recorded.

    `names` are the paths relative to it that an export would write; most need not be there.

    Raises:
        OutputNotWritableError: names the first such file.
    """
    record = _record(output)
    ours = {RECORD, *(record.files if record else ())}
    foreign = sorted(name for name in names if name not in ours and os.path.lexists(output / name))
    if foreign:
        raise OutputNotWritableError(
            f"spec.output.uri {output} holds {foreign[0]}, which no earlier export wrote and this "
            "one would replace; move it away or set another spec.output.uri"
        )


def job_of_export(output: Path) -> JobRef | None:
    """Return the job whose export lies in `output`; None without any."""
    record = _record(output)
    return record.job if record else None


def open_staging(output: Path, claim: Claim) -> Path:
    """Return a new empty folder in `output`; what exports with a lower claim left there is deleted.

    Raises:
        OSError: it cannot be written.
    """
    for left in output.glob(".export-*"):
        match = _STAGING.fullmatch(left.name)
        owner = (*map(int, match.groups()[:3]), match[4]) if match else ()
        if owner < claim[:4]:
            remove_tree(left)
    return make_anew(output / f".export-{claim.tag}")


def files_of_export(output: Path) -> tuple[str, ...]:
    """Return what exports have written into `output`, by paths relative to it."""
    record = _record(output)
    return record.files if record else ()


def publish(
    staged: Path,
    output: Path,
    step: int,
    fence: Fence,
    *,
    beside: Iterable[str] = (),
    is_last: bool = True,
) -> None:
    """Make `staged` durable and move its files to `output`; `staged` is gone afterwards.

    Of an older export nothing stays but what `beside` names, and files that are nobody's export do.
    Killed on the way, the folder holds files of both, which its record says: the next attempt
    completes it. The record says so, too, until the last part of an export is there. They have the
    mode of all files that this process creates.

    Raises:
        OvertakenError: `fence` says before one of the files that this process must leave.
        OutputNotWritableError: `output` holds a file of the same name that is not ours.
        OSError: the disk is full or fails.
    """
    holding = fence.holding(output)
    time.sleep(2 * holding.pace.lag_seconds)  # a stop breaks it off, as the whole export
    files = _files_in(staged)
    refuse_foreign(output, files)
    kept = sorted({*files, *beside})
    stale = set(files_of_export(output)) - set(kept)
    job = holding.wanted.job
    done = ExportRecord(job=job, step=step, files=tuple(kept), is_whole=is_last)
    # Killed on the way, all that lies there by then is still known as ours by the next attempt.
    half = done.model_copy(update={"files": (*kept, *sorted(stale)), "is_whole": False})
    records = staged / ".half", staged / ".whole"
    for path, record in zip(records, (half, done), strict=True):
        path.write_text(record.to_json())
    for name in files:
        share_as(staged / name, records[0])
    sync_tree(staged)
    reach("before-publish", step)
    fence.check()
    move_file(records[0], output / RECORD)
    for name in files:
        fence.check()
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        move_file(staged / name, target)
    for name in stale:
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
        return None  # no export of ours, so nothing in it is ours to delete
