"""Push, join and sign images and the chart with docker buildx, helm and cosign.

`docker login` has authenticated the machine before; all three programs read docker's credentials.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from release.version import ReleaseError

DIGEST = r"sha256:[0-9a-f]{64}"


@dataclass(frozen=True)
class Pushed:
    """An image or chart in a registry.

    Attributes:
        name: Name with the registry, without a tag.
        digest: Digest of its manifest or index, `sha256:…`.
    """

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.digest}"


def run(*command: str) -> str:
    """Print and run a command, print its output and return it.

    Raises:
        ReleaseError: The command has failed.
    """
    print("+", *command, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise ReleaseError(f"{command[0]} {command[1]} failed (exit {done.returncode}); see above")
    return done.stdout


def push_images(
    tags: Mapping[str, str], architecture: str, labels: Mapping[str, str], folder: Path
) -> dict[str, Pushed]:
    """Build targets of docker-bake.json and push each with an SBOM and its provenance.

    Args:
        tags: Name with tag to push to, by target.
        architecture: Architecture of this machine, such as amd64.
        labels: Labels besides the labels in docker-bake.json.
        folder: Where docker writes the digests.

    Returns:
        Index of each image and its attestations, by target.
    """
    # docker's default driver cannot store attestations.
    run("docker", "buildx", "create", "--use", "--driver", "docker-container")
    metadata = folder / "metadata.json"
    settings = [f"*.platform=linux/{architecture}"]
    settings += [f"*.labels.{key}={value}" for key, value in labels.items()]
    settings += [f"{target}.tags={tag}" for target, tag in tags.items()]
    options = [word for one in settings for word in ("--set", one)]
    attestations = ("--sbom=true", "--provenance=mode=max")
    command = ["docker", "buildx", "bake", "--push", *attestations, *options]
    run(*command, "--metadata-file", str(metadata), *tags)
    written = json.loads(metadata.read_text(encoding="utf-8"))
    return {
        target: Pushed(tag.rpartition(":")[0], written[target]["containerimage.digest"])
        for target, tag in tags.items()
    }


def join_images(images: Sequence[Pushed], tag: str) -> Pushed:
    """Push one index with the images and attestations of all architectures."""
    name = images[0].name
    target = f"{name}:{tag}"
    run("docker", "buildx", "imagetools", "create", "--tag", target, *map(str, images))
    inspected = run(
        "docker", "buildx", "imagetools", "inspect", target, "--format={{json .Manifest}}"
    )
    # The first digest is the index's own; the digests of its manifests follow.
    digest = re.search(rf'"digest": ?"({DIGEST})"', inspected)
    if digest is None:
        raise ReleaseError(
            f"docker buildx imagetools inspect printed no digest of {target}; see above"
        )
    return Pushed(name, digest[1])


def push_chart(package: Path, folder: str) -> Pushed:
    """Push a packaged chart below a folder of the registry."""
    output = run("helm", "push", str(package), f"oci://{folder}")
    digest = re.search(rf"^Digest: ({DIGEST})$", output, re.MULTILINE)
    if digest is None:
        raise ReleaseError("helm push printed no digest; see above")
    name, _, _ = package.stem.rpartition("-")
    return Pushed(f"{folder}/{name}", digest[1])


def sign(pushed: Pushed) -> None:
    """Sign an artifact and all its parts, SBOMs included, with the identity of the running job."""
    run("cosign", "sign", "--yes", "--recursive", str(pushed))
