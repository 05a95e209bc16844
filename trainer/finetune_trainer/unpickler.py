"""Unpickle data that anyone may have written, with an allow-list of names.

A pickle may call any function of any module. `checkpoint` reads DCP's record of tensor locations
with this class, and `peer_objects` the objects of other ranks. Any name that is not in the list is
refused before its module is imported.
"""

import pickle
from abc import ABC, abstractmethod
from enum import EnumMeta
from functools import cache
from importlib import import_module
from operator import is_
from typing import Any, ClassVar, NoReturn

from finetune_trainer.errors import TrainerError

DCP = "torch.distributed.checkpoint."
# Names in DCP's record of tensor locations, which rank 0 also sends to the others after a save.
RECORD = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # returns a layout of torch by its name
        (f"{DCP}filesystem", "_StorageInfo"),
        (f"{DCP}metadata", "ChunkStorageMetadata"),
        (f"{DCP}metadata", "Metadata"),
        (f"{DCP}metadata", "MetadataIndex"),
        (f"{DCP}metadata", "StorageMeta"),
        (f"{DCP}metadata", "TensorProperties"),
        (f"{DCP}metadata", "TensorStorageMetadata"),
        (f"{DCP}metadata", "_MEM_FORMAT_ENCODING"),
    }
)
# The folder that the checkpoint was written to; the module depends on the version of Python.
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}


class SafeUnpickler(pickle.Unpickler, ABC):
    """Unpickles objects of the names in `allowed`, and dtypes of torch; paths become strings."""

    allowed: ClassVar[frozenset[tuple[str, str]]]

    @abstractmethod
    def refuse(self, what: str) -> NoReturn:
        """Raise an error about this pickle; `what` is the predicate of its sentence."""

    def load(self) -> Any:
        """Return the unpickled object.

        Raises:
            TrainerError: the pickle is invalid or was refused; none of its code was called.
            OSError: the stream cannot be read.
        """
        before = _attributes(self.allowed)
        try:
            found = super().load()
        except (TrainerError, OSError):
            raise
        except Exception as error:  # an invalid pickle can raise any error
            self.refuse(f"cannot be read ({type(error).__name__}: {error})")
        after = _attributes(self.allowed)
        if len(after) != len(before) or not all(map(is_, before, after)):
            self.refuse("changes the classes of its own objects")
        return found

    def find_class(self, module: str, name: str) -> Any:
        """Return the named object if it is allowed."""
        import torch

        if (module, name) in self.allowed:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return lambda *parts: "/".join(parts)  # the path itself is not used
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        self.refuse(f"names {module}.{name}, which is not allowed")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse an object that is stored outside the pickle."""
        self.refuse("refers to an object outside the pickle")

    def _member(self, kind: Any, name: Any) -> Any:
        """Return a member of an enumeration: Python 3.11.0 to 3.11.3 pickle it as a getattr."""
        if isinstance(kind, EnumMeta) and name in kind.__members__:
            return kind[name]
        self.refuse("reads an attribute, which is not allowed")


def _attributes(allowed: frozenset[tuple[str, str]]) -> list[Any]:
    """Return each attribute of the allowed classes: a pickle can set them."""
    return [value for thing in _things(allowed) for value in vars(thing).values()]


@cache
def _things(allowed: frozenset[tuple[str, str]]) -> list[Any]:
    """Return the allowed classes and functions, and the members of enumerations."""
    things: list[Any] = [getattr(import_module(module), name) for module, name in allowed]
    for thing in [*things]:
        things += thing if isinstance(thing, EnumMeta) else ()
    return things
