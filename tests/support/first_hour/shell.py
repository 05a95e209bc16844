"""Command line, stored state and programs of the first hour on Azure; the other modules use it.

`tests/live/first_hour.py` creates them. Azure, the cluster and this machine are reached by `Shell`
alone.
"""

import json
import os
import subprocess
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TAG = "finetune-first-hour"
"""Tag of the resource group; its value is the id of the state."""

STORAGE = {"files": "azurefile-csi-premium", "blobfuse": "azureblob-fuse-premium"}
"""Storage class of each step with volumes."""

NUM_SYSTEM_NODES, NUM_GPU_NODES, NUM_SPOT_NODES = 2, 1, 2

Object = dict[str, Any]


class StepError(Exception):
    """A precondition or a step that failed; the message is for the table."""


class SkippedError(Exception):
    """A step without its input; the message is the reason."""


@dataclass
class Options:
    """The command line.

    Attributes:
        name: Name of the resource group and of the cluster.
        registry: Registry with both images, as in docs/installation.md.
        folder: Folder of the state, the kubeconfig, the logs and the table.
    """

    location: str
    registry: str
    version: str
    name: str
    cpu_size: str
    gpu_size: str
    azureml_profile: Path | None
    folder: Path
    poll_seconds: float

    @property
    def images(self) -> dict[str, str]:
        """Both images, by the name of their program."""
        return {
            one: f"{self.registry}/finetune-{one}:{self.version}" for one in ("operator", "trainer")
        }

    @property
    def acr(self) -> str:
        """Name of an Azure container registry; empty for another registry."""
        host = self.registry.partition("/")[0]
        return host.removesuffix(".azurecr.io") if host.endswith(".azurecr.io") else ""


@dataclass
class State:
    """Progress of earlier calls, stored after each step.

    Attributes:
        name: Name of the resource group and of the cluster.
        id: Value of the tag of the resource group.
        roles: Ids of role assignments outside of the resource group.
        steps: Result, seconds and finding of each step.
    """

    path: Path
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    roles: list[str] = field(default_factory=list)
    steps: dict[str, Object] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> "State":
        """Return the stored state, or a new one."""
        path = folder / "state.json"
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def save(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"name": self.name, "id": self.id, "roles": self.roles, "steps": self.steps}
        self.path.write_text(json.dumps(stored, indent=2) + "\n")

    def has_passed(self, step: str) -> bool:
        """Whether an earlier call has finished the step."""
        return bool(self.steps.get(step, {}).get("result") == "passed")


class Shell:
    """Runs programs, and appends commands and outputs to `commands.log`."""

    def __init__(self, options: Options) -> None:
        self._folder = options.folder
        self.kubeconfig = options.folder / "kubeconfig"

    def run(self, *command: str, stdin: str | None = None, **environ: str) -> str:
        """Return the output of a program that must succeed.

        Raises:
            StepError: the program failed; the message has its last line.
        """
        variables = {**os.environ, "KUBECONFIG": str(self.kubeconfig), **environ}
        done = subprocess.run(
            command, cwd=ROOT, env=variables, input=stdin, capture_output=True, text=True
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "commands.log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            (*_, last) = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            raise StepError(f"{' '.join(command[:3])}: exit code {done.returncode}: {last}")
        return done.stdout

    def az(self, *command: str) -> Any:
        """Return the parsed output of the Azure CLI; None if there is none."""
        text = self.run("az", *command, "--output", "json")
        return json.loads(text) if text.strip() else None

    def kubectl(self, *command: str, stdin: str | None = None) -> str:
        """Return the output of kubectl in the cluster of this script."""
        return self.run("kubectl", *command, stdin=stdin)

    def apply(self, *objects: Object) -> None:
        """Create or update objects."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))
