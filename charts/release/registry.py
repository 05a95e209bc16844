"""Images and the chart in a registry, by the programs that know how: skopeo, buildah, helm, cosign.

Who may push was said before by `docker login`, whose file all four read.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from release.version import ReleaseError


@dataclass(frozen=True)
class Pushed:
    """What a registry holds.

    Attributes:
        name: With the registry, without a tag.
        digest: Such as sha256:….
    """

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


def run(*command: str) -> str:
    """Run a program, which must succeed, show how, and return what it says.

    Raises:
        ReleaseError: It failed; what it said is above.
    """
    print("+", *command, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise ReleaseError(f"{command[0]} {command[1]} ended with {done.returncode}; see above")
    return done.stdout


def push_image(archive: Path, name: str, tag: str) -> Pushed:
    """Push the image of an OCI archive."""
    digest = archive.with_suffix(".digest")
    source, target = f"oci-archive:{archive}", f"docker://{name}:{tag}"
    run("skopeo", "copy", "--digestfile", str(digest), source, target)
    return Pushed(name, digest.read_text().strip())


def join_images(images: Sequence[Pushed], tag: str, folder: Path) -> Pushed:
    """Push one image of several, each for another architecture."""
    name = images[0].name
    listed = f"{name.rpartition('/')[2]}-{tag}-{os.getpid()}"  # buildah keeps it
    digest = folder / f"{listed}.digest"
    run("buildah", "manifest", "create", listed, *(f"docker://{one}" for one in images))
    how = ("--all", "--format", "oci", "--digestfile", str(digest))
    run("buildah", "manifest", "push", *how, listed, f"docker://{name}:{tag}")
    return Pushed(name, digest.read_text().strip())


def push_chart(package: Path, folder: str) -> Pushed:
    """Push a packaged chart below a folder of the registry."""
    said = run("helm", "push", str(package), f"oci://{folder}")
    digest = re.search(r"^Digest: (sha256:[0-9a-f]{64})$", said, re.MULTILINE)
    if digest is None:
        raise ReleaseError("helm push named no digest; see above")
    name, _, _ = package.stem.rpartition("-")
    return Pushed(f"{folder}/{name}", digest[1])


def sign(pushed: Pushed) -> None:
    """Sign what was pushed, with all it holds, by the identity of the job that runs this."""
    run("cosign", "sign", "--yes", "--recursive", str(pushed))


def attest(pushed: Pushed, sbom: Path) -> None:
    """Say, signed in the same way, what an image is made of."""
    predicate = ("--type", "cyclonedx", "--predicate", str(sbom))
    run("cosign", "attest", "--yes", *predicate, str(pushed))
