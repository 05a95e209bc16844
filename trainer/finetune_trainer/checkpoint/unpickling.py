"""Read DCP's record of where each tensor lies: a pickle, of which only an allow-list is built.

`shards` calls it before anything else of a checkpoint is read. A pickle may name any function of
any module and have it called; a folder may come from anybody who may write to a shared volume, and
hashes in a manifest say that files belong together and not whose they are. What is not named below
is refused, before it is even imported.
"""

import pickle
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA_FILE = ".metadata"  # which tensor lies where; DCP's name

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
    ("torch.serialization", "_get_layout"),  # returns one of torch's layouts by its name
}
# Where the checkpoint was written; the name of the module differs by Python's version.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


def read_metadata(folder: Path) -> "Metadata":
    """Return DCP's record of the checkpoint in `folder`.

    Raises:
        ConfigError: it names something that a record of ours never does, holds values other than
            tensors, or a file outside the folder; nothing of it has been called.
        OSError: it cannot be opened.
    """
    path = folder / METADATA_FILE
    before = _state_of_classes()
    with path.open("rb") as stream:
        try:
            found = _Unpickler(stream, path).load()
        except (ConfigError, OSError):
            raise
        except Exception as error:  # a pickle that is none fails in any way
            _refuse(path, f"cannot be read ({type(error).__name__}: {error})")
    if _state_of_classes() != before:
        _refuse(path, "changes the classes that it is made of")
    _check(found, path)
    metadata: Metadata = found
    return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names, if it is one of the few things a record is made of."""
        import torch

        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return lambda *parts: "/".join(parts)  # nobody asks for more
        if (module, name) == ("builtins", "getattr"):
            return lambda kind, member: self._member(kind, member)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        _refuse(self._path, f"names {module}.{name}, which no checkpoint of ours does")

    def _member(self, kind: Any, name: Any) -> Any:
        """Return a member of an enumeration: Python 3.11.0 to 3.11.3 ask getattr for it."""
        if isinstance(kind, EnumMeta) and name in kind.__members__:
            return kind[name]
        _refuse(self._path, "asks for an attribute, which no checkpoint of ours does")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse what lies outside the pickle."""
        _refuse(self._path, "names something outside itself")


def _state_of_classes() -> list[tuple[str, int]]:
    """Return which attribute of each allowed class is which object: a pickle can set them."""
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
        _refuse(path, "does not say which tensor lies where")
    for name, value in tensors.items():
        if not isinstance(value, TensorStorageMetadata):
            _refuse(path, f"says that {name} is no tensor")  # DCP would unpickle its file
    for place in places.values():
        file = place.relative_path if isinstance(place, _StorageInfo) else None
        if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
            _refuse(path, f"names a file outside its folder ({file})")
    if not isinstance(found.storage_meta, StorageMeta):
        found.storage_meta = StorageMeta()


def _refuse(path: Path, what: str) -> NoReturn:
    raise ConfigError(
        f"{path} {what}, so nothing of this checkpoint is loaded; name a checkpoint that a job of "
        "yours has written in spec.checkpoint.resumeFrom, and find out who has written this one"
    )
