"""Pods that seem to run, on a node that is only an object: for whole lives of jobs without one.

The test, or the benchmark, is their kubelet. Rank 0's progress is served at an address of this
machine, which every played pod has.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from finetune_operator.kube.api_errors import UnavailableError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import LEASES, NODES, PODS, Object, Resource
from finetune_trainer.config import Progress

LABEL = "finetune.test/played"
_PERSISTENT_VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
_CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
_LEASE_SECONDS = 40


def own_address() -> str:
    """Return an address of this machine that is not loopback, which no endpoint may be."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@dataclass
class ProgressServer:
    """What rank 0 of every played pod says; change `progress` as the run goes on.

    Attributes:
        port: Where it is served; the jobs' metricsPort.
        asked: How often anybody has asked.
        unread: Answers that whoever has asked has not read to their end.
    """

    progress: Progress = field(default_factory=Progress)
    port: int = 0
    asked: int = 0
    unread: int = 0

    @asynccontextmanager
    async def serving(self, address: str, port: int = 0) -> AsyncIterator["ProgressServer"]:
        server = await asyncio.start_server(self._answer, address, port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.unread += 1
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        body = self.progress.to_json().encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await writer.drain()
        await reader.read()  # whoever has read all of it closes
        writer.close()
        self.unread -= 1


@asynccontextmanager
async def played_node(
    client: KubeClient, name: str, *, group: str = "", pods: str = "10k"
) -> AsyncIterator["asyncio.Task[None]"]:
    """Have a node that takes the pods of jobs with `profile_nodes(group)`, and no others.

    Args:
        client: A cluster-admin's.
        name: Name of the node.
        group: Name of a group of nodes; by default the node is its own group.
        pods: How many pods have room.

    Yields:
        The task that renews its heartbeat; the node is silent once it is cancelled.
    """
    size = {"cpu": "4k", "memory": "4Ti", "pods": pods, "nvidia.com/gpu": "4k"}
    made = {
        "metadata": {
            "name": name,
            "labels": {
                LABEL: group or name,
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
            },
        },
        "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
    }
    await client.create(NODES, made)
    lease = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_SECONDS, "renewTime": _now()}
    await client.create(LEASES, {"metadata": {"name": name}, "spec": lease}, "kube-node-lease")
    status = {"capacity": size, "allocatable": size}
    await client.patch(NODES, name, None, {"status": status}, subresource="status")
    await report_ready(client, name)
    # The controller taints a new node until it has seen it ready.
    taints = {"spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]}}
    await client.patch(NODES, name, None, taints)
    heart = asyncio.create_task(keep_ready(client, name))
    try:
        yield heart
    finally:
        heart.cancel()
        await asyncio.gather(heart, return_exceptions=True)
        await client.delete(NODES, name)
        await client.delete(LEASES, name, "kube-node-lease")


async def report_ready(client: KubeClient, name: str) -> None:
    """Renew the heartbeat of a node, and report that it is ready."""
    now = _now()
    await client.patch(LEASES, name, "kube-node-lease", {"spec": {"renewTime": now}})
    ready = {"type": "Ready", "status": "True", "reason": "Played", "message": ""}
    ready |= {"lastHeartbeatTime": now, "lastTransitionTime": now}
    status = {"status": {"conditions": [ready]}}
    await client.patch(NODES, name, None, status, subresource="status")


async def keep_ready(client: KubeClient, name: str) -> None:
    """Renew the heartbeat of a node; a node without it gets no pods, and later loses its own."""
    while True:
        await asyncio.sleep(_LEASE_SECONDS / 4)
        with contextlib.suppress(UnavailableError):  # as a kubelet, it retries
            await client.patch(LEASES, name, "kube-node-lease", {"spec": {"renewTime": _now()}})


def profile_nodes(name: str) -> dict[str, Any]:
    """Return `spec.nodes` of a profile whose pods go to the played node of that name."""
    return {
        "selector": {LABEL: name},
        "tolerations": [{"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}],
    }


@asynccontextmanager
async def bound_claims(
    client: KubeClient, names: Sequence[str], namespace: str
) -> AsyncIterator[None]:
    """Have claims, each bound to a volume of its own that nobody mounts.

    The volumes come first and are waited for: a claim that meets an unknown volume is looked at
    again only when everything is, which the controller does every 15 s.
    """
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    volumes = {name: f"{namespace}-{name}" for name in names}
    for name, volume in volumes.items():
        spec: dict[str, Any] = {
            "capacity": size,
            "accessModes": modes,
            "hostPath": {"path": "/nowhere"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": namespace, "name": name},
        }
        await client.create(_PERSISTENT_VOLUMES, {"metadata": {"name": volume}, "spec": spec})
    try:
        for volume in volumes.values():
            await _in_phase(client, _PERSISTENT_VOLUMES, volume, None, "Available")
        for name, volume in volumes.items():
            wanted = {"accessModes": modes, "resources": {"requests": size}}
            claim = {"volumeName": volume, "storageClassName": "", **wanted}
            await client.create(_CLAIMS, {"metadata": {"name": name}, "spec": claim}, namespace)
        for name in names:
            await _in_phase(client, _CLAIMS, name, namespace, "Bound")
        yield
    finally:
        for volume in volumes.values():
            await client.delete(_PERSISTENT_VOLUMES, volume)


async def _in_phase(
    client: KubeClient, kind: Resource, name: str, namespace: str | None, phase: str
) -> None:
    async with asyncio.timeout(60):
        while (await client.get(kind, name, namespace)).get("status", {}).get("phase") != phase:
            await asyncio.sleep(0.05)


async def run_pod(client: KubeClient, pod: Object, address: str) -> None:
    """Let a pod that has a node run."""
    state = {"running": {"startedAt": _now()}}
    ready = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady")]
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": _now(),
        "conditions": [*_scheduled(pod), *ready, {"type": "Ready", "status": "True"}],
        "containerStatuses": [_container(pod, state, is_ready=True)],
    }
    await _set_status(client, pod, status)


async def end_pod(client: KubeClient, pod: Object, code: int, words: str = "") -> None:
    """Let a pod end with an exit code and a termination message."""
    now = _now()
    ended: dict[str, Any] = {"exitCode": code, "startedAt": now, "finishedAt": now}
    ended |= {"reason": "Error" if code else "Completed", "message": words}
    status = {
        "phase": "Failed" if code else "Succeeded",
        "conditions": [*_scheduled(pod), {"type": "Ready", "status": "False"}],
        "containerStatuses": [_container(pod, {"terminated": ended}, is_ready=False)],
    }
    await _set_status(client, pod, status)


async def _set_status(client: KubeClient, pod: Object, status: Object) -> None:
    metadata = pod["metadata"]
    place = (metadata["name"], metadata["namespace"])
    await client.patch(PODS, *place, {"status": status}, subresource="status")


def _scheduled(pod: Object) -> list[Object]:
    conditions = pod.get("status", {}).get("conditions") or ()
    return [one for one in conditions if one["type"] == "PodScheduled"]


def _container(pod: Object, state: Object, *, is_ready: bool) -> Object:
    (one,) = pod["spec"]["containers"]
    kept = {"name": one["name"], "image": one["image"], "imageID": ""}
    return {**kept, "ready": is_ready, "restartCount": 0, "state": state}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
