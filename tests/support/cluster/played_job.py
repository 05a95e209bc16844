"""A job of two nodes on a cluster without a node for it, whose pods a test plays."""

import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import PODS, Object, Resource
from finetune_trainer.config import Phase, Progress
from support.cluster.operators import Api, condition, wait_until
from support.cluster.played_pods import (
    ProgressServer,
    bound_claims,
    end_pod,
    own_address,
    played_node,
    profile_nodes,
    run_pod,
)
from support.kernel.loop_thread import LoopThread
from support.kubernetes.kubernetes_cases import JOB, profile

NODES = 2
CLAIMS = ("data", "models", "checkpoints")


class PlayedJob:
    """The job `tiny` of a namespace, its children, and what becomes of its pods."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    def children(self, kind: Resource) -> list[Object]:
        listing = self.api.client.list(kind, self.namespace, label_selector=JOB_UID_LABEL)
        return self.api.run(listing).items

    def names(self, kind: Resource) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.children(kind))

    def pods(self, attempt: str) -> list[Object]:
        """Return the pods of an attempt that have a node, by their number."""
        found = [one for one in self.children(PODS) if one["spec"].get("nodeName")]
        found = [one for one in found if one["metadata"]["name"].startswith(f"{attempt}-")]
        return sorted(found, key=lambda one: str(one["metadata"]["name"]))

    def placed(self, attempt: str) -> list[Object]:
        wait_until(lambda: len(self.pods(attempt)) == NODES, 30, f"pods of {attempt} have nodes")
        return self.pods(attempt)

    def run_pods(self, attempt: str) -> None:
        for pod in self.placed(attempt):
            self.api.run(run_pod(self.api.client, pod, own_address()))

    def is_told(self, kind: str, attempt: int) -> bool:
        job = self.api.job(self.namespace)
        is_that = job is not None and job["status"].get("attempt") == attempt
        return is_that and condition(job, kind)["status"] == "True"

    def has_deleted_pods(self) -> bool:
        return any("deletionTimestamp" in one["metadata"] for one in self.children(PODS))

    def end_deleted(self) -> None:
        """Let the pods be gone that were told to."""
        client = self.api.client
        for pod in self.children(PODS):
            if "deletionTimestamp" in pod["metadata"]:
                name = pod["metadata"]["name"]
                self.api.run(end_pod(client, pod, 143))
                self.api.run(client.delete(PODS, name, self.namespace, grace_seconds=0))


@contextlib.contextmanager
def place(api: Api, namespace: str, loop: LoopThread, **spec: Any) -> Iterator[str]:
    """Have the job with a node, claims, and its rank 0's progress; yield its profile's name."""
    name = f"played-{uuid4().hex[:8]}"

    async def enter(stack: contextlib.AsyncExitStack) -> ProgressServer:
        client = await stack.enter_async_context(await HttpClient.connect(api.kubeconfig))
        await stack.enter_async_context(played_node(client, name))
        await stack.enter_async_context(bound_claims(client, CLAIMS, namespace))
        said = ProgressServer(Progress(phase=Phase.TRAINING, step=1, total_steps=10))
        return await stack.enter_async_context(said.serving(own_address()))

    stack = contextlib.AsyncExitStack()
    said = loop.run(enter(stack))
    try:
        with api.profile(name, profile(nodes=profile_nodes(name))):
            api.apply(
                namespace,
                **{
                    **JOB,
                    "backend": {"type": "kubernetes", "kubernetes": {"profile": name}},
                    "topology__nodes": NODES,
                    "observability__metricsPort": said.port,
                    "restartPolicy__backoff": {"baseSeconds": 0, "maxSeconds": 1},
                    **spec,
                },
            )
            yield name
    finally:
        loop.run(stack.aclose())
