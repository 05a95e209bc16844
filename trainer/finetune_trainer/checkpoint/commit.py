"""What makes a folder a checkpoint: a manifest of sizes and hashes, and one atomic rename.

The store writes with it, and anything that wants to know which checkpoints exist reads with it.
It must stay free of torch. A folder `step-N.tmp` is never a checkpoint; `step-N` is one only
while every file is as its manifest says.
"""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from finetune_trainer.config import CheckpointRef, ContractModel, JobRef
from finetune_trainer.errors import CheckpointError
from finetune_trainer.files import sync, sync_tree

MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-\d+\.tmp")


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

    def difference(self, other: "Fingerprint") -> str:
        """Name what differs, and the fields that decide it; empty where nothing does.

        The tokens follow from the model's tokenizer, and the order from the tokens: of these the
        first that differs is named, as the others differ with it.
        """
        parts = []
        if self.method != other.method:
            parts.append("method (spec.method)")
        if self.model != other.model:
            parts.append("model (spec.model)")
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


def step_folder(root: Path, step: int) -> Path:
    """Return where the committed checkpoint of `step` lies."""
    return root / f"step-{step}"


def tmp_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of `step` is written before it is committed."""
    return root / f"step-{step}.tmp"


def digest_file(path: Path) -> FileDigest:
    """Read a file once and return its size and hash."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size=stream.tell(), sha256=sha256)


def payload_files(folder: Path) -> list[str]:
    """Return the relative path of every file but the manifest, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make every file and folder below `folder` durable, then write the sealed manifest.

    Raises:
        OSError: the disk is full or fails; the folder is then no checkpoint.
    """
    path = folder / MANIFEST
    sync_tree(folder)  # before the record that vouches for it
    path.write_text(manifest.sealed().to_json())
    sync(path)
    sync(folder)


def commit(tmp: Path, final: Path) -> None:
    """Turn a complete folder into a checkpoint: one rename, made durable.

    Raises:
        OSError: `final` exists and is not empty, or the disk fails.
    """
    tmp.rename(final)
    sync(final.parent)


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


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest if all are as they were written.

    Raises:
        CheckpointError: names the first file that differs, and how.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            found = digest_file(path) if size == expected.size else None
        except FileNotFoundError:
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


def newest_verified(root: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in `root` that verifies, or None when there is none.

    Each newer one that does not verify is reported to `warn` in a sentence.
    """
    for _, folder in _steps(root):
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            warn(f"checkpoint {folder.name} is passed over: {error}; trying the one before")
    return None


def manifests(root: Path) -> list[tuple[Path, Manifest]]:
    """List the committed checkpoints in `root`, newest first; the files in them are not read."""
    found = []
    for _, folder in _steps(root):
        try:
            found.append((folder, read_manifest(folder)))
        except CheckpointError:
            continue  # not committed, or damaged: `newest_verified` says so when it matters
    return found


def ledger(root: Path) -> list[CheckpointRef]:
    """List the committed checkpoints in `root`, newest first, by their manifests alone."""
    return [reference(folder, manifest) for folder, manifest in manifests(root)]


def reference(folder: Path, manifest: Manifest) -> CheckpointRef:
    """Return the ledger's line for one checkpoint."""
    return CheckpointRef(
        step=manifest.step,
        path=str(folder),
        time=manifest.time,
        world_size=manifest.world_size,
        eval_loss=manifest.eval_loss,
    )


def remove_leftovers(root: Path) -> None:
    """Delete what a killed process left half-written or half-deleted (`step-N.tmp`)."""
    for path in list(root.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            shutil.rmtree(path)


def set_aside_newer(root: Path, step: int) -> list[Path]:
    """Rename each `step-N` with N > `step` to `step-N.aside`, and return the new paths.

    Training goes on from `step`, so what lies beyond it belongs to another course of the run, or
    is damaged. Left in place it would be taken for the newest one by the next attempt, and be in
    the way of the commit of the same step. Nothing is deleted.
    """
    moved = []
    for number, folder in _steps(root):
        if number > step:
            moved.append(folder.rename(_free_name(folder)))
    if moved:
        sync(root)
    return moved


def _free_name(folder: Path) -> Path:
    name = folder.with_name(f"{folder.name}.aside")
    count = 2
    while name.exists():
        name = folder.with_name(f"{folder.name}.aside-{count}")
        count += 1
    return name


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Return (N, folder) of every `step-N`, highest N first."""
    if not root.is_dir():
        return []
    matches = [(_STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir()]
    found = [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
    return sorted(found, reverse=True)
