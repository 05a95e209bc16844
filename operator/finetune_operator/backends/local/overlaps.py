"""Check whether the folders that a run writes overlap with files that it reads.

A run replaces earlier exports, deletes old checkpoints and moves finished runs aside. In a shared
folder it could so delete the base model, the rows or the manifest.
"""

from collections.abc import Iterator
from pathlib import Path

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import Written
from finetune_operator.backends.local import layout
from finetune_operator.planner.uris import inputs_of, outputs_of, starts_of

_RUN = "spec.backend.local.runDirectory"
_CHECKPOINT = "spec.checkpoint.uri"
_OUTPUT = "spec.output.uri"
_RESUME = "spec.checkpoint.resumeFrom"


def written(job: FineTuneJob, manifest_dir: Path) -> list[Written]:
    """Return the folders that the run writes: its directory, and the folders that the job names."""
    try:
        folders = _resolved(job, manifest_dir)
    except layout.BadUriError:
        return []  # the job is refused for it
    named = {_RUN: f"{layout.FILE}{folders[_RUN]}", **outputs_of(job)}
    return [Written(field, uri, ("disk", *folders[field].parts)) for field, uri in named.items()]


def overlaps(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    """Yield one problem for each folder of the run that overlaps with files of others."""
    folders = _resolved(job, manifest_dir)
    read, base = _read(job, manifest_dir), manifest_dir.resolve()
    for field, folder in folders.items():
        if field != _RUN and field not in outputs_of(job):
            continue  # below the run directory, whose overlap is already reported
        if folder in (base, *base.parents):
            complaint = "holds the manifest"
        else:
            complaint = _against_read(folder, read, folders[_CHECKPOINT])
        complaint = complaint or _against_own(field, folders)
        if complaint:
            yield Problem(field, f"{folder} {complaint}; choose a separate folder")


def _resolved(job: FineTuneJob, manifest_dir: Path) -> dict[str, Path]:
    """Return every folder of the run with links resolved; a folder may have several names."""
    folders = layout.folders_of(job, manifest_dir)
    by_field = {_RUN: folders.run, _CHECKPOINT: folders.checkpoint, _OUTPUT: folders.output}
    return {field: path.resolve() for field, path in by_field.items()}


def _read(job: FineTuneJob, manifest_dir: Path) -> dict[str, Path]:
    """Return the files and folders that the run reads on this machine, by field."""
    return {
        field: layout.file_path(uri, manifest_dir).resolve()
        for field, uri in (inputs_of(job) | starts_of(job)).items()
        if uri.startswith(layout.FILE)
    }


def _against_read(folder: Path, read: dict[str, Path], checkpoint: Path) -> str:
    for what, place in read.items():
        if folder == place:
            return f"is {what} itself"
        if folder in place.parents:
            # A checkpoint to start from may belong to the job itself.
            if what != _RESUME or place.parent != checkpoint:
                return f"holds {what}"
        elif place in folder.parents:
            return f"is inside {what}"
    return ""


def _against_own(field: str, folders: dict[str, Path]) -> str:
    """Return a problem if files in one folder of the run could be lost through another folder."""
    folder = folders[field]
    for other, place in folders.items():
        if other != field and folder == place:
            return f"is also the folder of {other}"
    checkpoint = folders[_CHECKPOINT]
    if field == _OUTPUT and checkpoint in folder.parents:
        name = folder.relative_to(checkpoint).parts[0]
        if name.startswith("step-"):
            return f"is inside {name} of {_CHECKPOINT}, which is deleted by retention"
    return ""
