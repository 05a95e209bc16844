"""Unpickle DCP's record of tensor locations with an allow-list of classes.

`shards` calls it before it reads any other file of a checkpoint. A pickle may call any function of
any module. A folder may come from any user with write access to a shared volume, and the hashes in
a manifest show that files belong together, but not who wrote them. Any name that is not in the
list below is refused before its module is imported.
"""

import pickle
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"  # locations of the tensors; DCP's name

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    (f"{_DCP}filesystem", "_StorageInfo"),
    (f"{_DCP}metadata", "ChunkStorageMetadata"),
    (f"{_DCP}metadata", "Metadata"),
    (f"{_DCP}metadata", "MetadataIndex"),
    (f"{_DCP}metadata", "StorageMeta"),
    (f"{_DCP}metadata", "TensorProperties"),
    (f"{_DCP}metadata", "TensorStorageMetadata"),
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # returns a layout of torch by its name
}
# The folder that the checkpoint was written to; the module depends on the version of Python.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


def read_metadata(folder: Path) -> "Metadata":
    """Return DCP's record of the checkpoint in `folder`.

    Raises:
        ConfigError: the record uses a name that is not allowed, has values other than tensors, or
            refers to a file outside the folder; none of its code was called.
        OSError: the file cannot be opened.
    """
    path = folder / METADATA_FILE
    before = _state_of_classes()
    with path.open("rb") as stream:
        try:
            found = _Unpickler(stream, path).load()
        except (ConfigError, OSError):
            raise
        except Exception as error:  # an invalid pickle can raise any error
            _refuse(path, f"cannot be read ({type(error).__name__}: {error})")
    if _state_of_classes() != before:
        _refuse(path, "changes the classes of its own objects")
    _check(found, path)
    metadata: Metadata = found
    return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the named object if the allow-list contains it."""
        import torch

        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return lambda *parts: "/".join(parts)  # the path itself is not used
        if (module, name) == ("builtins", "getattr"):
            return lambda kind, member: self._member(kind, member)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        _refuse(self._path, f"names {module}.{name}, which is not allowed in a checkpoint")

    def _member(self, kind: Any, name: Any) -> Any:
        """Return a member of an enumeration: Python 3.11.0 to 3.11.3 pickle it as a getattr."""
        if isinstance(kind, EnumMeta) and name in kind.__members__:
            return kind[name]
        _refuse(self._path, "reads an attribute, which is not allowed in a checkpoint")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse an object that is stored outside the pickle."""
        _refuse(self._path, "refers to an object outside the pickle")


def _state_of_classes() -> list[tuple[str, int]]:
    """Return the identity of each attribute of the allowed classes: a pickle can set attributes."""
    things: list[Any] = [getattr(import_module(module), name) for module, name in sorted(_ALLOWED)]
    for thing in [*things]:
        things += thing if isinstance(thing, EnumMeta) else ()
    return [(name, id(value)) for thing in things for name, value in sorted(vars(thing).items())]


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
