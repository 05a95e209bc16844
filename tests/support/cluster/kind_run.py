"""Run the tests of a whole cluster on kind: `make kind`, `make kind KUBERNETES=1.30`.

Makes a cluster of two workers, loads the images of `make images`, runs tests/e2e, keeps the logs
and deletes the cluster, whatever happened. Says in one sentence what this machine lacks for that.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "kind.yaml"
NODES: dict[str, str] = yaml.safe_load((ROOT / "tests" / "kind_nodes.yaml").read_text())
IMAGES = ("finetune-operator", "finetune-trainer")
WORK = Path("build") / "kind"
"""Of the repository: the folder that all nodes share, the kubeconfig, the logs of the nodes."""

PROGRAMS = {
    "kind": "make kind-tool builds it with Go",
    "helm": "https://helm.sh/docs/intro/install",
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
}
ENGINES = ("docker", "podman")


class LackingError(Exception):
    """This machine cannot run kind; the message says why, and what to do."""


@dataclass(frozen=True)
class Kind:
    """One cluster, by its programs.

    Attributes:
        name: Of the cluster.
        engine: Program that runs its nodes.
        folder: Where files of this run are.
    """

    name: str
    engine: str
    folder: Path

    @property
    def kubeconfig(self) -> Path:
        """The file by which programs reach the cluster."""
        return self.folder / "kubeconfig"

    def run(self, *arguments: str) -> None:
        """Run kind, which must succeed."""
        print("+ kind", *arguments, flush=True)
        provider = {"KIND_EXPERIMENTAL_PROVIDER": self.engine}
        command = ["kind", *arguments, "--name", self.name]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **provider})

    @contextmanager
    def up(self, node: str) -> Iterator[None]:
        """Have the cluster inside the block; its logs are kept."""
        shared = self.folder / "shared"
        shared.mkdir(parents=True, exist_ok=True)
        shared.chmod(0o777)  # pods write it as user 1000, whoever owns it here
        how = ("--config", str(CONFIG), "--image", node, "--kubeconfig", str(self.kubeconfig))
        try:
            self.run("create", "cluster", *how, "--wait", "3m")
            yield
        finally:
            shutil.rmtree(self.folder / "logs", ignore_errors=True)
            try:
                self.run("export", "logs", str(self.folder / "logs"))
            finally:
                self.run("delete", "cluster", "--kubeconfig", str(self.kubeconfig))


def node_for(kubernetes: str) -> str:
    """Return the image of the nodes.

    Raises:
        LackingError: No such version is pinned.
    """
    if kubernetes not in NODES:
        raise LackingError(f"KUBERNETES={kubernetes} is none of {', '.join(NODES)}")
    return NODES[kubernetes]


def engine() -> str:
    """Return the program that runs containers here, after every other one was found as well.

    Raises:
        LackingError: Something is missing.
    """
    lacking = [
        f"{name} ({remedy})" for name, remedy in PROGRAMS.items() if shutil.which(name) is None
    ]
    found = [name for name in ENGINES if shutil.which(name)]
    runs = [name for name in found if _answers(name)]
    if not found:
        lacking.append("docker or podman (install one)")
    elif not runs:
        lacking.append(f"an engine that answers `{found[0]} info` (start its daemon)")
    if lacking:
        raise LackingError(f"make kind lacks {', '.join(lacking)}")
    return runs[0]


def _answers(name: str) -> bool:
    return subprocess.run([name, "info"], capture_output=True).returncode == 0


def image_in(archive: Path) -> str:
    """Return the name of the image in a docker archive.

    Raises:
        LackingError: The archive is missing, or its image has no name.
    """
    if not archive.exists():
        raise LackingError(f"{archive.relative_to(ROOT)} is missing; run: make images")
    with tarfile.open(archive) as packed:
        manifest = packed.extractfile("manifest.json")
        assert manifest is not None, f"{archive} is not a docker archive"
        [image] = json.load(manifest)
    for name in image.get("RepoTags") or ():
        return str(name)
    raise LackingError(f"{archive.relative_to(ROOT)} has an image without a name; run: make images")


def main(environ: Mapping[str, str]) -> int:
    """Run everything; return the exit code of the tests, or 2 where they cannot run."""
    try:
        node = node_for(environ.get("KUBERNETES") or [*NODES][-1])
        archives = [ROOT / "build" / "images" / f"{name}.tar" for name in IMAGES]
        runs = engine()
        operator, trainer = (image_in(archive) for archive in archives)
    except LackingError as error:
        print(error, file=sys.stderr)
        return 2
    kind = Kind(f"finetune-{os.getpid()}", runs, ROOT / WORK)
    [mount] = yaml.safe_load(CONFIG.read_text())["nodes"][1]["extraMounts"]
    with kind.up(node):
        for archive in archives:
            kind.run("load", "image-archive", str(archive))
        given = {
            "FINETUNE_E2E_KUBECONFIG": str(kind.kubeconfig),
            "FINETUNE_E2E_OPERATOR_IMAGE": operator,
            "FINETUNE_E2E_TRAINER_IMAGE": trainer,
            "FINETUNE_E2E_NODE_FOLDER": str(mount["containerPath"]),
        }
        return subprocess.run(["make", "e2e"], cwd=ROOT, env={**environ, **given}).returncode


if __name__ == "__main__":
    sys.exit(main(os.environ))
