"""Put a finished folder in place of an older one, so that a crash never leaves neither.

`export` calls it. Everything is written into a staging folder on the same file system first, and
only what an earlier export wrote is ever replaced or deleted.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from finetune_trainer.checkpoint.commit import payload_files
from finetune_trainer.config import ContractModel, JobRef
from finetune_trainer.errors import OutputNotWritableError
from finetune_trainer.failpoints import reach
from finetune_trainer.files import make_anew, replace_text, sync, sync_tree

RECORD = "finetune-export.json"


class ExportRecord(ContractModel):
    """What an export wrote, beside it: which files are ours to replace."""

    job: JobRef
    step: int
    files: tuple[str, ...]
    is_whole: bool = Field(True, description="False while files are moved in one by one.")


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


def open_staging(output: Path) -> Path:
    """Return a new empty folder that can be renamed to `output`, or whose files can be moved in.

    It lies beside `output`; inside it where `output` is a mount point or its parent is read-only.

    Raises:
        OSError: neither place can be written.
    """
    replaced = _replaced(output)
    if replaced.exists() and not output.exists():
        replaced.rename(output)  # killed between the two renames of `publish`
    if not os.path.ismount(output):
        beside = output.with_name(f".{output.name}.export-tmp")
        try:
            return make_anew(beside)
        except OSError:
            if not output.is_dir():
                raise
    return make_anew(output / ".export-tmp")


def publish(staged: Path, output: Path, job: JobRef, step: int) -> None:
    """Make `staged` durable and put it where `output` is; `staged` is gone afterwards.

    An older export is replaced as a whole. A folder that also holds other files keeps them: the
    new files are moved in one by one, and the record of the whole one last.

    Raises:
        OutputNotWritableError: `output` holds a file of the same name that is not ours.
        OSError: the disk is full or fails.
    """
    files = tuple(name for name in payload_files(staged) if name != RECORD)
    refuse_foreign(output, files)
    (staged / RECORD).write_text(ExportRecord(job=job, step=step, files=files).to_json())
    sync_tree(staged)
    reach("before-export-rename", step)
    if staged.parent == output or not _is_only_ours(output):
        _move_in(staged, output)
    else:
        _replace(staged, output)


def _replace(staged: Path, output: Path) -> None:
    replaced = _replaced(output)
    shutil.rmtree(replaced, ignore_errors=True)  # what stays makes the next line fail
    if output.exists() and any(output.iterdir()):
        output.rename(replaced)
    staged.rename(output)  # an empty folder gives way
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # the new one is in place: only room is lost


def _move_in(staged: Path, output: Path) -> None:
    new = ExportRecord.read(staged / RECORD)
    old = _record(output)
    stale = set(old.files if old else ()) - set(new.files)
    # Killed on the way, all that lies there by then is still known as ours by the next attempt.
    half = new.model_copy(update={"files": (*new.files, *sorted(stale)), "is_whole": False})
    replace_text(output / RECORD, half.to_json())
    sync(output)
    for name in new.files:
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (staged / name).replace(target)
    for name in stale:
        (output / name).unlink(missing_ok=True)
    (staged / RECORD).replace(output / RECORD)
    shutil.rmtree(staged)
    sync(output)


def _is_only_ours(output: Path) -> bool:
    """Whether `output` is absent, empty, or holds an earlier export and nothing else."""
    if not output.exists() or not any(output.iterdir()):
        return True
    record = _record(output)
    return record is not None and set(payload_files(output)) <= {*record.files, RECORD}


def _record(folder: Path) -> ExportRecord | None:
    try:
        return ExportRecord.read(folder / RECORD)
    except (OSError, ValidationError):
        return None  # no export of ours, so nothing in it is ours to delete


def _replaced(output: Path) -> Path:
    return output.with_name(f".{output.name}.replaced")
