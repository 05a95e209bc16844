"""What makes a folder a checkpoint: a manifest of sizes and hashes, written last.

The store writes with it, and anything that wants to know which checkpoints exist reads with it.
It must stay free of torch. A folder carries its writer's claim in its name, `step-N.CLAIM`, so that
two writers never meet in one; without a claim it is of a trainer before claims. It is a checkpoint
only while every file is as its manifest says, and counts while it lies on the course of training.
"""

import hashlib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from finetune_trainer.claims.names import TAG, Claim, Listing, Mark
from finetune_trainer.config import CheckpointRef, ContractModel, JobRef
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import remove_tree, sync

MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(rf"step-(\d+)(?:\.{TAG})?")
_OLD_LEFTOVER = re.compile(r"step-\d+\.tmp")  # of trainers before claims


class FileDigest(ContractModel):
    """What a file must be: its length and the hash of its bytes."""

    size: int = Field(description="Bytes.")
    sha256: str


class Fingerprint(ContractModel):
    """What a run trains, part by part; a checkpoint is gone on from only where all are equal."""

    model: str = Field(description="Identifies the base model.")
    method: str = Field(description="Identifies the trained parameters.")
    data: str = Field(description="Identifies all tokens and labels.")
    order: str = Field(description="Identifies which of the data each step trains on.")
    weights: str = Field(
        "", description="Identifies the base weights by content; empty where it is not known."
    )
    optimizer: str = Field("adamw", description="Decides what is kept of the optimizer.")

    @model_serializer(mode="wrap")
    def _without_what_is_not_known(
        self, handler: SerializerFunctionWrapHandler
    ) -> dict[str, object]:
        """Write an older version's record as it was: its hash is over that text."""
        values: dict[str, object] = handler(self)
        fields = type(self).model_fields
        added = ("weights", "optimizer")
        return {n: v for n, v in values.items() if n not in added or v != fields[n].default}

    def difference(self, other: "Fingerprint") -> str:
        """Name what differs, and the fields that decide it; empty where nothing does.

        Of the weights nothing is known in checkpoints of earlier versions.

        The tokens follow from the model's tokenizer, and the order from the tokens: of these the
        first that differs is named, as the others differ with it.
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
    step: int = Field(description="Optimizer steps that are in it.")
    world_size: int = Field(description="Ranks that wrote it.")
    time: float = Field(description="When it was written, seconds since the epoch.")
    fingerprint: Fingerprint
    eval_loss: float | None = None
    files: dict[str, FileDigest] = Field(description="By path relative to the folder.")
    digest: str = Field("", description="Hash of this record itself, without this field.")

    def sealed(self) -> "Manifest":
        """Return this record with its own hash, so that a flipped bit in it is found too."""
        return self.model_copy(update={"digest": self._own_digest()})

    def is_intact(self) -> bool:
        """Whether the record is as it was sealed."""
        return self.digest == self._own_digest()

    def _own_digest(self) -> str:
        text = self.model_dump_json(by_alias=True, exclude={"digest"})
        return hashlib.sha256(text.encode()).hexdigest()


class StartRecord(ContractModel):
    """What an attempt started from, written down once, before its first step."""

    kept: tuple[str, ...] = Field(description="Names of the checkpoints up to the start.")


_OF_NOBODY = (0, 0, 0, "")


class StepFolder(NamedTuple):
    """A folder whose name is that of a checkpoint, committed or not."""

    step: int
    owner: tuple[int, int, int, str]  # epoch, attempt, generation and nonce of its writer's claim
    path: Path

    def is_of(self, claim: Claim) -> bool:
        """Whether the process with `claim` has written it."""
        return self.owner == claim[:4]

    def is_above(self, claim: Claim) -> bool:
        """Whether one with a higher claim has written it."""
        return self.owner > claim[:4]


class Course(NamedTuple):
    """The course of training since the newest start.

    What lies in the folder besides was committed beyond that start, or too late to be seen by it:
    it belongs to another course of the run, stays where it is, and counts no more.
    """

    claim: Claim
    kept: frozenset[str]

    def includes(self, folder: StepFolder) -> bool:
        """Whether a folder counts."""
        is_later = folder.is_of(self.claim) or folder.is_above(self.claim)
        return is_later or folder.path.name in self.kept


def step_folder(root: Path, step: int, claim: Claim) -> Path:
    """Return where the process with `claim` writes the checkpoint of `step`."""
    return root / f"step-{step}.{claim.tag}"


def digest_file(path: Path) -> FileDigest:
    """Read a file once and return its size and hash."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size=stream.tell(), sha256=sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make every file that `manifest` names durable, then commit them: write the manifest.

    The names come from those who wrote the files, as a listing may be late.

    Raises:
        OSError: the disk is full or fails; the folder is then no checkpoint.
    """
    path = folder / MANIFEST
    for name in manifest.files:  # before the record that vouches for them
        sync(folder / name)
    sync(folder)
    path.write_text(manifest.sealed().to_json())
    sync(path)
    sync(folder)
    sync(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the commit record alone; the files it lists are not opened.

    Raises:
        CheckpointError: it is missing, unreadable or not the record of this folder.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never committed") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: it is not a manifest") from error
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
"""Returns the names of those files of a checkpoint that are known to be right."""


def _confirm_none(_folder: Path, _manifest: Manifest) -> Collection[str]:
    return ()


def verify(folder: Path, confirm: Confirm = _confirm_none) -> Manifest:
    """Read every byte of a checkpoint and return its manifest if all are as they were written.

    What `confirm` vouches for is not read here.

    Raises:
        CheckpointError: names the first file that differs, and how.
    """
    manifest = read_manifest(folder)
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
    """Say so where a checkpoint that was there a moment ago is being deleted.

    Raises:
        CheckpointError: its manifest, which goes first, is gone.
    """
    if not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} was deleted while it was read: the job that wrote it keeps only its newest "
            "checkpoints; name a newer one in spec.checkpoint.resumeFrom, or raise that job's "
            "spec.checkpoint.keep"
        )


def newest_verified(
    root: Path,
    warn: Callable[[str], None],
    writer: str | None = None,
    confirm: Confirm = _confirm_none,
) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in `root` that verifies, or None when there is none.

    Only those of the job whose identity is `writer` count, where one is named. Each newer one that
    does not verify is reported to `warn` in a sentence.
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
            warn(f"checkpoint {name} is passed over: {error}; trying the one before")
    return None


def manifests(root: Path, course: Course | None = None) -> list[tuple[Path, Manifest]]:
    """List the committed checkpoints in `root`, newest first; the files in them are not read.

    `course` is the one that is written down in `root`, if the caller does not know it better.
    """
    found = []
    for folder in steps(root, course):
        try:
            found.append((folder.path, read_manifest(folder.path)))
        except CheckpointError:
            continue  # not committed, or damaged: `newest_verified` says so when it matters
    return found


def ledger(root: Path, course: Course | None = None) -> list[CheckpointRef]:
    """List the committed checkpoints in `root` like `manifests`, without their manifests."""
    return [reference(folder, manifest) for folder, manifest in manifests(root, course)]


def reference(folder: Path, manifest: Manifest) -> CheckpointRef:
    """Return the ledger's line for one checkpoint."""
    return CheckpointRef(
        step=manifest.step,
        path=str(folder),
        time=manifest.time,
        world_size=manifest.world_size,
        eval_loss=manifest.eval_loss,
    )


def remove_leftovers(root: Path, claim: Claim) -> None:
    """Delete what processes with a lower claim left half-written or half-deleted.

    A folder without a claim in its name was renamed to it when it was whole, so it stays.
    """
    for path in list(root.iterdir()):
        if _OLD_LEFTOVER.fullmatch(path.name):
            remove_tree(path)
    for folder in _all_steps(root):
        is_older = _OF_NOBODY < folder.owner < claim[:4]
        if is_older and not (folder.path / MANIFEST).exists():
            remove_tree(folder.path)


def delete(folder: Path) -> None:
    """Delete a committed checkpoint: its manifest first, so that what is left on the way is none.

    Raises:
        OSError: it cannot be deleted.
        CheckpointError: it is no checkpoint any more.
    """
    names = read_manifest(folder).files
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    remove_tree(folder)


def begin_course(root: Path, claim: Claim, step: int) -> tuple[Course, list[str]]:
    """Write down that the attempt of `claim` starts at `step`; also name what lies beyond.

    Training goes on from `step`, so what lies beyond it belongs to another course of the run, or
    is damaged. Nothing of it is renamed or deleted.
    """
    there = steps(root)
    kept = tuple(folder.path.name for folder in there if folder.step <= step)
    beyond = [folder.path.name for folder in there if folder.step > step]
    path = claim.path(root, Mark.START)
    path.write_text(StartRecord(kept=kept).to_json(), encoding="utf-8")
    sync(path)
    return Course(claim, frozenset(kept)), beyond


def steps(root: Path, course: Course | None = None) -> list[StepFolder]:
    """Return every folder on the course whose name is a checkpoint's, newest first."""
    course = course or _newest_course(root)
    found = _all_steps(root)
    return found if course is None else [folder for folder in found if course.includes(folder)]


def _newest_course(root: Path) -> Course | None:
    """Return what the highest claim that has started wrote down."""
    for claim in sorted(Listing.of(root).started, reverse=True):
        try:
            record = StartRecord.read(claim.path(root, Mark.START))
        except (OSError, ValidationError):
            continue  # killed while it wrote this, so before its first step
        return Course(claim, frozenset(record.kept))
    return None


def _all_steps(root: Path) -> list[StepFolder]:
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir():
            step, epoch, attempt, generation, nonce = match.groups()
            owner = (int(epoch), int(attempt), int(generation), nonce) if nonce else _OF_NOBODY
            found.append(StepFolder(int(step), owner, path))
    return sorted(found, reverse=True)
