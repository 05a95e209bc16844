"""docker, podman and buildah as one: what builds an image, exports it, pushes it and runs it.

An image is exported as an OCI layout, a folder that `oci_archive` packs. Layers get one fixed time,
so that the same sources give the same bytes.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# 1980, the oldest that every archive format can hold. The time of a commit stands in a label: in
# the layers it would make all of them new with each commit.
EPOCH = "315532800"
NAMES = ("docker", "podman", "buildah")
LOCAL = "localhost"
BLOBS = Path("blobs", "sha256")
LAYER = "application/vnd.oci.image.layer.v1.tar"


class EngineError(Exception):
    """There is no engine, or what it ran failed; the message says what to do."""


@dataclass(frozen=True)
class Build:
    """What an image is built from.

    Attributes:
        dockerfile: Below `context`.
        name: With its tag.
        platforms: Such as linux/arm64, where it is to be pushed for several.
        secrets: Files by the name that the Dockerfile gives them.
        wheels: A folder with wheels, or None.
        mounted_stage: The stage that other stages mount.
    """

    context: Path
    dockerfile: str
    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    wheels: Path | None = None
    platforms: Sequence[str] = ()
    mounted_stage: str = ""

    def options(self) -> list[str]:
        """Return what every engine understands."""
        made = ["--file", str(self.context / self.dockerfile)]
        for option, pairs in (("--build-arg", self.arguments), ("--label", self.labels)):
            for key, value in pairs.items():
                made += [option, f"{key}={value}"]
        for key, path in self.secrets.items():
            made += ["--secret", f"id={key},src={path}"]
        if self.wheels is not None:
            made += ["--build-context", f"wheels={self.wheels}"]
        return made


class Engine:
    """One of the three; `find` chooses it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, build: Build, *, cached: bool = True) -> None:
        """Build the image and keep it under its name.

        Raises:
            EngineError: it failed; what it printed says why.
        """
        fresh = [] if cached else ["--no-cache"]
        if self.name == "docker":
            options = ["--output", "type=docker", "--tag", build.name, *fresh, *build.options()]
            epoch = ["--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}"]
            self._run("buildx", "build", *epoch, *options, str(build.context))
            return
        isolation = ["--isolation", "chroot"] if self.name == "buildah" else []
        options = ["--timestamp", EPOCH, "--layers", *isolation, *fresh, *build.options()]
        if build.mounted_stage:
            # buildah 1.28 cannot mount a stage that it found in its cache; an image it can.
            image = (
                f"{LOCAL}/{build.mounted_stage}:{build.name.rpartition('/')[2].partition(':')[0]}"
            )
            stage = ["--target", build.mounted_stage, "--tag", image]
            self._run("build", *options, *stage, str(build.context))
            options += ["--build-context", f"{build.mounted_stage}=container-image://{image}"]
        self._run("build", *options, "--tag", build.name, str(build.context))

    def export(self, build: Build, folder: Path, known: Mapping[str, int] | None = None) -> None:
        """Write the image that was built as an OCI layout.

        Args:
            build: What it was built from.
            folder: The layout.
            known: Bytes by digest of layers that the layout need not have.

        Raises:
            EngineError: it failed.
        """
        shutil.rmtree(folder, ignore_errors=True)
        if self.name == "docker":  # all its layers are in the cache
            folder.mkdir(parents=True)
            packed = folder.with_suffix(".oci")
            output = f"type=oci,dest={packed},rewrite-timestamp=true,compression=uncompressed"
            epoch = ["--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}"]
            options = ["--output", output, "--provenance=false", *build.options()]
            self._run("buildx", "build", *epoch, *options, str(build.context))
            subprocess.run(["tar", "-xf", packed, "-C", folder], check=True)
            packed.unlink()
            return
        plain = folder.with_suffix(".plain")
        shutil.rmtree(plain, ignore_errors=True)
        uncompressed = (
            ["--disable-compression"] if self.name == "buildah" else []
        )  # podman's default
        options = ["--quiet", "--format", "oci", *uncompressed]
        lower = self._layers(build.name)[:-1]
        if known and set(lower) <= set(known):
            # A layer is not written where a file has its name, which takes seconds a gigabyte.
            blobs = plain / BLOBS
            blobs.mkdir(parents=True)
            for digest in lower:
                (blobs / _hexadecimal(digest)).touch()
                os.truncate(blobs / _hexadecimal(digest), known[digest])
            self._run("push", *options, build.name, f"oci:{plain}:latest")
            for digest in lower:
                (blobs / _hexadecimal(digest)).unlink(missing_ok=True)
        else:
            # This format alone leaves layers as they are: compressing gigabytes takes minutes.
            self._run("push", *options, build.name, f"dir:{plain}")
        as_layout(plain, folder)

    def _layers(self, image: str) -> list[str]:
        """Return the digests of an image's layers from the lowest, before they are compressed."""
        command = [self.name, "inspect", "--type=image", image]
        said = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        found = (
            said["OCIv1"]["rootfs"]["diff_ids"]
            if self.name == "buildah"
            else (said[0]["RootFS"]["Layers"])
        )
        return list(map(str, found))

    def push(self, build: Build, digest: Path) -> None:
        """Push the image that was built, and write its digest to a file.

        Raises:
            EngineError: it failed, or this engine cannot make it for several platforms.
        """
        if self.name == "docker":
            output = f"type=registry,name={build.name},rewrite-timestamp=true"
            epoch = ["--build-arg", f"SOURCE_DATE_EPOCH={EPOCH}"]
            options = ["--output", output, "--iidfile", str(digest), *build.options()]
            if build.platforms:
                options += ["--platform", ",".join(build.platforms)]
            self._run("buildx", "build", *epoch, *options, str(build.context))
            return
        if build.platforms:
            raise EngineError(
                f"{self.name} builds for this machine's platform alone here; for "
                f"{','.join(build.platforms)} use ENGINE=docker"
            )
        self._run("push", "--digestfile", str(digest), build.name, f"docker://{build.name}")

    def has(self, image: str) -> bool:
        """Say whether an image is here, pulling it where a registry has it."""
        return self.holds(image) or self._works("pull", "--quiet", image)

    def holds(self, image: str) -> bool:
        """Say whether an image is here, without asking a registry."""
        return self._works("inspect", "--type=image", image)

    def load_root(self, archive: Path, name: str) -> None:
        """Make an image of one layer from the files of a tar archive.

        Raises:
            EngineError: it failed.
        """
        dockerfile = archive.with_suffix(".Dockerfile")
        dockerfile.write_text(f"FROM scratch\nADD {archive.name} /\n", encoding="utf-8")
        self.build(Build(archive.parent, dockerfile.name, name))

    def _works(self, *arguments: str) -> bool:
        done = subprocess.run([self.name, *arguments], capture_output=True)
        return done.returncode == 0

    def _run(self, *arguments: str) -> None:
        # What it prints belongs to what people watch, not to what a program reads.
        done = subprocess.run([self.name, *arguments], stdout=sys.stderr)
        if done.returncode:
            raise EngineError(
                f"{self.name} {arguments[0]} failed (exit {done.returncode}); see above"
            )


def as_layout(plain: Path, folder: Path) -> None:
    """Move an image from what buildah wrote, a folder of blobs or a layout, into an OCI layout.

    It forgets which images of this machine were in between, as those differ with what was cached,
    and no layer stays compressed. A layer that is not there is missing in the layout as well.
    """
    blobs = folder / BLOBS
    blobs.mkdir(parents=True)
    index = plain / "index.json"
    given = plain / BLOBS if index.exists() else plain

    def add(value: Mapping[str, Any], kind: str) -> dict[str, Any]:
        content = json.dumps(value).encode()
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    def read(described: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((given / _hexadecimal(described["digest"])).read_bytes())
        return found

    if index.exists():
        manifest = read(json.loads(index.read_bytes())["manifests"][0])
    else:
        manifest = json.loads((plain / "manifest.json").read_bytes())
    config = read(manifest["config"])
    for step in config["history"]:
        step.pop("comment", None)
    for layer, digest in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        blob, uncompressed = given / _hexadecimal(layer["digest"]), blobs / _hexadecimal(digest)
        if layer["digest"] != digest:
            with gzip.open(blob) as compressed, uncompressed.open("wb") as plainly:
                shutil.copyfileobj(compressed, plainly, 1 << 20)
            layer["size"] = uncompressed.stat().st_size
        elif blob.exists():  # two layers may be the same
            blob.rename(uncompressed)
        layer |= {"mediaType": LAYER, "digest": digest}
    manifest["config"] = add(config, manifest["config"]["mediaType"])
    manifest.pop("annotations", None)
    made = {"schemaVersion": 2, "manifests": [add(manifest, manifest["mediaType"])]}
    (folder / "index.json").write_text(json.dumps(made), encoding="utf-8")
    shutil.rmtree(plain)


def _hexadecimal(digest: str) -> str:
    return str(digest).removeprefix("sha256:")


def find(wanted: str = "") -> Engine:
    """Return the engine asked for, or the first of the three that works.

    Raises:
        EngineError: there is none.
    """
    if wanted and wanted not in NAMES:
        raise EngineError(f"ENGINE={wanted} is none of {', '.join(NAMES)}")
    said = []
    for name in [wanted] if wanted else NAMES:
        if shutil.which(name) is None:
            said.append(f"{name} is not on the PATH")
            continue
        # docker alone needs a daemon, and the plugin that mounts secrets.
        asked = ["buildx", "inspect"] if name == "docker" else ["version"]
        done = subprocess.run([name, *asked], capture_output=True, text=True)
        if done.returncode == 0:
            return Engine(name)
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        said.append(f"{name} {' '.join(asked)} says: {last}")
    raise EngineError(
        f"no image can be built: {'; '.join(said)}. Install one of {', '.join(NAMES)}; "
        "on Debian: apt-get install buildah"
    )
