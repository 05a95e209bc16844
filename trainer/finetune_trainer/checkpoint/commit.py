"""Commit and verify checkpoints: a folder with a manifest of sizes and hashes, written last.

The store uses it to write checkpoints, and every reader of the ledger uses it to list them. This
module must not import torch. The name of a folder, `step-N.CLAIM`, contains the claim of its
writer, so that two writers never share a folder; trainers without claims wrote `step-N`. A folder
is a valid checkpoint if every file matches the manifest. It is used only if it belongs to the
lineage of the current attempt.
"""

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from finetune_trainer.claims.names import TAG, Claim, Listing, Mark
from finetune_trainer.config import CheckpointRef, ContractModel, JobRef, PathBelow
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import leaves, remove_tree, sync

MANIFEST = "manifest.json"
HELD_OUT_FILE = "held-out-rows.txt"
"""Fingerprint of the held-out rows.

It is a file because earlier versions refuse unknown fields in manifest and notes, but no files.
"""
_STEP_FOLDER = re.compile(rf"step-(\d+)(?:\.{TAG})?")
_OLD_LEFTOVER = re.compile(r"step-\d+\.tmp")  # of trainers without claims


class FileDigest(ContractModel):
    """Expected length and hash of a file."""

    size: int = Field(description="Bytes.")
    sha256: str


class Fingerprint(ContractModel):
    """Identity of a training, part by part; a run resumes a checkpoint only if all are equal."""

    model: str = Field(description="Identifies the base model.")
    method: str = Field(description="Identifies the trained parameters.")
    data: str = Field(description="Identifies all tokens and labels.")
    order: str = Field(description="Identifies which of the data each step trains on.")
    weights: str = Field(
        "", description="Identifies the base weights by content; empty if unknown."
    )
    optimizer: str = Field("adamw", description="Determines which optimizer state is saved.")

    @model_serializer(mode="wrap")
    def _omit_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Omit unset fields that older versions lack: the manifest's hash covers this text."""
        values: dict[str, object] = handler(self)
        fields = type(self).model_fields
        added = ("weights", "optimizer")
        return {n: v for n, v in values.items() if n not in added or v != fields[n].default}

    def difference(self, other: "Fingerprint") -> str:
        """Name the parts that differ and the fields that determine them; empty if all are equal.

        Weights are compared only if both sides have them: earlier versions did not store them.

        The tokens depend on the model's tokenizer, and the order depends on the tokens. Only the
        first of model, tokens and order that differs is named, because the later ones differ too.
        """
        parts = []
        if self.method != other.method:
            parts.append("method (spec.method)")
        if self.optimizer != other.optimizer:
            parts.append("optimizer (spec.training.optimizer)")
        if self.model != other.model:
            parts.append("model (spec.model)")
        elif self.weights and other.weights and self.weights != other.weights:
            parts.append("content of the base weights (spec.model.source)")
        elif self.data != other.data:
            parts.append("data set (spec.dataset, spec.training.maxSeqLength)")
        elif self.order != other.order:
            parts.append(
                "order of the data (spec.training.seed, globalBatchSize, maxSeqLength, packing)"
            )
        return " and another ".join(parts)


class Manifest(ContractModel):
    """The commit record of one checkpoint, written last."""

    job: JobRef = Field(description="The job and the attempt that wrote it.")
    step: int = Field(description="Number of optimizer steps.")
    world_size: int = Field(description="Number of ranks that wrote it.")
    time: float = Field(description="Time of the save, seconds since the epoch.")
    fingerprint: Fingerprint
    eval_loss: float | None = None
    files: dict[PathBelow, FileDigest] = Field(description="By path relative to the folder.")
    digest: str = Field("", description="Hash of this record itself, without this field.")

    def has_other_held_out(self, held_out: str | None) -> bool:
        """Whether the run that wrote it evaluated other rows than `held_out`, if both are known."""
        recorded = self.files.get(HELD_OUT_FILE)
        if recorded is None or held_out is None:
            return False
        return recorded.sha256 != hashlib.sha256(held_out.encode()).hexdigest()

    def sealed(self) -> "Manifest":
        """Return this record with its own hash, which reveals a flipped bit in the record."""
        return self.model_copy(update={"digest": self._own_digest()})

    def is_intact(self) -> bool:
        """Whether the record matches its hash."""
        return self.digest == self._own_digest()

    def _own_digest(self) -> str:
        text = self.model_dump_json(by_alias=True, exclude={"digest"})
        return hashlib.sha256(text.encode()).hexdigest()


class StartRecord(ContractModel):
    """The starting point of an attempt, written once before its first step."""

    kept: tuple[str, ...] = Field(description="Names of the checkpoints up to the start.")


_NO_OWNER = (0, 0, 0, "")


class StepFolder(NamedTuple):
    """A folder that is named like a checkpoint, committed or not."""

    step: int
    owner: tuple[int, int, int, str]  # epoch, attempt, generation and nonce of its writer's claim
    path: Path

    def is_written_by(self, claim: Claim) -> bool:
        """Whether the process with `claim` wrote this folder."""
        return self.owner == claim[:4]

    def is_written_after(self, claim: Claim) -> bool:
        """Whether a process with a higher claim wrote this folder."""
        return self.owner > claim[:4]


class Lineage(NamedTuple):
    """The checkpoints that the current attempt descends from or has written.

    Other checkpoints were committed after its starting point, or too late for the attempt to see
    them. They are ignored and never deleted.
    """

    claim: Claim
    kept: frozenset[str]

    def includes(self, folder: StepFolder) -> bool:
        """Whether a folder belongs to the lineage."""
        is_later = folder.is_written_by(self.claim) or folder.is_written_after(self.claim)
        return is_later or folder.path.name in self.kept


def step_folder(root: Path, step: int, claim: Claim) -> Path:
    """Return the folder in which the process with `claim` writes the checkpoint of `step`."""
    return root / f"step-{step}.{claim.tag}"


def digest_file(path: Path) -> FileDigest:
    """Read a file once and return its size and hash."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size=stream.tell(), sha256=sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Sync every file that `manifest` names to disk, then commit them by writing the manifest.

    The ranks that wrote the files report the names, because a directory listing may be stale.

    Raises:
        OSError: the disk is full or fails; the checkpoint is then not committed.
    """
    path = folder / MANIFEST
    for name in manifest.files:  # before the record that lists them
        sync(folder / name)
    sync(folder)
    path.write_text(manifest.sealed().to_json())
    sync(path)
    sync(folder)
    sync(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read and check only the commit record; the files that it lists are not opened.

    Raises:
        CheckpointError: the record is missing, unreadable or not that of this folder.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never committed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: it is not a valid manifest") from error
    if not manifest.is_intact():
        raise CheckpointError(f"{path} is damaged: its content does not match its own hash")
    return manifest


def is_committed(folder: Path) -> bool:
    """Whether `folder` has an intact commit record."""
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


Confirm = Callable[[Path, Manifest], Collection[str]]
"""Returns the names of the files of a checkpoint that are known to match its manifest."""


def _confirm_none(_folder: Path, _manifest: Manifest) -> Collection[str]:
    return ()


def verify(folder: Path, confirm: Confirm = _confirm_none) -> Manifest:
    """Read every byte of a checkpoint and return its manifest if all files match it.

    Files that `confirm` returns are not read here.

    Raises:
        CheckpointError: a file differs; the message names the first one and the difference.
    """
    manifest = read_manifest(folder)
    if outside := next((name for name in manifest.files if leaves(folder, name)), None):
        raise CheckpointError(f"{folder / outside} is in another folder, through a symbolic link")
    confirmed = confirm(folder, manifest)
    for name, expected in manifest.files.items():
        if name in confirmed:
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            found = digest_file(path) if size == expected.size else None
        except FileNotFoundError:
            refuse_deleted(folder)
            raise CheckpointError(f"{path} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found is None:
            raise CheckpointError(f"{path} has {size} bytes instead of {expected.size}")
        if found != expected:
            raise CheckpointError(
                f"{path} is damaged: its {size} bytes do not have the hash in {MANIFEST}"
            )
    return manifest


def refuse_deleted(folder: Path) -> None:
    """Refuse a checkpoint that its owner is deleting at this moment.

    Raises:
        CheckpointError: the manifest, which is deleted first, is gone.
    """
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} was deleted during the read: the job that wrote it retains only its newest "
            "checkpoints; name a newer one in spec.checkpoint.resumeFrom, or raise that job's "
            "spec.checkpoint.keep"
        )


def newest_verified(
    root: Path,
    warn: Callable[[str], None],
    writer: str | None = None,
    confirm: Confirm = _confirm_none,
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in `root` that verifies, or None if no checkpoint does.

    Args:
        root: The folder of all checkpoints.
        warn: Receives a sentence for each newer checkpoint that does not verify.
        writer: Identity of a job; if given, checkpoints of other jobs are skipped.
        confirm: Returns files that need not be read here.
    """
    for folder in steps(root):
        if not (folder.path / MANIFEST).exists():
            continue  # never committed: a leftover
        try:
            if writer not in (None, read_manifest(folder.path).job.identity):
                continue
            return folder.path, verify(folder.path, confirm)
        except CheckpointError as error:
            name = folder.path.name
            warn(f"checkpoint {name} is skipped: {error}; trying the previous one")
    return None


def manifests(root: Path, lineage: Lineage | None = None) -> list[tuple[Path, Manifest]]:
    """List the committed checkpoints in `root`, newest first; the files in them are not read.

    Without `lineage`, the lineage recorded in `root` decides which checkpoints are listed.
    """
    found = []
    for folder in steps(root, lineage):
        try:
            found.append((folder.path, read_manifest(folder.path)))
        except CheckpointError:
            continue  # not committed, or damaged; `newest_verified` warns about damage
    return found


def ledger(
    root: Path, lineage: Lineage | None = None, held_out: str | None = None
) -> list[CheckpointRef]:
    """List the committed checkpoints in `root` like `manifests`, without their manifests."""
    return [reference(folder, manifest, held_out) for folder, manifest in manifests(root, lineage)]


def reference(folder: Path, manifest: Manifest, held_out: str | None = None) -> CheckpointRef:
    """Return the ledger entry of one checkpoint; the loss of other held-out rows is omitted."""
    return CheckpointRef(
        step=manifest.step,
        path=str(folder),
        time=manifest.time,
        world_size=manifest.world_size,
        eval_loss=None if manifest.has_other_held_out(held_out) else manifest.eval_loss,
    )


def remove_leftovers(root: Path, claim: Claim) -> None:
    """Delete folders that processes with a lower claim left half-written or half-deleted.

    A folder without a claim in its name stays: trainers before claims renamed a folder to that
    name only when it was complete.
    """
    for path in list(root.iterdir()):
        if _OLD_LEFTOVER.fullmatch(path.name):
            remove_tree(path)
    for folder in _all_steps(root):
        is_older = _NO_OWNER < folder.owner < claim[:4]
        if is_older and not (folder.path / MANIFEST).exists():
            remove_tree(folder.path)


def delete(folder: Path) -> None:
    """Delete a committed checkpoint, the manifest first, so that the rest is not committed.

    Raises:
        OSError: the folder cannot be deleted.
        CheckpointError: the folder has no valid manifest; another process may have deleted it.
    """
    names = read_manifest(folder).files
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)
    for name in names:
        if not leaves(folder, name):
            (folder / name).unlink(missing_ok=True)
    remove_tree(folder)


def begin_lineage(root: Path, claim: Claim, step: int) -> tuple[Lineage, list[str]]:
    """Record that the attempt of `claim` starts at `step`; also return the names of later folders.

    Checkpoints of later steps belong to another lineage of the run, or are damaged. They are
    neither renamed nor deleted.
    """
    present = steps(root)
    kept = tuple(folder.path.name for folder in present if folder.step <= step)
    later = [folder.path.name for folder in present if folder.step > step]
    path = claim.path(root, Mark.START)
    path.write_text(StartRecord(kept=kept).to_json(), encoding="utf-8")
    sync(path)
    return Lineage(claim, frozenset(kept)), later


def steps(root: Path, lineage: Lineage | None = None) -> list[StepFolder]:
    """Return the folders of the lineage that are named like a checkpoint, newest first."""
    lineage = lineage or _newest_lineage(root)
    found = _all_steps(root)
    return found if lineage is None else [folder for folder in found if lineage.includes(folder)]


def _newest_lineage(root: Path) -> Lineage | None:
    """Return the lineage that the highest started claim recorded."""
    for claim in sorted(Listing.of(root).started, reverse=True):
        try:
            record = StartRecord.read(claim.path(root, Mark.START))
        except (OSError, ValidationError):
            continue  # killed while it wrote the record, and thus before its first step
        return Lineage(claim, frozenset(record.kept))
    return None


def _all_steps(root: Path) -> list[StepFolder]:
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir():
            step, epoch, attempt, generation, nonce = match.groups()
            owner = (int(epoch), int(attempt), int(generation), nonce) if nonce else _NO_OWNER
            found.append(StepFolder(int(step), owner, path))
    return sorted(found, reverse=True)
