"""Identify the base model by its name and by its content.

`rank` calls it before loading, and stores the fingerprints in each checkpoint. A name is not
enough: weights of the same sizes, such as Base and Instruct, may replace each other in a folder,
and a branch of the hub moves.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from finetune_trainer.config import ModelConfig, TrainConfig
from finetune_trainer.model.folder_advice import explained
from finetune_trainer.model.snapshot import model_folder
from finetune_trainer.model.weight_files import weight_files_in
from finetune_trainer.world import World, gather_values

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PINNED = "commit:"
# Sample of each tensor: evenly spread pieces, 256 numbers in bf16. Other weights of the same shape
# differ in nearly all of them.
_PIECES, _PIECE_BYTES = 8, 64


class RecordedBase(Protocol):
    """The base model as the fingerprint in a checkpoint identifies it."""

    @property
    def model(self) -> str:
        """Result of `model_fingerprint`."""

    @property
    def weights(self) -> str:
        """Result of `weights_fingerprint`."""


def model_fingerprint(config: ModelConfig) -> str:
    """Identify the requested model: hub name and revision, or configuration and file sizes."""
    folder = Path(config.path)
    if not folder.is_absolute():
        return f"{config.path}@{config.revision or 'main'}"
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()


def weights_fingerprint(config: ModelConfig) -> str:
    """Identify the base weights by content: the hub's commit, or a sample of every tensor.

    The files are sampled, so the result does not depend on precision, number of ranks or the
    division of tensors over files. Half a KiB of each tensor is read.

    Args:
        config: Result of `pinned`.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = Path(config.path)
    if not folder.is_absolute():
        revision = config.revision or ""
        return _PINNED + revision if _COMMIT.fullmatch(revision) else ""
    digest = hashlib.sha256()
    with explained(f"spec.model.source: the weights of {folder}"):
        samples = (sample for file in weight_files_in(folder) for sample in _samples(file))
        for description, content in sorted(samples):
            digest.update(description.encode() + b"\0" + content)
    return digest.hexdigest()


def pinned(config: TrainConfig, world: World, recorded: RecordedBase | None) -> TrainConfig:
    """Return the configuration with the commit of the hub's revision; a collective.

    One rank of each node downloads settings and tokenizer.

    A branch may move between two attempts, and while the ranks of an attempt are loading. The first
    attempt stores the commit in its checkpoints, and later attempts that resume from them use it.

    Args:
        config: Names the model and its revision.
        world: The ranks; all of them get the same commit.
        recorded: Base model of the checkpoint to resume from, or None if there is no checkpoint.
            Ranks other than 0 ignore it.

    Raises:
        ConfigError: the hub does not have the model, or cannot be reached.
    """
    if Path(config.model.path).is_absolute():
        return config
    commit = _commit(config.model, recorded) if world.is_main else None
    world.liveness_barrier()  # the hub may be slow
    found = gather_values(world.control_group, commit, str | None)
    model = config.model
    if found[0] is not None:
        model = model.model_copy(update={"revision": found[0]})
    if world.local_rank == 0:
        model_folder(model)
    world.liveness_barrier()
    return config.model_copy(update={"model": model})


def _commit(model: ModelConfig, recorded: RecordedBase | None) -> str | None:
    if recorded is not None and recorded.model == model_fingerprint(model):
        kind, _, commit = recorded.weights.partition(":")
        if f"{kind}:" == _PINNED:
            return commit
    if _COMMIT.fullmatch(model.revision or ""):
        return model.revision
    commit = model_folder(model).name  # …/snapshots/COMMIT
    return commit if _COMMIT.fullmatch(commit) else None


def weight_files(config: ModelConfig) -> list[Path]:
    """Return the weight files of a model that has been loaded, also from the hub's cache."""
    return weight_files_in(model_folder(config))


def _samples(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield a description and sampled bytes of each tensor in a safetensors file."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        header: dict[str, Any] = json.loads(content.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            description = f"{name} {tensor['dtype']} {tensor['shape']}"
            yield description, _pieces(content.fileno(), 8 + length + begin, end - begin)


def _pieces(descriptor: int, begin: int, size: int) -> bytes:
    if size <= _PIECES * _PIECE_BYTES:
        return os.pread(descriptor, size, begin)
    last = size - _PIECE_BYTES
    return b"".join(
        os.pread(descriptor, _PIECE_BYTES, begin + last * piece // (_PIECES - 1))
        for piece in range(_PIECES)
    )
