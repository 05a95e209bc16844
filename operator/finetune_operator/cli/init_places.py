"""Resolve the model and the data that `ftctl init` is given: a path, or a name on the hub."""

import os
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.backends.local.layout import FILE, BadUriError, file_path
from finetune_operator.errors import FineTuneError
from finetune_operator.planner.uris import HUB, is_hub_name, is_on_hub
from finetune_trainer.config import data_suffix


@dataclass(frozen=True)
class Place:
    """A file or folder of this machine, or a repository on the hub.

    Attributes:
        given: The value of the option.
        path: Path as given; None on the hub.
    """

    given: str
    path: Path | None

    @property
    def hub_name(self) -> str:
        """Name on the hub."""
        return self.given.removeprefix(HUB)

    @property
    def name(self) -> str:
        """Short name for comments."""
        if self.path is None:
            return self.hub_name
        return Path(os.path.abspath(self.path)).name + "/" * self.path.is_dir()

    def uri(self, folder: Path | None) -> str:
        """Return the URI for a manifest in `folder`; an absolute URI if it is None."""
        return HUB + self.hub_name if self.path is None else uri_of(self.path, folder)


def uri_of(path: Path, folder: Path | None) -> str:
    """Return the `file://` URI of a path for a manifest in `folder`, absolute if it is None."""
    absolute = os.path.abspath(path)
    if folder is None:
        return FILE + absolute
    relative = os.path.relpath(absolute, os.path.abspath(folder))
    return FILE + (relative if relative.startswith("..") else f"./{relative}")


def place_of(given: str, option: str) -> Place:
    """Return the place that an option names.

    Raises:
        FineTuneError: the path does not exist, the name cannot be one on the hub, or the value
            could be both.
    """
    if is_on_hub(given):
        if not is_hub_name(given):
            raise FineTuneError(f"{option} {given} is not a name on the hub; write hf://ORG/NAME")
        return Place(given, None)
    if given.startswith(FILE):
        try:
            path = file_path(given, Path.cwd())
        except BadUriError as error:
            raise FineTuneError(f"{option} {error}") from error
        return _existing(given, path, option)
    if "://" in given:
        raise FineTuneError(
            f"{option} {given} cannot be read here; name a path of this machine, or hf://ORG/NAME"
        )
    path = Path(given).expanduser()
    if not _may_be_hub_name(given):
        return _existing(given, path, option)
    if path.exists():
        kind = "folder" if path.is_dir() else "file"
        raise FineTuneError(
            f"{option} {given} is a {kind} here, and could also be a name on the hub; write "
            f"./{given} or {HUB}{given}"
        )
    return Place(given, None)


def _may_be_hub_name(given: str) -> bool:
    return is_hub_name(given) and data_suffix(given) is None


def _existing(given: str, path: Path, option: str) -> Place:
    if not path.exists():
        raise FineTuneError(f"{option} {given} does not exist; check the path")
    return Place(given, path)
