"""Read a docker archive of `make images`: an image's configuration, layers and files."""

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class File:
    """A file of an image and the number of its layer, 0 for the lowest."""

    member: tarfile.TarInfo
    layer: int


class ImageArchive:
    """The image in an archive.

    Attributes:
        name: The image's name with its tag.
        id: Digest of the configuration, which lists the digests of all layers.
        config: User, environment, labels and command of its containers.
        layers: Digest of each uncompressed layer, the lowest first.
        sizes: Bytes of each layer.
    """

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        (manifest,) = json.load(self._open("manifest.json"))
        described = json.load(self._open(manifest["Config"]))
        self.name = str(manifest["RepoTags"][0])
        self.id = "sha256:" + str(manifest["Config"]).removesuffix(".json")
        self.config: dict[str, Any] = described["config"]
        self.layers: list[str] = described["rootfs"]["diff_ids"]
        self._paths: list[str] = manifest["Layers"]
        self.sizes = [archive.getmember(path).size for path in self._paths]

    def files(self) -> dict[str, File]:
        """Return all files that a container sees, by path without the leading slash."""
        found: dict[str, File] = {}
        for number, path in enumerate(self._paths):
            with tarfile.open(fileobj=self._open(path), mode="r:") as layer:
                for member in layer:
                    _add(found, File(member, number))
        return found

    def read(self, files: dict[str, File]) -> dict[str, bytes]:
        """Return the contents of files; each layer is opened once."""
        contents: dict[str, bytes] = {}
        for number, path in enumerate(self._paths):
            with tarfile.open(fileobj=self._open(path), mode="r:") as layer:
                for name, file in files.items():
                    if file.layer == number and (content := layer.extractfile(file.member)):
                        contents[name] = content.read()
        return contents

    def _open(self, path: str) -> IO[bytes]:
        content = self._archive.extractfile(path)
        assert content is not None
        return content


@contextmanager
def open_archive(path: Path) -> Iterator[ImageArchive]:
    """Open an archive."""
    with tarfile.open(path, "r:") as archive:
        yield ImageArchive(archive)


def _add(found: dict[str, File], file: File) -> None:
    """Add a file of the next layer, or apply its whiteout."""
    path = file.member.name.removeprefix("./").strip("/")
    folder, _, name = path.rpartition("/")
    if not name.startswith(".wh."):
        if path:  # not the root folder
            found[path] = file
        return
    is_opaque = name == ".wh..wh..opq"
    removed = folder if is_opaque else f"{folder}/{name.removeprefix('.wh.')}".strip("/")
    if not is_opaque:
        found.pop(removed, None)
    for below in [one for one in found if one.startswith(f"{removed}/")]:
        del found[below]
