"""`make kind`, with stand-ins for the programs that it calls, which write down how."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CALLED = """#!/bin/sh
echo "{name} $*" >> "$CALLS"
case "{name} $*" in {fails}) exit 3;; esac
"""


class Machine:
    """A checkout with images, and a PATH with nothing but stand-ins.

    Args:
        folder: Where both are.
    """

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.programs = folder / "bin"
        self.calls = folder / "calls"
        self.programs.mkdir()
        for name in ("kind.yaml", "kind_nodes.yaml", "support/cluster/kind_run.py"):
            target = self.checkout / "tests" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((ROOT / "tests" / name).read_text())
        for name in ("finetune-operator", "finetune-trainer"):
            self._archive(name)

    def _archive(self, name: str) -> None:
        folder = self.checkout / "build" / "images"
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "manifest.json"
        manifest.write_text(json.dumps([{"RepoTags": [f"localhost/{name}:0.1.0"]}]))
        with tarfile.open(folder / f"{name}.tar", "w") as packed:
            packed.add(manifest, "manifest.json")

    def has(self, *names: str, fails: str = "never") -> None:
        """Put programs on the PATH; `fails` is a pattern of the shell for calls that fail."""
        for name in names:
            program = self.programs / name
            program.write_text(CALLED.format(name=name, fails=fails))
            program.chmod(0o755)

    def run(self, **environ: str) -> "subprocess.CompletedProcess[str]":
        """Run `make kind`'s program."""
        path = {"PATH": str(self.programs), "CALLS": str(self.calls)}
        command = [sys.executable, "tests/support/cluster/kind_run.py"]
        return subprocess.run(
            command, cwd=self.checkout, env={**path, **environ}, capture_output=True, text=True
        )

    def said(self) -> list[str]:
        """Return the calls so far, with the name of the cluster left out."""
        lines = self.calls.read_text().splitlines()
        return [line.partition(" --name finetune-")[0] for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_cluster_is_made_filled_tested_and_deleted(machine: Machine) -> None:
    machine.has("kind", "helm", "kubectl", "docker", "make")

    done = machine.run(KUBERNETES="1.30")

    assert done.returncode == 0, done.stderr
    build = machine.checkout / "build"
    assert [line.split(" --config")[0] for line in machine.said()] == [
        "docker info",
        "kind create cluster",
        f"kind load image-archive {build}/images/finetune-operator.tar",
        f"kind load image-archive {build}/images/finetune-trainer.tar",
        "make e2e",
        f"kind export logs {build}/kind/logs",
        f"kind delete cluster --kubeconfig {build}/kind/kubeconfig",
    ]
    assert "--image kindest/node:v1.30." in machine.calls.read_text()
    assert os.stat(build / "kind" / "shared").st_mode & 0o777 == 0o777


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        pytest.param("make*", 3, id="the tests fail"),
        pytest.param("'kind load'*", 1, id="an image cannot be loaded"),
        pytest.param("'kind create'*", 1, id="the cluster does not come up"),
        pytest.param("'kind export'*", 1, id="the logs cannot be read"),
    ],
)
def test_logs_are_kept_and_the_cluster_is_deleted_whatever_fails(
    machine: Machine, fails: str, code: int
) -> None:
    machine.has("kind", "helm", "kubectl", "docker", "make", fails=fails)

    done = machine.run()

    assert done.returncode == code
    *_, kept, deleted = machine.said()
    assert kept.startswith("kind export logs")
    assert deleted.startswith("kind delete cluster")


def test_one_sentence_says_all_that_is_lacking(machine: Machine) -> None:
    machine.has("kubectl")

    done = machine.run()

    assert done.returncode == 2
    assert done.stderr == (
        "make kind lacks kind (make kind-tool builds it with Go), "
        "helm (https://helm.sh/docs/intro/install), docker or podman (install one)\n"
    )
    assert not machine.calls.exists()


def test_an_engine_that_does_not_answer_is_named(machine: Machine) -> None:
    machine.has("kind", "helm", "kubectl", "docker", "make", fails="'docker info'")

    assert machine.run().stderr == (
        "make kind lacks an engine that answers `docker info` (start its daemon)\n"
    )


def test_images_that_were_not_built_are_named_with_the_command(machine: Machine) -> None:
    machine.has("kind", "helm", "kubectl", "docker", "make")
    (machine.checkout / "build" / "images" / "finetune-trainer.tar").unlink()

    done = machine.run()

    assert done.returncode == 2
    assert done.stderr == "build/images/finetune-trainer.tar is missing; run: make images\n"
    assert machine.said() == ["docker info"]


def test_a_version_without_nodes_is_refused(machine: Machine) -> None:
    assert machine.run(KUBERNETES="1.29").stderr == "KUBERNETES=1.29 is none of 1.30, 1.34, 1.37\n"
