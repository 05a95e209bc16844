"""docs/installation.md on this cluster, from nothing to nothing, every command as it is written.

Before all others, as it leaves the cluster without the chart, which they share one release of.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.resources import Object
from support.cluster.real_cluster import ROOT, RealCluster
from support.cluster.real_volume import on_a_node
from support.docs.shown_blocks import Shown, shown_in

PAGE = ROOT / "docs" / "installation.md"
BUILT = "docker buildx bake --push"
"""Minutes that were spent before; images lie on the nodes, or where they pull from."""
TEAM = "installation"
STORAGE = "installation"
"""A class that only the volume made here has, where the cluster makes none itself."""

LONGEST_SECONDS = 400
"""Of one command, on a machine that also runs the cluster."""

VARIABLES, *COMMANDS = shown_in(PAGE)


@pytest.fixture
def given(cluster: RealCluster) -> Iterator[dict[str, str]]:
    """Values of this cluster for the variables of the page; afterwards nothing of it is left."""
    registry, _, name = cluster.given.operator_image.rpartition("/")
    assert name.startswith("finetune-operator:"), "the page names images so"
    folder = f"{cluster.given.node_folder.rstrip('/')}/{STORAGE}"
    if cluster.given.node_folder:
        on_a_node(cluster, f"mkdir -p {folder} && chmod 777 {folder}")
        cluster.apply(volume(folder))
    storage = cluster.given.storage_class or STORAGE
    yield {"REGISTRY": registry, "STORAGE_CLASS": storage, "TEAM": TEAM}
    gone = ("--ignore-not-found", "--wait")
    cluster.run("kubectl", "delete", "namespace", TEAM, *gone)
    cluster.run("kubectl", "delete", "persistentvolume", STORAGE, *gone)
    if cluster.given.node_folder:
        on_a_node(cluster, f"rm -rf {folder}")


def volume(folder: str) -> Object:
    """Return a volume that several pods may write, in a folder that each node has."""
    spec: Object = {
        "storageClassName": STORAGE,
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "20Gi"},
        "hostPath": {"path": folder, "type": "Directory"},
    }
    head = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": STORAGE}}
    return {**head, "spec": spec}


def run(shown: Shown, environ: dict[str, str]) -> None:
    """Run what is shown, as in a terminal, and compare what it prints.

    Raises:
        AssertionError: It fails, or prints something else.
        subprocess.TimeoutExpired: It takes too long.
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shown.command],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, f"{shown.command}\n{done.stdout}"
    assert not shown.output or shown.matches(done.stdout), f"{shown.command}\n{done.stdout}"


def test_the_page_defines_what_differs_in_its_first_block(given: dict[str, str]) -> None:
    named = set(re.findall(r"^export (\w+)=", VARIABLES.command, re.MULTILINE))
    assert named == {*given, "PATH"}
    assert "export PATH=$PWD/.venv/bin:$PATH" in VARIABLES.command


@pytest.mark.timeout(900)
def test_every_command_of_the_page_works_from_nothing_to_nothing(
    cluster: RealCluster, given: dict[str, str]
) -> None:
    environ = {
        **os.environ,
        **given,
        "KUBECONFIG": cluster.given.kubeconfig,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    assert BUILT in [shown.command for shown in COMMANDS]

    for shown in COMMANDS:
        if shown.command != BUILT:
            run(shown, environ)

    left = cluster.kubectl("get", "crd", "--output=name")
    assert "finetune.dev" not in left
    assert cluster.run("helm", "list", "--all-namespaces", "--short").stdout == ""
