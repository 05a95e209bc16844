"""Jobs of two nodes that train on played pods, and their children as others might change them."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
)
from support.api.builders import manifest
from support.cluster.operators import phase_of
from support.cluster.played_pods import (
    bound_claims,
    own_address,
    played_node,
    profile_nodes,
    run_pod,
)
from support.kubernetes.kubernetes_cases import JOB, profile

NODES = 2
CHILDREN = (JOBS, PODS, SERVICES, NETWORK_POLICIES, ENDPOINT_SLICES)
CLAIMS = ("data", "models", "checkpoints")


@asynccontextmanager
async def training(
    client: KubeClient,
    namespace: str,
    name: str,
    port: int,
    *,
    running: int,
    backends: Sequence[str] = ("kubernetes", "aks"),
    nodes: int = 1,
    changes: Sequence[Mapping[str, Any]] = ({},),
) -> AsyncIterator[dict[str, asyncio.Task[None]]]:
    """Have so many jobs whose pods run on played nodes, with a profile of the same name.

    The jobs name the backend by each of `backends` in turn, and have the `changes` in turn.

    Yields:
        The tasks that renew the heartbeats of the nodes, by the name of the node.
    """
    spec = profile(nodes=profile_nodes(name)).model_dump(
        by_alias=True, exclude_none=True, mode="json"
    )
    kind = {"apiVersion": FINE_TUNE_PROFILES.api_version, "kind": FINE_TUNE_PROFILES.kind}
    made = {**kind, "metadata": {"name": name}, "spec": spec}
    async with AsyncExitStack() as stack:
        hearts = {}
        for node in [f"{name}-{number}" for number in range(nodes)]:
            room = str(math.ceil(running * NODES / nodes))
            entered = played_node(client, node, group=name, pods=room)
            hearts[node] = await stack.enter_async_context(entered)
        await stack.enter_async_context(bound_claims(client, CLAIMS, namespace))
        await client.create(FINE_TUNE_PROFILES, made)
        for number in range(running):
            backend = backends[number % len(backends)]
            made = body(f"job-{number}", name, port, backend, **changes[number % len(changes)])
            await client.create(FINE_TUNE_JOBS, made, namespace)
        placed: set[str] = set()
        async with asyncio.timeout(120):
            while len(placed) < running * NODES:
                await asyncio.sleep(0.2)
                for pod in (await client.list(PODS, namespace)).items:
                    if pod["spec"].get("nodeName") and pod["metadata"]["name"] not in placed:
                        await run_pod(client, pod, own_address())
                        placed.add(pod["metadata"]["name"])
        try:
            yield hearts
        finally:
            await client.delete(FINE_TUNE_PROFILES, name)


def body(
    name: str, profile_name: str, port: int, backend: str = "kubernetes", **changes: Any
) -> Object:
    fields = {
        **JOB,
        "backend": {"type": backend, backend: {"profile": profile_name}},
        "observability": {"metricsPort": port},
        "topology": {"nodes": NODES},
        **changes,
    }
    made: Object = manifest(name=name, **fields)
    del made["metadata"]["namespace"]
    return made


async def children(
    client: KubeClient, namespace: str, *, versions: bool = False
) -> dict[str, Object]:
    """Return every child of every job as it was asked for, without what controllers add to it.

    Args:
        versions: With its version, which every write to it changes, those of controllers too.
    """
    return {
        f"{kind} {one['metadata']['name']}": wanted(one, versions=versions)
        for kind in CHILDREN
        for one in (await client.list(kind, namespace, label_selector=JOB_UID_LABEL)).items
    }


def wanted(made: Object, *, versions: bool) -> Object:
    bare = {"managedFields"} if versions else {"resourceVersion", "managedFields"}
    metadata = {key: value for key, value in made["metadata"].items() if key not in bare}
    return {**{key: value for key, value in made.items() if key != "status"}, "metadata": metadata}


async def jobs(client: KubeClient, namespace: str) -> list[tuple[str, int]]:
    found = (await client.list(FINE_TUNE_JOBS, namespace)).items
    return [(phase_of(one), one["status"]["attempt"]) for one in found]
