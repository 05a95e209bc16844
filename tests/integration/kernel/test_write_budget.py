"""Count the operator's writes in the whole life of a job on AKS, from the audit log.

Pods are played on a node that is only an object; controllers and scheduler are real.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import (
    EVENTS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    PODS,
    Object,
)
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.api.builders import manifest
from support.cluster.audit import AuditLog, Write, counted
from support.cluster.operators import KUBECONFIG, Api, OperatorProcess, open_api, phase_of
from support.cluster.played_pods import (
    ProgressServer,
    bound_claims,
    end_pod,
    own_address,
    played_node,
    profile_nodes,
    run_pod,
)
from support.kubernetes.kubernetes_cases import JOB, profile

AUDIT_LOG = os.environ.get("FINETUNE_TEST_AUDIT_LOG")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
    pytest.mark.skipif(AUDIT_LOG is None, reason="FINETUNE_TEST_AUDIT_LOG names no audit log"),
]
JOBS = 5
PODS_EACH = 2
LOADING_SECONDS = 3.0
DELAY_SECONDS = 15.0  # in which a job that does not train yet costs no report of its nodes
CLAIMS = ("data", "models", "checkpoints")
WORDS = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


Check = Callable[[], Coroutine[Any, Any, bool]]


async def until(check: Check, seconds: float, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await check():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None


class Play:
    """Jobs of two nodes whose pods go to a played node."""

    def __init__(self, client: KubeClient, namespace: str, name: str) -> None:
        self.client = client
        self.namespace = namespace
        self.name = name
        self.address = own_address()

    async def wait_for_scheduler(self) -> None:
        """Wait until the scheduler has seen node and claims, so that no job is unschedulable."""
        nodes = profile_nodes(self.name)
        spec = {
            "nodeSelector": nodes["selector"],
            "tolerations": nodes["tolerations"],
            "containers": [{"name": "none", "image": "none.invalid/none"}],
            "volumes": [
                {"name": name, "persistentVolumeClaim": {"claimName": name}} for name in CLAIMS
            ],
        }
        await self.client.create(
            PODS, {"metadata": {"name": "first"}, "spec": spec}, self.namespace
        )

        async def is_placed() -> bool:
            pod = await self.client.get(PODS, "first", self.namespace)
            return bool(pod["spec"].get("nodeName"))

        await until(is_placed, 60, "a first pod has a node")
        await self.client.delete(PODS, "first", self.namespace, grace_seconds=0)

    async def apply(self, port: int) -> None:
        for number in range(JOBS):
            fields = {
                **JOB,
                "topology__nodes": PODS_EACH,
                "backend": {"type": "kubernetes", "kubernetes": {"profile": self.name}},
                "observability": {"metricsPort": port, "statusIntervalSeconds": 5},
            }
            body = manifest(name=f"job-{number}", **fields)
            del body["metadata"]["namespace"]
            await self.client.create(FINE_TUNE_JOBS, body, self.namespace)

    async def pods(self) -> list[Object]:
        return (await self.client.list(PODS, self.namespace)).items

    async def start_pods(self) -> None:
        async def placed() -> bool:
            found = [pod for pod in await self.pods() if pod["spec"].get("nodeName")]
            return len(found) == JOBS * PODS_EACH

        await until(placed, 60, "every pod has a node")
        for pod in await self.pods():
            await run_pod(self.client, pod, self.address)

    async def end_pods(self) -> None:
        for pod in await self.pods():
            await end_pod(self.client, pod, 0, WORDS.to_json())

    async def all_are(self, phase: str) -> None:
        async def are() -> bool:
            jobs = (await self.client.list(FINE_TUNE_JOBS, self.namespace)).items
            return all(phase_of(job) == phase for job in jobs)

        await until(are, 60, f"every job is {phase}")


@asynccontextmanager
async def played(namespace: str) -> AsyncIterator[Play]:
    """Make node, profile and claims, and take them away."""
    name = f"played-{uuid4().hex[:8]}"
    spec = profile(nodes=profile_nodes(name)).model_dump(
        by_alias=True, exclude_none=True, mode="json"
    )
    kind = {"apiVersion": FINE_TUNE_PROFILES.api_version, "kind": FINE_TUNE_PROFILES.kind}
    made = {**kind, "metadata": {"name": name}, "spec": spec}
    async with (
        await HttpClient.connect(KUBECONFIG) as client,
        played_node(client, name),
        bound_claims(client, CLAIMS, namespace),
    ):
        await client.create(FINE_TUNE_PROFILES, made)
        try:
            yield Play(client, namespace, name)
        finally:
            await client.delete(FINE_TUNE_PROFILES, name)


@dataclass(frozen=True)
class Writes:
    """What the operator wrote in the life of all jobs.

    Attributes:
        start: Until every job was Running.
        idle: While they trained.
        end: From their end on.
        events: Reason and message of each Event of a job, which explain an unexpected write.
    """

    start: list[Write]
    idle: list[Write]
    end: list[Write]
    events: list[str]


async def live(namespace: str, audit: AuditLog) -> Writes:
    """Play jobs from apply to Complete."""

    async def written(events: int) -> list[Write]:
        """Wait for the Events, which follow a status."""
        found: list[Write] = []

        async def are_posted() -> bool:
            found.extend(one for one in audit.writes() if one.namespace == namespace)
            return counted(found).get("create events", 0) >= events

        await until(are_posted, 20, f"{events} Events")
        return found

    async with played(namespace) as play, ProgressServer().serving(play.address) as rank_zero:
        await play.wait_for_scheduler()
        await play.apply(rank_zero.port)
        await play.start_pods()
        await asyncio.sleep(LOADING_SECONDS)
        rank_zero.progress = Progress(phase=Phase.TRAINING, step=1, total_steps=10)
        await play.all_are("Running")
        start = await written(2 * JOBS)
        enough = rank_zero.asked + 3 * JOBS

        async def asked() -> bool:
            return rank_zero.asked >= enough

        await until(asked, 60, "each run was asked for its progress three times")
        idle = await written(0)
        await play.end_pods()
        await play.all_are("Succeeded")
        end = await written(JOBS)
        events = [
            f"{one['involvedObject']['name']}: {one['reason']}: {one['message']}"
            for one in (await play.client.list(EVENTS, namespace)).items
            if one["involvedObject"]["kind"] == FINE_TUNE_JOBS.kind
        ]
        return Writes(start, idle, end, events)


def late_reports(writes: Sequence[Write]) -> list[Write]:
    """Return the status patches between a job's first, which opens its attempt, and its last.

    A job that does not train within `DELAY_SECONDS` has one: that its nodes run. It has no Event.

    Raises:
        AssertionError: One came earlier, or a job has two.
    """
    of_job: dict[str, list[Write]] = {}
    for write in writes:
        if write.what == "patch finetunejobs/status":
            of_job.setdefault(write.name, []).append(write)
    found = []
    for name, (first, *between) in of_job.items():
        for write in between[:-1]:
            seconds = (write.received_at - first.received_at).total_seconds()
            assert seconds > DELAY_SECONDS - 1, f"{name}: a report {seconds:.1f} s after opening"
            found.append(write)
        assert len(between) <= 2, f"{name}: {len(between) + 1} patches until it trains"
    return found


def test_a_job_costs_at_most_six_writes_and_two_events_until_it_runs_and_one_of_each_after(
    api: Api,
) -> None:
    assert KUBECONFIG is not None
    assert AUDIT_LOG is not None
    with (
        api.namespace("budget") as namespace,
        OperatorProcess(KUBECONFIG, namespace) as operator,
        AuditLog(Path(AUDIT_LOG), "finetune-operator/") as audit,
    ):
        operator.wait_for("synced", 60)
        writes = asyncio.run(live(namespace, audit))
    assert counted(writes.start) == {
        "patch finetunejobs/status": 2 * JOBS + len(late_reports(writes.start)),
        "create networkpolicies": JOBS,
        "create services": JOBS,
        "create endpointslices": JOBS,
        "create jobs": JOBS,
        "create events": 2 * JOBS,
    }, writes.events
    assert counted(writes.idle) == {}, writes.events
    assert counted(writes.end) == {
        "patch finetunejobs/status": JOBS,
        "create events": JOBS,
    }, writes.events
