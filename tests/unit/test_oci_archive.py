"""Archives of images, and the list of packages, made of a small image of two layers."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from engines import LAYER, as_layout
from oci_archive import opened, opened_if_whole, pack
from sbom import document

SITE = "opt/x/lib/python3.11/site-packages"
STATUS = (
    "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u1\n\n"
    "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
)
LOWER = {
    f"{SITE}/Some_Thing-1.0.dist-info/METADATA": "Name: Some_Thing\nVersion: 1.0\nLicense: MIT\n",
    "var/lib/dpkg/status": STATUS,
    "etc/os-release": 'ID=debian\nVERSION_ID="12"\n',
    "old/file": "x",
    "folder/one": "1",
    "folder/two": "2",
}
UPPER = {
    "old/.wh.file": "",
    "folder/.wh..wh..opq": "",
    "folder/three": "3",
    f"{SITE}/other-2.dist-info/METADATA": "Name: other\nVersion: 2\n",
}


def layer(files: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def described_as(content: bytes) -> dict[str, Any]:
    return {"digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """An OCI layout with the image."""
    blobs = tmp_path / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content), "mediaType": "x"}

    config = {"architecture": "amd64", "config": {"User": "65532:65532"}}
    manifest = {
        "config": add(json.dumps(config).encode()),
        "layers": [add(layer(one)) for one in (LOWER, UPPER)],
    }
    described = add(json.dumps(manifest).encode())
    index = {"schemaVersion": 2, "manifests": [described]}
    (blobs.parents[1] / "index.json").write_text(json.dumps(index))
    return blobs.parents[1]


@pytest.fixture
def archive(layout: Path, tmp_path: Path) -> Path:
    """Its archive."""
    made = tmp_path / "image.tar"
    pack(layout, "localhost/an/image:1.2", made)
    return made


def test_the_same_image_gives_the_same_archive(layout: Path, archive: Path, tmp_path: Path) -> None:
    digest = pack(layout, "localhost/an/image:1.2", tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    with opened(archive) as image:
        assert image.digest == digest


def test_layers_that_the_layout_lacks_come_from_the_archive_before(
    layout: Path, archive: Path, tmp_path: Path
) -> None:
    whole = archive.read_bytes()
    with opened_if_whole(archive) as before:
        assert before is not None
        (layout / "blobs" / before.digests[0].replace(":", "/")).unlink()
        digest = pack(layout, "localhost/an/image:1.2", archive, before)
    assert digest == before.digest
    assert archive.read_bytes() == whole


def test_a_layer_that_was_damaged_in_the_archive_before_is_packed_into_no_other(
    layout: Path, archive: Path
) -> None:
    archive.write_bytes(archive.read_bytes().replace(b"License: MIT", b"License: GPL"))
    damaged = archive.read_bytes()
    with opened_if_whole(archive) as before:
        assert before is not None
        (layout / "blobs" / before.digests[0].replace(":", "/")).unlink()
        with pytest.raises(tarfile.ReadError, match=f"should be {before.digests[0]} is something"):
            pack(layout, "localhost/an/image:1.2", archive, before)
    assert archive.read_bytes() == damaged


def test_an_archive_of_which_only_a_part_is_there_is_none(archive: Path, tmp_path: Path) -> None:
    with opened_if_whole(tmp_path / "no.tar") as found:
        assert found is None
    for size in (archive.stat().st_size // 2, 700, 0):
        os.truncate(archive, size)
        with opened_if_whole(archive) as found:
            assert found is None


def test_a_layout_whose_new_layer_is_compressed_is_the_same_image(tmp_path: Path) -> None:
    """buildah compresses layers in a layout, and leaves them as they are in a plain folder."""
    made = []
    for kind in ("plain", "layout"):
        given = tmp_path / kind
        blobs = given if kind == "plain" else given / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers, digests = [], []
        for number, files in enumerate((LOWER, UPPER)):
            content = layer(files)
            digests.append(f"sha256:{hashlib.sha256(content).hexdigest()}")
            is_compressed = kind == "layout" and number == 1
            written = gzip.compress(content) if is_compressed else content
            described = {"mediaType": "compressed" if is_compressed else LAYER}
            layers.append(described | described_as(written))
            if number == 1 or kind == "plain":  # the layout does not have the lower one
                (blobs / layers[-1]["digest"].partition(":")[2]).write_bytes(written)
        history = [{"comment": f"FROM {kind}"}]
        config = json.dumps({"rootfs": {"diff_ids": digests}, "history": history}).encode()
        (blobs / hashlib.sha256(config).hexdigest()).write_bytes(config)
        about = {"mediaType": "manifest", "config": {"mediaType": "c", **described_as(config)}}
        manifest = json.dumps({**about, "layers": layers}).encode()
        if kind == "plain":
            (given / "manifest.json").write_bytes(manifest)
        else:
            (blobs / hashlib.sha256(manifest).hexdigest()).write_bytes(manifest)
            (given / "index.json").write_text(json.dumps({"manifests": [described_as(manifest)]}))
        as_layout(given, tmp_path / f"made of {kind}")
        made.append(tmp_path / f"made of {kind}")
    assert (made[0] / "index.json").read_bytes() == (made[1] / "index.json").read_bytes()
    blobs_of = [{one.name for one in (folder / "blobs/sha256").iterdir()} for folder in made]
    assert blobs_of[0] - blobs_of[1] == {hashlib.sha256(layer(LOWER)).hexdigest()}
    for one in made[1].glob("blobs/sha256/*"):
        assert hashlib.sha256(one.read_bytes()).hexdigest() == one.name


def test_docker_before_25_and_containerd_find_the_name_in_it(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        index, docker = (json.load(packed.extractfile(one) or io.BytesIO()) for one in FILES)
        names = set(packed.getnames())
    assert docker[0]["RepoTags"] == ["localhost/an/image:1.2"]
    assert {docker[0]["Config"], *docker[0]["Layers"]} <= names
    said = index["manifests"][0]["annotations"]
    assert said["io.containerd.image.name"] == "localhost/an/image:1.2"


FILES = ("index.json", "manifest.json")


def test_a_file_of_a_lower_layer_that_an_upper_one_took_away_is_not_there(archive: Path) -> None:
    with opened(archive) as image:
        files = image.files()
        assert "old/file" not in files
        assert {path for path in files if path.startswith("folder/")} == {"folder/three"}
        assert files["folder/three"].layer == 1
        assert image.read({"x": files["folder/three"]}) == {"x": b"3"}
        assert image.config["User"] == "65532:65532"


def test_the_list_of_packages_names_those_of_python_and_of_debian(archive: Path) -> None:
    with opened(archive) as image:
        text = document(image, "2026-01-31T12:00:00Z")
        assert document(image, "2026-01-31T12:00:00Z") == text
        digest = image.digest
    made = json.loads(text)
    assert [one["purl"] for one in made["components"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u1?arch=amd64&distro=debian-12",
        "pkg:pypi/other@2",
        "pkg:pypi/some-thing@1.0",
    ]
    assert made["components"][2]["licenses"] == [{"license": {"name": "MIT"}}]
    about = made["metadata"]["component"]
    assert (about["name"], about["version"]) == ("localhost/an/image", "1.2")
    assert about["hashes"][0]["content"] == digest.removeprefix("sha256:")
