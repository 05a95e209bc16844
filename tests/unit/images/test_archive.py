"""The reader of image archives applies whiteouts as a container engine does."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

from support.images.image_archive import open_archive

LOWER = {"old/file": "x", "folder/one": "1", "folder/two": "2", "kept": "k"}
UPPER = {"old/.wh.file": "", "folder/.wh..wh..opq": "", "folder/three": "3"}


def tar(files: dict[str, bytes]) -> bytes:
    """Return a tar archive of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_files_are_those_that_a_container_sees(tmp_path: Path) -> None:
    layers = [
        tar({f"./{name}": text.encode() for name, text in files.items()})
        for files in (LOWER, UPPER)
    ]
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = {"config": {"User": "65532:65532"}, "rootfs": {"diff_ids": digests}}
    manifest = [{"Config": "c.json", "RepoTags": ["localhost/a:1"], "Layers": ["0.tar", "1.tar"]}]
    files = {"0.tar": layers[0], "1.tar": layers[1]}
    files |= {"c.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    (tmp_path / "image.tar").write_bytes(tar(files))

    with open_archive(tmp_path / "image.tar") as image:
        found = image.files()
        contents = image.read(found)

    assert (image.name, image.id, image.layers) == ("localhost/a:1", "sha256:c", digests)
    assert image.sizes == [len(layer) for layer in layers]
    assert image.config["User"] == "65532:65532"
    assert contents == {"folder/three": b"3", "kept": b"k"}
    assert {path: file.layer for path, file in found.items()} == {"folder/three": 1, "kept": 0}
