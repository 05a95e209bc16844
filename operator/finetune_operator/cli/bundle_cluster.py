"""Objects and logs of a job in a cluster for `ftctl doctor --bundle`.

The user's permissions apply. A part that cannot be read is left out, with the reason.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator

from finetune_operator.backends.kubernetes.child_names import BACKEND as KUBERNETES
from finetune_operator.backends.kubernetes.log_tail import kept_tail
from finetune_operator.cli.bundle import MAX_BYTES, MAX_LOGS, NUM_LINES, Bundle
from finetune_operator.cli.cluster_logs import RankLog, lines_in_cluster
from finetune_operator.cli.cluster_probe import Probe
from finetune_operator.cli.doctor_cluster import REQUEST_SECONDS
from finetune_operator.cli.doctor_replicas import SELECTOR
from finetune_operator.cli.top_cluster import backend_of, get_job
from finetune_operator.cli.top_rows import get_in
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import ForbiddenError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import ClientOptions
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_PROFILES, JOBS, PODS, Object

_LOG_SECONDS = 10.0
_OPERATOR_LINES = 5000
_FIELDS = {
    "metadata": (
        *("name", "namespace", "uid", "labels", "generation", "creationTimestamp"),
        *("deletionTimestamp", "finalizers", "ownerReferences"),
    ),
    "spec": (
        *("nodeName", "schedulerName", "priorityClassName", "restartPolicy", "tolerations"),
        *("nodeSelector", "suspend", "parallelism", "completions", "backoffLimit"),
    ),
    "status": (
        *("phase", "reason", "message", "startTime", "completionTime", "conditions"),
        *("initContainerStatuses", "containerStatuses", "active", "ready", "succeeded", "failed"),
    ),
}
"""Fields of batch Jobs and pods. The spec of a container is not among them."""


async def add_cluster_job(bundle: Bundle, name: str, namespace: str | None) -> None:
    """Add the job, its profile, Events, batch Jobs, pods, and the ends of their logs.

    Args:
        bundle: The bundle to add to.
        name: Name of the job in the cluster that kubectl uses.
        namespace: Namespace of the job; None takes the kubeconfig's.

    Raises:
        FineTuneError: the job does not exist, or cannot be read.
    """
    options = ClientOptions(request_seconds=REQUEST_SECONDS, user_agent="ftctl-doctor")
    async with await HttpClient.connect(options=options) as client:
        await _add_job(bundle, client, Key(namespace or client.access.namespace, name))


async def _add_job(bundle: Bundle, client: HttpClient, job: Key) -> None:
    found = await get_job(client, job)
    bundle.add_objects("job.yaml", found)
    probe = Probe(client, job.namespace)
    backend = backend_of(found)
    name = get_in(found, "spec", "backend", backend, "profile")
    profiles = await probe.list(
        "", "profile", FINE_TUNE_PROFILES, field_selector=f"metadata.name={name}"
    )
    selector = f"{JOB_UID_LABEL}={found['metadata']['uid']}"
    batch_jobs, pods = [
        await probe.list("", kind.plural, kind, job.namespace, label_selector=selector)
        for kind in (JOBS, PODS)
    ]
    bundle.add_objects("profile.yaml", *(profiles or ()))
    bundle.add_objects("batch-jobs.yaml", *map(_shortened, batch_jobs or ()))
    bundle.add_objects("pods.yaml", *map(_shortened, pods or ()))
    for one in batch_jobs or ():
        if lines := kept_tail(one):
            bundle.add_log(f"logs/{one['metadata']['name']}.last-lines.log", lines)
    related = {one["metadata"]["uid"] for one in (found, *(batch_jobs or ()), *(pods or ()))}
    events = await probe.list("", "events", EVENTS, job.namespace)
    ours = (one for one in events or () if _is_about(one, job.name, related))
    bundle.add_objects("events.yaml", *ours)
    if backend == KUBERNETES:
        await _add_pod_logs(bundle, client, pods or [])
    else:
        wanted = RankLog(0, previous=False, follow=False)
        await _add_log(bundle, "logs/rank-0.log", lines_in_cluster(client, job, wanted, {}))
    await _add_operator_log(bundle, probe, str(job))
    bundle.left_out += [f"{one.name}: {one.detail}" for one in probe.findings]


async def _add_pod_logs(bundle: Bundle, client: HttpClient, pods: list[Object]) -> None:
    """Add the logs of the containers that have started; failed and newer pods come first."""
    pods = sorted(pods, key=lambda one: one["metadata"].get("creationTimestamp", ""), reverse=True)
    pods.sort(key=lambda one: get_in(one, "status", "phase") != "Failed")
    reads = []
    for one in pods[:MAX_LOGS]:
        name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
        for kind in ("initContainerStatuses", "containerStatuses"):
            for container in get_in(one, "status", kind) or ():
                if "waiting" not in (container.get("state") or {}):
                    of = container["name"]
                    lines = client.log(
                        name, namespace, container=of, tail=NUM_LINES, max_bytes=MAX_BYTES
                    )
                    reads.append(_add_log(bundle, f"logs/{name}/{of}.log", lines))
    await asyncio.gather(*reads)  # the nodes of several pods may not respond
    if len(pods) > MAX_LOGS:
        bundle.left_out.append(f"logs of {len(pods) - MAX_LOGS} of {len(pods)} pods")


async def _add_operator_log(bundle: Bundle, probe: Probe, job: str) -> None:
    """Add the lines of the operator's logs that name the job."""
    is_named = re.compile(rf"(?<![\w.-]){re.escape(job)}(?![\w.])").search
    pods = await probe.list("", "the operator's log", PODS, label_selector=SELECTOR)
    for one in pods or ():
        name, namespace = one["metadata"]["name"], one["metadata"]["namespace"]
        lines = probe.client.log(name, namespace, tail=_OPERATOR_LINES, max_bytes=16 * MAX_BYTES)
        ours = (line async for line in lines if is_named(line))
        await _add_log(bundle, f"operator/{name}.log", ours)


async def _add_log(bundle: Bundle, path: str, lines: AsyncIterator[str]) -> None:
    last: deque[str] = deque(maxlen=NUM_LINES)
    try:
        async with asyncio.timeout(_LOG_SECONDS):
            async for line in lines:
                last.append(line)
    except (FineTuneError, ImportError, TimeoutError, ValueError) as error:
        why = "you may not read it" if isinstance(error, ForbiddenError) else "cannot be read"
        bundle.left_out.append(f"{path}: {why} ({error or 'timeout'})")
    if last:
        bundle.add_log(path, list(last))


def _shortened(obj: Object) -> Object:
    return {
        part: {name: value for name, value in (obj.get(part) or {}).items() if name in names}
        for part, names in _FIELDS.items()
    }


def _is_about(event: Object, job: str, related: set[str]) -> bool:
    """Whether an Event is about the job or an attempt; pods may be deleted by now."""
    subject = event.get("involvedObject") or {}
    is_attempt = re.fullmatch(rf"{re.escape(job)}-\d+(-.*)?", str(subject.get("name")))
    return subject.get("uid") in related or (
        is_attempt is not None and subject.get("kind") in ("Job", "Pod")
    )
