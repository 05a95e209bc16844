"""An operator whose rendering has changed takes over running attempts and touches none of them.

Pods are played on a node that is only an object; the controllers are real. The jobs are of two
nodes, so that they have every kind of child.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
)
from finetune_trainer.config import Phase, Progress
from support.cluster.operators import KUBECONFIG, ROOT, Api, OperatorProcess, open_api, wait_until
from support.cluster.played_pods import ProgressServer, own_address
from support.cluster.running_jobs import NODES, body, children, jobs, training

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
]
RUNNING = 20
NEW_SLICES = """

_before = rank_zero_slice


def rank_zero_slice(*given, **named):  # type: ignore
    made = _before(*given, **named)
    made["endpoints"][0]["conditions"]["serving"] = True
    return made
"""
NEW_RENDERING = """

_before = render


def render(*given, **named):  # type: ignore
    made = _before(*given, **named)
    for one in made.objects:
        one["metadata"].setdefault("annotations", {})["newer"] = "yes"
        if "template" in one["spec"]:
            one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 77
    return made
"""


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A copy of the operator that makes other objects of the same job."""
    package = tmp_path / "finetune_operator"
    shutil.copytree(ROOT / "operator" / "finetune_operator", package)
    for module, changed in (("render", NEW_RENDERING), ("network", NEW_SLICES)):
        with (package / "backends" / "kubernetes" / f"{module}.py").open("a") as source:
            source.write(changed)
    return tmp_path


def as_made(found: dict[str, Object]) -> dict[str, Object]:
    """Return children without what tells one from another that took its place."""
    given = {"uid", "creationTimestamp", "generation"}
    return {
        key: {**one, "metadata": {k: v for k, v in one["metadata"].items() if k not in given}}
        for key, one in found.items()
        if not key.startswith(("pods ", "jobs."))
    }


async def disturb(client: KubeClient, namespace: str) -> None:
    """Delete and change children of some jobs."""
    for number, kind in enumerate((SERVICES, ENDPOINT_SLICES, NETWORK_POLICIES)):
        await client.delete(kind, f"job-{number}-finetune", namespace)
    rules: Object = {"ingress": [{"from": [{"podSelector": {}}]}]}
    await client.patch(NETWORK_POLICIES, "job-3-finetune", namespace, {"spec": rules})
    ports = {"ports": [{"name": "rendezvous", "port": 1}]}
    await client.patch(SERVICES, "job-4-finetune", namespace, {"spec": ports})
    nowhere: Object = {"endpoints": []}
    await client.patch(ENDPOINT_SLICES, "job-5-finetune", namespace, nowhere)


async def upgrade(namespace: str, first: OperatorProcess, newer: Path) -> None:
    name = f"newer-{uuid4().hex[:8]}"
    assert KUBECONFIG is not None
    async with (
        await HttpClient.connect(KUBECONFIG) as client,
        ProgressServer(Progress(phase=Phase.TRAINING, step=1, total_steps=10)).serving(
            own_address()
        ) as rank_zero,
        training(client, namespace, name, rank_zero.port, running=RUNNING),
    ):
        running = [("Running", 1)] * RUNNING
        async with asyncio.timeout(120):
            while await jobs(client, namespace) != running:
                await asyncio.sleep(0.2)
        before = await children(client, namespace)
        assert len(before) == (4 + NODES) * RUNNING  # policy, Service, slice, batch Job and pods
        await asyncio.to_thread(first.end)
        asked = rank_zero.asked
        with OperatorProcess(KUBECONFIG, namespace, source=newer) as second:
            await asyncio.to_thread(second.wait_for, "synced")
            async with asyncio.timeout(30):
                while rank_zero.asked < asked + RUNNING:  # each attempt has been looked at
                    await asyncio.sleep(0.1)
            await asyncio.to_thread(
                wait_until, lambda: second.health()["queue"] == 0, 10, "the queue is empty"
            )
            written = await asyncio.to_thread(second.calls, "create", "update", "patch", "delete")
            assert {kind.split()[1] for kind in written} <= {"finetunejobs", "events"}
            assert await children(client, namespace) == before
            assert await jobs(client, namespace) == running
            await disturb(client, namespace)
            end, wrong = asyncio.get_running_loop().time() + 5, list(before)
            while wrong and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.1)
                now = as_made(await children(client, namespace))
                wrong = [key for key, one in as_made(before).items() if now.get(key) != one]
            assert wrong == [], [now.get(one) for one in wrong]
            # It is another version indeed.
            await client.create(FINE_TUNE_JOBS, body("late", name, rank_zero.port), namespace)
            async with asyncio.timeout(20):
                while "jobs.batch late-1" not in await children(client, namespace):
                    await asyncio.sleep(0.1)
            late = await client.get(JOBS, "late-1", namespace)
            assert late["metadata"]["annotations"]["newer"] == "yes"


def test_a_new_version_of_the_operator_writes_to_no_child_of_twenty_running_jobs(
    api: Api, newer: Path
) -> None:
    with api.namespace("newer") as namespace, OperatorProcess(api.kubeconfig, namespace) as first:
        first.wait_for("synced")
        asyncio.run(upgrade(namespace, first, newer))
