"""Creates many objects at once and notes when what they cause is there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    JOBS,
    NAMESPACES,
    PODS,
    SERVICES,
    Object,
    Resource,
)

_CONNECTIONS = 16
_JOB_NAME = "batch.kubernetes.io/job-name"
_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_ENDED = ("Succeeded", "Failed")


@dataclass
class Sightings:
    """When a batch Job or a pod of a namespace was first seen so, on the loop's clock.

    Attributes:
        jobs: By name: seen at all.
        running: Pods by uid: in phase Running.
        alive: Pods by batch Job: uids of those that have not ended.
        gone: By batch Job: none of its pods lives any more.
    """

    jobs: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)
    alive: dict[str, set[str]] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, check: Callable[[], bool], seconds: float, what: str) -> None:
        """Return once it is so.

        Raises:
            TimeoutError: it was not in time; `what` is the message.
        """
        try:
            async with asyncio.timeout(seconds):
                while not check():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {seconds:g} s: {what}") from None

    def note_job(self, kind: str, made: Object, now: float) -> None:
        self.jobs.setdefault(made["metadata"]["name"], now)

    def note_pod(self, kind: str, made: Object, now: float) -> None:
        uid, phase = made["metadata"]["uid"], made.get("status", {}).get("phase")
        name = made["metadata"]["labels"][_JOB_NAME]
        alive = self.alive.setdefault(name, set())
        if phase == "Running":
            self.running.setdefault(uid, now)
        if kind == "DELETED" or phase in _ENDED:
            alive.discard(uid)
            if not alive:
                self.gone.setdefault(name, now)
        else:
            alive.add(uid)


@asynccontextmanager
async def watching(client: KubeClient, namespace: str) -> AsyncIterator[Sightings]:
    """Note what happens to batch Jobs and pods of a namespace that is empty yet."""
    seen = Sightings()
    tasks = [
        asyncio.create_task(follow(client, JOBS, namespace, seen.note_job, seen.changed)),
        asyncio.create_task(follow(client, PODS, namespace, seen.note_pod, seen.changed)),
    ]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def follow(
    client: KubeClient,
    resource: Resource,
    namespace: str,
    note: Callable[[str, Object, float], None],
    changed: asyncio.Event,
) -> None:
    """Call `note` with each event, its object and the time from now on, until cancelled."""
    loop = asyncio.get_running_loop()
    version = (await client.list(resource, namespace)).resource_version
    while True:
        async for event in client.watch(resource, namespace, resource_version=version):
            version = event.resource_version
            if event.type != "BOOKMARK":
                note(event.type, event.object, loop.time())
                changed.set()


async def create_all(
    client: KubeClient, resource: Resource, bodies: Sequence[Mapping[str, Any]], namespace: str
) -> dict[str, float]:
    """Create everything over a few connections; return when each request began, by name."""
    rest, sent = iter(bodies), dict[str, float]()
    loop = asyncio.get_running_loop()

    async def work() -> None:
        for body in rest:
            sent[body["metadata"]["name"]] = loop.time()
            await client.create(resource, body, namespace)

    await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
    return sent


@asynccontextmanager
async def fresh_namespace(client: KubeClient, start: str) -> AsyncIterator[str]:
    """Yield a namespace that pods can be created in; afterwards wait until it is gone."""
    made = await client.create(NAMESPACES, {"metadata": {"generateName": f"{start}-"}})
    name = str(made["metadata"]["name"])
    try:
        while not await _exists(client, _ACCOUNTS, "default", name):
            await asyncio.sleep(0.05)
        yield name
    finally:
        await client.delete(NAMESPACES, name)
        async with asyncio.timeout(600):
            while await _exists(client, NAMESPACES, name):
                await asyncio.sleep(0.25)


async def _exists(
    client: KubeClient, resource: Resource, name: str, namespace: str | None = None
) -> bool:
    try:
        await client.get(resource, name, namespace)
    except NotFoundError:
        return False
    return True


async def count_surplus(client: KubeClient, namespace: str, jobs: int, pods: int) -> int:
    """Return how many children there are beyond one of each kind a job, and `pods` pods.

    Raises:
        AssertionError: children are missing.
    """
    surplus = 0
    expected = {JOBS: jobs, SERVICES: jobs, ENDPOINT_SLICES: jobs, PODS: jobs * pods}
    for resource, wanted in expected.items():
        found = len((await client.list(resource, namespace)).items)
        assert found >= wanted, f"{found} of {wanted} {resource}"
        surplus += found - wanted
    return surplus
