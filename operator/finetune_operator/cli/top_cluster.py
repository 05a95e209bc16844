"""Read the jobs of a cluster for `ftctl top`, with the user's permissions.

One request lists all jobs with their status. The pages of a job's pods are read through the API
server, which needs the permissions to list pods and to get `pods/proxy`.
"""

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime

from finetune_operator.api.v1alpha1.lifecycle import Observability
from finetune_operator.api.v1alpha1.topology import backend_name
from finetune_operator.backends.kubernetes.child_names import BACKEND as KUBERNETES
from finetune_operator.backends.kubernetes.child_names import INDEX_LABEL
from finetune_operator.cli.top_ranks import NodePage, read_page
from finetune_operator.cli.top_rows import (
    JobRow,
    SuspectRow,
    age_in,
    count_in,
    get_in,
    progress_in,
    reason_in,
    suspects_in,
)
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import Call, KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import FINE_TUNE_JOBS, PODS, Object

_SECONDS = 5.0
_DEFAULT_PORT = Observability().metrics_port


@dataclass
class PodPages:
    """The pages of the pods of one job.

    Attributes:
        nodes: Names of the nodes, in the order of their ranks.
        ranks_per_node: Ranks of each node.
        notes: Reasons why pages could not be read.
    """

    nodes: list[str]
    ranks_per_node: int = 0
    pages: list[NodePage] = field(default_factory=list)
    suspects: tuple[SuspectRow, ...] = ()
    notes: list[str] = field(default_factory=list)


async def rows_of(client: KubeClient, namespace: str | None) -> list[JobRow]:
    """Return all jobs of a namespace, or of the cluster.

    Raises:
        FineTuneError: the jobs cannot be listed.
    """
    listing = await client.list(FINE_TUNE_JOBS, namespace)
    return sorted((row_of(one) for one in listing.items), key=lambda one: one.key)


async def get_job(client: HttpClient, job: Key) -> Object:
    """Return one job.

    Raises:
        FineTuneError: the job does not exist, or cannot be read.
    """
    try:
        return await client.get(FINE_TUNE_JOBS, job.name, job.namespace)
    except NotFoundError as error:
        raise FineTuneError(
            f"{client.access.host} has no FineTuneJob {job}; kubectl get ftj -A lists all jobs"
        ) from error


def row_of(job: Object) -> JobRow:
    """Return the row of a job from its status, which another version may have written."""
    status = job.get("status")
    return JobRow(
        namespace=job["metadata"]["namespace"],
        name=job["metadata"]["name"],
        phase=str(get_in(status, "phase") or "Pending"),
        reason=reason_in(status),
        age_seconds=age_in(job["metadata"], datetime.now(UTC)),
        attempt=count_in(status, "attempt") or 0,
        restarts=count_in(status, "restarts", "counted") or 0,
        suspects=suspects_in(get_in(status, "suspects")),
        **progress_in(get_in(status, "progress")),
    )


def backend_of(job: Object) -> str:
    """Return the name of a job's backend."""
    return backend_name(get_in(job, "spec", "backend"))


async def read_pods(client: KubeClient, job: Object) -> PodPages:
    """Read the pages of a job's pods through the API server.

    Raises:
        FineTuneError: the pods cannot be listed.
    """
    if (backend := backend_of(job)) != KUBERNETES:
        note = f"the job runs on backend {backend}, whose pages cannot be read from here"
        return PodPages([], notes=[note])
    pods = await pods_of(client, job)
    num_nodes = count_in(job, "status", "nodes", "desired") or len(pods)
    num_ranks = count_in(job, "status", "nodes", "worldSize") or 0
    names = [get_in(pods.get(at), "spec", "nodeName") or "?" for at in range(num_nodes)]
    pages = PodPages(names, num_ranks // max(1, num_nodes))
    port = metrics_port(job)
    requests = [
        _page(client, pods[at], name, port, pages.notes)
        for at, name in enumerate(names)
        if get_in(pods.get(at), "status", "phase") == "Running"
    ]
    pages.notes += [
        f"pod {one['metadata']['name']} is Pending"
        for one in pods.values()
        if get_in(one, "status", "phase") in (None, "Pending")
    ]
    pages.pages += [one for one in await asyncio.gather(*requests) if one is not None]
    if 0 in pods and pages.pages:
        pages.suspects = await _suspects(client, pods[0], port)
    return pages


def metrics_port(job: Object) -> int:
    """Return the port of the pages of a job's pods."""
    return count_in(job, "spec", "observability", "metricsPort") or _DEFAULT_PORT


async def pods_of(client: KubeClient, job: Object) -> dict[int, Object]:
    """Return the pods of the newest attempt of a job of backend kubernetes, by node rank.

    Raises:
        FineTuneError: the pods cannot be listed.
    """
    namespace, number = job["metadata"]["namespace"], count_in(job, "status", "attempt") or 0
    selector = f"{JOB_UID_LABEL}={job['metadata']['uid']},{ATTEMPT_LABEL}={number}"
    listing = await client.list(PODS, namespace, label_selector=selector)
    return {_index(one): one for one in listing.items}


async def _page(
    client: KubeClient, pod: Object, node: str, port: int, notes: list[str]
) -> NodePage | None:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    try:
        return read_page(node, await _get(client, pod, port, "metrics"))
    except ForbiddenError as error:
        remedy = f"request permission to get pods/proxy in {namespace}"
        sentence = f"the pages of the pods cannot be read ({error}); {remedy}"
        notes += [sentence] if sentence not in notes else []
    except (ApiError, TimeoutError, ValueError) as error:
        notes.append(f"the page of pod {name} cannot be read ({error or 'timeout'})")
    return None


async def _suspects(client: KubeClient, pod: Object, port: int) -> tuple[SuspectRow, ...]:
    """Return the present suspects from the pod of rank 0; the status lists them a little later."""
    try:
        progress = json.loads(await _get(client, pod, port, "progress"))
    except (ApiError, TimeoutError, ValueError):
        return ()
    return suspects_in(get_in(progress, "suspects"))


async def _get(client: KubeClient, pod: Object, port: int, page: str) -> str:
    metadata = pod["metadata"]
    path = PODS.path(metadata["namespace"], f"{metadata['name']}:{port}", "proxy", page)
    async with asyncio.timeout(_SECONDS):
        lines = [line async for line in client.lines(Call("get", PODS, path))]
    return b"\n".join([*lines, b""]).decode(errors="replace")


def _index(pod: Object) -> int:
    index = get_in(pod, "metadata", "labels", INDEX_LABEL)
    return int(index) if str(index).isdecimal() else 0
