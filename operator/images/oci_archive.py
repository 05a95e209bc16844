"""OCI images as files: packs a layout into one archive, and reads what an image holds.

docker, podman, `kind load image-archive` and containerd load the archive. The same layout and name
give the same bytes.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

INDEX = "index.json"
_DOCKER = "manifest.json"  # for docker before 25, which knows no OCI layout


def pack(layout: Path, name: str, archive: Path, before: "Image | None" = None) -> str:
    """Write the archive of a layout with one image; return the image's digest.

    Args:
        layout: A folder with `index.json` and `blobs`.
        name: Under which it is loaded.
        archive: The file to write, at once when all of it is there.
        before: An image that has the blobs which the layout has not; it may be of this archive.

    Raises:
        tarfile.ReadError: a blob is not what its digest says.
    """
    index = json.loads((layout / INDEX).read_bytes())
    (manifest,) = index["manifests"]
    about = json.loads(_blob(layout, manifest["digest"]).read_bytes())
    tag = name.rpartition(":")[2]
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag}
    manifest = {key: manifest[key] for key in ("mediaType", "digest", "size")}
    index = {"schemaVersion": 2, "manifests": [{**manifest, "annotations": names}]}
    layers = [_path(one["digest"]) for one in about["layers"]]
    docker = [{"Config": _path(about["config"]["digest"]), "RepoTags": [name], "Layers": layers}]
    new = archive.with_suffix(".new")
    with tarfile.open(new, "w", format=tarfile.USTAR_FORMAT) as packed:
        for file, value in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), (INDEX, index)):
            _add(packed, file, io.BytesIO(json.dumps(value).encode()))
        _add(packed, _DOCKER, io.BytesIO(json.dumps(docker).encode()))
        digests = [manifest["digest"], about["config"]["digest"]]
        for digest in dict.fromkeys([*digests, *(one["digest"] for one in about["layers"])]):
            path = _blob(layout, digest)
            blob = path.open("rb") if before is None or path.exists() else before.blob(digest)
            with blob:
                if _add(packed, _path(digest), blob) != digest:
                    raise tarfile.ReadError(f"what should be {digest} is something else")
    new.replace(archive)
    return str(manifest["digest"])


@dataclass(frozen=True)
class File:
    """A file of an image.

    Attributes:
        layer: Which layer it is in, from 0, the lowest.
    """

    member: tarfile.TarInfo
    layer: int


class Image:
    """An image in an archive of `pack`.

    Attributes:
        digest: Of its manifest.
        name: Under which it is loaded.
        config: What the image says of itself: user, environment, labels, command.
        layers: Bytes of each layer, from the lowest.
        digests: Of each layer.
    """

    def __init__(self, archive: "tarfile.TarFile") -> None:
        self._archive = archive
        (described,) = json.loads(self._read(INDEX))["manifests"]
        self.digest = str(described["digest"])
        self.name = str(described["annotations"]["io.containerd.image.name"])
        manifest = json.loads(self._read(_path(self.digest)))
        self.digests = [str(one["digest"]) for one in manifest["layers"]]
        self.layers = [int(one["size"]) for one in manifest["layers"]]
        described = json.loads(self._read(_path(manifest["config"]["digest"])))
        self.config: dict[str, Any] = described["config"]
        self.architecture = str(described["architecture"])

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each layer by its digest."""
        return dict(zip(self.digests, self.layers, strict=True))

    def files(self) -> dict[str, File]:
        """Return every file that a container sees, by its path without the first slash."""
        found: dict[str, File] = {}
        for number in range(len(self.digests)):
            with self.layer(number) as layer:
                for member in layer:
                    path = member.name.removeprefix("./").strip("/")
                    folder, _, name = path.rpartition("/")
                    if name == ".wh..wh..opq":
                        _forget(found, folder + "/")
                    elif name.startswith(".wh."):
                        gone = f"{folder}/{name.removeprefix('.wh.')}".strip("/")
                        found.pop(gone, None)
                        _forget(found, gone + "/")
                    elif path:
                        found[path] = File(member, number)
        return found

    @contextmanager
    def layer(self, number: int) -> Iterator[tarfile.TarFile]:
        """Open a layer, to read files that `files` found in it."""
        with self.blob(self.digests[number]) as blob, tarfile.open(fileobj=blob) as layer:
            yield layer

    def read(self, files: dict[str, File]) -> dict[str, bytes]:
        """Return the contents of some files; each layer is opened once."""
        found: dict[str, bytes] = {}
        for number in sorted({one.layer for one in files.values()}):
            with self.layer(number) as layer:
                for path, file in files.items():
                    if file.layer == number and (content := layer.extractfile(file.member)):
                        found[path] = content.read()
        return found

    def blob(self, digest: str) -> IO[bytes]:
        """Open a layer, or what else has a digest."""
        blob = self._archive.extractfile(_path(digest))
        assert blob is not None
        return blob

    def _read(self, path: str) -> bytes:
        blob = self._archive.extractfile(path)
        assert blob is not None
        return blob.read()


@contextmanager
def opened(archive: Path) -> Iterator[Image]:
    """Open an archive of `pack`."""
    with tarfile.open(archive, "r:") as packed:
        yield Image(packed)


@contextmanager
def opened_if_whole(archive: Path) -> Iterator[Image | None]:
    """Open an archive; None where it is not there, or only a part of it is."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(opened(archive))
        except (FileNotFoundError, KeyError, tarfile.ReadError):
            found = None
        yield found


def _forget(found: dict[str, File], below: str) -> None:
    for path in [one for one in found if one.startswith(below)]:
        del found[path]


class _Summed:
    """What is read of a file, and its digest so far."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._sum = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        found = self._content.read(size)
        self._sum.update(found)
        return found

    @property
    def digest(self) -> str:
        return f"sha256:{self._sum.hexdigest()}"


def _add(packed: tarfile.TarFile, name: str, content: IO[bytes]) -> str:
    """Add a file; return the digest of what was read."""
    member = tarfile.TarInfo(name)
    member.size = content.seek(0, io.SEEK_END)
    content.seek(0)
    packed.copybufsize = 1 << 20  # type: ignore[attr-defined] # 16 KiB by default; layers are GB
    summed = _Summed(content)
    packed.addfile(member, summed)
    return summed.digest


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _blob(layout: Path, digest: str) -> Path:
    return layout / _path(digest)
