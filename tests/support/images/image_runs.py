"""Run programs inside an image of `make images` with buildah."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[3] / "build" / "images"


def built(image: str) -> dict[str, Any] | None:
    """Return an image's record in images.json; None if buildah does not store the image."""
    file = IMAGES / "images.json"
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    record: dict[str, Any] | None = records.get(image)
    if record is None:
        return None
    command = ["buildah", "inspect", "--type=image", str(record["name"])]
    return record if subprocess.run(command, capture_output=True).returncode == 0 else None


class Container:
    """A container of an image on the network of this machine; close it after use."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._name = self._expect("buildah", "from", str(record["name"])).strip()

    def close(self) -> None:
        """Remove the container."""
        self._expect("buildah", "rm", self._name)

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[Path, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as the image's user, instead of the image's entry point.

        Args:
            command: The program and its arguments.
            env: Variables besides the image's.
            mounts: Paths in the container by file of this machine, read-only.
        """
        options = [f"--env={name}={value}" for name, value in (env or {}).items()]
        options += [f"--volume={source}:{path}:ro" for source, path in (mounts or {}).items()]
        inside = ["buildah", "run", "--isolation=chroot", *options, self._name, "--"]
        return subprocess.run([*inside, *command], capture_output=True, text=True)

    @staticmethod
    def _expect(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
