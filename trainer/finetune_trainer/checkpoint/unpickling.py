"""Unpickle DCP's record of tensor locations with an allow-list of classes.

`shards` calls it before it reads any other file of a checkpoint. A folder may come from any user
with write access to a shared volume, and the hashes in a manifest show that files belong together,
but not who wrote them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune_trainer.errors import ConfigError
from finetune_trainer.unpickler import RECORD, SafeUnpickler

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"  # locations of the tensors; DCP's name


def read_metadata(folder: Path) -> "Metadata":
    """Return DCP's record of the checkpoint in `folder`.

    Raises:
        ConfigError: the record uses a name that is not allowed, has values other than tensors, or
            refers to a file outside the folder; none of its code was called.
        OSError: the file cannot be opened.
    """
    path = folder / METADATA_FILE
    with path.open("rb") as stream:
        found = _Unpickler(stream, path).load()
    _check(found, path)
    metadata: Metadata = found
    return metadata


class _Unpickler(SafeUnpickler):
    allowed = RECORD

    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def refuse(self, what: str) -> NoReturn:
        """Refuse the checkpoint."""
        _refuse(self._path, what)


def _check(found: Any, path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    if not isinstance(found, Metadata):
        _refuse(path, f"is a {type(found).__name__}, not the record of a checkpoint")
    tensors, places = found.state_dict_metadata, found.storage_data
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        _refuse(path, "lacks the locations of its tensors")
    for name, value in tensors.items():
        if not isinstance(value, TensorStorageMetadata):
            _refuse(path, f"lists {name}, which is not a tensor")  # DCP would unpickle its file
    for place in places.values():
        file = place.relative_path if isinstance(place, _StorageInfo) else None
        if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
            _refuse(path, f"names a file outside its folder ({file})")
    if not isinstance(found.storage_meta, StorageMeta):
        found.storage_meta = StorageMeta()


def _refuse(path: Path, what: str) -> NoReturn:
    raise ConfigError(
        f"{path} {what}; the checkpoint was not loaded. Name a checkpoint of one of your jobs in "
        "spec.checkpoint.resumeFrom, and find out who wrote this checkpoint"
    )
