"""Programs inside an image of `make images`, run by the engine that built it."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import Engine

IMAGES = Path(__file__).parents[1] / "build" / "images"


def built(image: str) -> dict[str, Any] | None:
    """Return what images.json says of an image; None if it was not built, or is gone."""
    file = IMAGES / "images.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    about: dict[str, Any] | None = known.get(image)
    return about if about and Engine(about["engine"]).has(about["name"]) else None


class Container:
    """A container of an image, whose network is this machine's; close it at the end."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._engine, self._image = str(about["engine"]), str(about["name"])
        self._name = ""
        if self._engine == "buildah":
            self._name = self._expect("buildah", "from", self._image).strip()

    def close(self) -> None:
        """Remove the container."""
        if self._name:
            self._expect("buildah", "rm", self._name)

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[Path, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as the image's user, instead of what the image would start.

        Args:
            command: The program and what it is given.
            env: Variables besides the image's.
            mounts: Where files of this machine are, which it may read.
        """
        options = [f"--env={name}={value}" for name, value in (env or {}).items()]
        options += [f"--volume={source}:{path}:ro" for source, path in (mounts or {}).items()]
        if self._engine == "buildah":
            inside = ["buildah", "run", "--isolation=chroot", *options, self._name, "--"]
        else:
            inside = [self._engine, "run", "--rm", "--network=host", *options]
            inside += [f"--entrypoint={command[0]}", self._image]
            command = command[1:]
        return subprocess.run([*inside, *command], capture_output=True, text=True)

    @staticmethod
    def _expect(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
