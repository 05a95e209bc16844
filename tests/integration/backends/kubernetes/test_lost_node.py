"""A job whose node falls silent continues on other nodes: the real controllers mark its pods."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest

from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import PODS, Object
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.chaos.life import ready
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.cluster.played_job import CLAIMS, PlayedJob
from support.cluster.played_pods import (
    ProgressServer,
    bound_claims,
    end_pod,
    own_address,
    played_node,
    profile_nodes,
)
from support.kernel.loop_thread import LoopThread, loop_thread
from support.kubernetes.kubernetes_cases import JOB, profile

SPARE_NODES = 3
TRAINS_SECONDS = 45
"""Time in which the operator reads at least three steps."""

PARTNER_FAILS_SECONDS = 20
EVICTION_SECONDS = 300
"""Time after which Kubernetes itself evicts the pods of a node that does not respond."""
Hearts = dict[str, asyncio.Task[None]]


@dataclass
class Gang:
    """A job of two nodes, each with room for one pod, and a third node.

    Attributes:
        page: Progress of rank 0.
        hearts: Tasks that renew the heartbeat of the nodes, by the name of the node.
        placed_seconds: Time from the silence until the next attempt had its nodes.
        seen: Times since the silence in seconds, with reason and message of Ready from then on.
    """

    job: PlayedJob
    page: ProgressServer
    hearts: dict[str, asyncio.Task[None]]
    seen: list[tuple[int, str, str]] = field(default_factory=list)
    placed_seconds: float | None = None


@contextlib.contextmanager
def gang(api: Api, loop: LoopThread, namespace: str) -> Iterator[Gang]:
    async def enter(stack: contextlib.AsyncExitStack) -> tuple[ProgressServer, Hearts]:
        client = await stack.enter_async_context(await HttpClient.connect(api.kubeconfig))
        hearts = {}
        for number in range(SPARE_NODES):
            name = f"{namespace}-{number}"
            node = played_node(client, name, group=namespace, pods="1")
            hearts[name] = await stack.enter_async_context(node)
        await stack.enter_async_context(bound_claims(client, CLAIMS, namespace))
        page = ProgressServer(Progress(phase=Phase.TRAINING, step=7, total_steps=100))
        return await stack.enter_async_context(page.serving(own_address())), hearts

    stack = contextlib.AsyncExitStack()
    page, hearts = loop.run(enter(stack))
    try:
        with api.profile(namespace, profile(nodes=profile_nodes(namespace))):
            api.apply(
                namespace,
                **{
                    **JOB,
                    "backend": {"type": "kubernetes", "kubernetes": {"profile": namespace}},
                    "topology__nodes": 2,
                    "observability__metricsPort": page.port,
                },
            )
            yield Gang(PlayedJob(api, namespace), page, hearts)
    finally:
        loop.run(stack.aclose())


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


@pytest.mark.timeout(EVICTION_SECONDS + 180)
@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_job_on_a_silent_node_continues_on_other_nodes(api: Api) -> None:
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(loop_thread())
        fails, hangs = (stack.enter_context(api.namespace(name)) for name in ("fails", "hangs"))
        gangs = [stack.enter_context(gang(api, loop, one)) for one in (fails, hangs)]
        operator = OperatorProcess(api.kubeconfig, fails, namespaces=f"{fails},{hangs}")
        stack.enter_context(operator)
        operator.wait_for("synced")
        lost = {}
        for one in gangs:
            one.job.run_pods("tiny-1")
            wait_until(partial(one.job.is_told, "Running", 1), 60, "attempt 1 trains")
            lost[one.job.namespace] = one.job.pods("tiny-1")[1]
        for step in range(8, 8 + TRAINS_SECONDS):
            for one in gangs:
                one.page.progress = one.page.progress.model_copy(update={"step": step})
            time.sleep(1)
        begun = time.monotonic()
        for one in gangs:
            node = lost[one.job.namespace]["spec"]["nodeName"]
            loop.loop.call_soon_threadsafe(one.hearts[node].cancel)
        has_failed = False
        while any(one.placed_seconds is None for one in gangs):
            seconds = time.monotonic() - begun
            assert seconds < EVICTION_SECONDS, [one.seen for one in gangs]
            if not has_failed and seconds >= PARTNER_FAILS_SECONDS:
                has_failed = True
                words = Termination(
                    failure_class=FailureClass.WORKER_LOST, exit_code=1, message="rank 1 is gone"
                )
                first = gangs[0].job.pods("tiny-1")[0]
                api.run(end_pod(api.client, first, 1, words.to_json()))
            for one in gangs:
                look(one, lost[one.job.namespace], seconds)
            time.sleep(1)
        for one in gangs:
            check(api, one, lost[one.job.namespace])


def look(one: Gang, lost: Object, seconds: float) -> None:
    """Note the status; and play the kubelets of the nodes that respond."""
    job = one.job.api.job(one.job.namespace)
    assert job is not None
    found = ready(job["status"])
    if not one.seen or one.seen[-1][1:] != (found["reason"], found["message"]):
        one.seen.append((int(seconds), found["reason"], found["message"]))
        print(one.job.namespace, *one.seen[-1])
    if one.placed_seconds is not None:
        return
    for pod in one.job.pods("tiny-1"):
        if "deletionTimestamp" in pod["metadata"] and name_of(pod) != name_of(lost):
            one.job.api.run(end_pod(one.job.api.client, pod, 143))
    if len(one.job.pods("tiny-2")) == 2:
        one.placed_seconds = seconds
        print(one.job.namespace, f"placed after {seconds:.1f} s")


def check(api: Api, one: Gang, lost: Object) -> None:
    reasons = [reason for _, reason, _ in one.seen]
    assert reasons[0] == "Training"
    assert {"NodeNotResponding", "Restarting"} & {*reasons}
    there = api.get(PODS, one.job.namespace, name_of(lost))
    assert there is not None, "the lost pod still exists"
    assert there["status"]["phase"] == "Running"
    nodes = {pod["spec"]["nodeName"] for pod in one.job.pods("tiny-2")}
    assert lost["spec"]["nodeName"] not in nodes
    job = api.job(one.job.namespace)
    assert job is not None
    first = min(job["status"]["attempts"], key=lambda attempt: int(attempt["number"]))
    assert first["failureClass"] == FailureClass.NODE_LOST
    assert lost["spec"]["nodeName"] in first["message"]
    assert job["status"]["restarts"] == {"counted": 0, "disruptions": 1}
