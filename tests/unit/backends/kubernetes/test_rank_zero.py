"""Rank 0's name is written where it is missing or leads elsewhere, and else left alone."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from finetune_operator.backends.base import Attempt, BackendContext, Effect, Handle
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.child_names import FACTS_ANNOTATION
from finetune_operator.backends.kubernetes.pod_facts import trim_pod
from finetune_operator.backends.kubernetes.rank_zero import AGAIN_SECONDS
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.compact import compact
from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_PROFILES,
    JOBS,
    PODS,
    Object,
    Resource,
)
from support.api.builders import planned, ref_to
from support.kernel.fake_api import FakeApi
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_cases import JOB, profile

PLAN = planned(**{**JOB, "topology__nodes": 2})


class OnePod:
    """A cluster in which rank 0's pod runs and the other one does not yet.

    Attributes:
        calls: Requests about EndpointSlices since `forget`, as verbs.
        watches_slices: Whether the next process is shown EndpointSlices.
    """

    watches_slices = True

    def __init__(self) -> None:
        self.api = FakeApi()
        self.calls: list[str] = []
        self.api.before = self._hear
        self._pods: list[Object] = []

    def _hear(self, verb: str, resource: Resource, name: str) -> None:
        if resource == ENDPOINT_SLICES:
            self.calls.append(verb)

    def process(self) -> KubernetesBackend:
        """Return the backend of an operator process that knows what the cluster holds."""
        self.calls.clear()
        self._caches: dict[Resource, ObjectCache] = {}
        spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
        metadata = {"name": "default", "resourceVersion": "1"}
        self._cache(FINE_TUNE_PROFILES).put({"metadata": metadata, "spec": spec})
        self._cache(JOBS).replace(self.api.objects(JOBS), "0")
        self._cache(PODS).replace(self._pods, "0")
        if self.watches_slices:
            slices = [compact(one) for one in self.api.objects(ENDPOINT_SLICES)]
            self._cache(ENDPOINT_SLICES).replace(slices, "0")
        return KubernetesBackend(BackendContext(Path(), cluster=Cluster(self.api, self._cache)))

    def _cache(self, resource: Resource) -> ObjectCache:
        return self._caches.setdefault(resource, ObjectCache(resource))

    def run_rank_zero(self, handle: Handle, address: str, version: int) -> None:
        metadata = {
            "uid": "pod-0",
            "name": f"{handle.name.partition('/')[2]}-0",
            "namespace": "default",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {JOB_LABEL: "tiny", "batch.kubernetes.io/job-completion-index": "0"},
            "ownerReferences": [{"controller": True, "uid": handle.uid}],
        }
        running = [{"name": "trainer", "state": {"running": {}}}]
        status = {"phase": "Running", "podIP": address, "containerStatuses": running}
        pod: Object = {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status}
        self._pods = [trim_pod(pod)]
        self._cache(PODS).replace(self._pods, str(version))

    def end_rank_zero(self) -> None:
        self._pods = []
        self._cache(PODS).replace(self._pods, "9")
        over = {"conditions": [{"type": "Failed", "status": "True"}]}
        for one in self.api.objects(JOBS):
            metadata = {**one["metadata"], "resourceVersion": "9"}
            self._cache(JOBS).put({**one, "metadata": metadata, "status": over})

    @property
    def endpoint(self) -> tuple[str, list[str]]:
        """Host and addresses of the only name there is."""
        (made,) = self.api.objects(ENDPOINT_SLICES)
        (one,) = made["endpoints"]
        return one["hostname"], one["addresses"]


async def submitted(backend: KubernetesBackend, number: int = 1) -> Handle:
    return await backend.submit(backend.render(PLAN, Attempt(number)))


async def named(world: OnePod) -> tuple[KubernetesBackend, Handle]:
    """Return a process that has named rank 0 of its first attempt, and that attempt."""
    backend = world.process()
    handle = await submitted(backend)
    world.run_rank_zero(handle, "10.0.0.1", 1)
    await backend.observe(ref_to(handle))
    return backend, handle


def test_a_first_attempt_costs_one_request_and_another_look_none() -> None:
    async def work() -> None:
        world = OnePod()
        backend = world.process()
        handle = await submitted(backend)
        world.run_rank_zero(handle, "10.0.0.1", 1)
        for _ in range(2):
            await backend.observe(ref_to(handle))
        assert world.calls == ["create"]
        assert world.endpoint == ("tiny-1-0", ["10.0.0.1"])

    run(work())


def test_a_new_process_reads_a_name_that_leads_there_and_writes_nothing() -> None:
    async def work() -> None:
        world = OnePod()
        _, handle = await named(world)
        # Another version has written it.
        (made,) = world.api.objects(ENDPOINT_SLICES)
        conditions = {"ready": True, "serving": True, "terminating": False}
        made["endpoints"][0]["conditions"] = conditions
        await world.api.replace(ENDPOINT_SLICES, made, "default")
        second = world.process()
        for _ in range(2):
            await second.observe(ref_to(handle))
        assert world.calls == []

    run(work())


def test_a_new_process_gives_a_name_that_nobody_has_given() -> None:
    async def work() -> None:
        world = OnePod()
        handle = await submitted(world.process())
        second = world.process()
        world.run_rank_zero(handle, "10.0.0.1", 1)
        await second.observe(ref_to(handle))
        assert world.calls == ["create"]
        assert world.endpoint == ("tiny-1-0", ["10.0.0.1"])

    run(work())


def test_an_edited_batch_job_cannot_have_a_pod_named_below_the_service_of_another() -> None:
    async def work() -> None:
        world = OnePod()
        handle = await submitted(world.process())
        (made,) = world.api.objects(JOBS)
        facts = json.loads(made["metadata"]["annotations"][FACTS_ANNOTATION])
        forged = {FACTS_ANNOTATION: json.dumps({**facts, "service": "database"})}
        change = {"metadata": {"annotations": forged}}
        await world.api.patch(JOBS, "tiny-1", "default", change)
        second = world.process()
        world.run_rank_zero(handle, "10.0.0.1", 1)
        await second.observe(ref_to(handle))
        (named,) = world.api.objects(ENDPOINT_SLICES)
        assert named["metadata"]["name"] == "tiny-finetune"
        assert named["metadata"]["labels"]["kubernetes.io/service-name"] == "tiny-finetune"

    run(work())


def rename(make: Callable[[OnePod, KubernetesBackend], KubernetesBackend]) -> OnePod:
    async def work() -> OnePod:
        world = OnePod()
        backend, handle = await named(world)
        backend = make(world, backend)
        world.calls.clear()
        world.run_rank_zero(handle, "10.0.0.2", 2)
        await backend.observe(ref_to(handle))
        return world

    return run(work())


def test_a_new_address_of_its_pod_is_told_by_the_same_process() -> None:
    world = rename(lambda world, backend: backend)
    assert world.endpoint == ("tiny-1-0", ["10.0.0.2"])
    assert world.calls == ["patch"]


def test_a_new_address_of_its_pod_is_told_by_a_new_process() -> None:
    world = rename(lambda world, backend: world.process())
    assert world.endpoint == ("tiny-1-0", ["10.0.0.2"])
    assert world.calls == ["patch"]


def test_a_process_that_is_shown_no_names_reads_before_it_writes() -> None:
    async def work() -> None:
        world = OnePod()
        handle = await submitted(world.process())
        world.watches_slices = False
        second = world.process()
        for version in (1, 2):
            world.run_rank_zero(handle, f"10.0.0.{version}", version)
            await second.observe(ref_to(handle))
        assert world.calls == ["get", "create", "get", "patch"]
        assert world.endpoint == ("tiny-1-0", ["10.0.0.2"])

    run(work())


def test_an_address_that_changes_again_is_told_again() -> None:
    async def work() -> None:
        world = OnePod()
        handle = await submitted(world.process())
        second = world.process()
        for version in (1, 2):
            world.run_rank_zero(handle, f"10.0.0.{version}", version)
            await second.observe(ref_to(handle))
        assert world.calls == ["create", "patch"]
        assert world.endpoint == ("tiny-1-0", ["10.0.0.2"])

    run(work())


def test_a_name_that_was_deleted_meanwhile_is_given_again() -> None:
    async def work() -> None:
        world = OnePod()
        _, handle = await named(world)
        second, deleted = world.process(), world.api.before

        def delete(verb: str, resource: Resource, name: str) -> None:
            deleted(verb, resource, name)
            if (verb, resource) == ("patch", ENDPOINT_SLICES):
                raise NotFoundError(404, "NotFound", "it was deleted")

        world.api.before = delete
        world.run_rank_zero(handle, "10.0.0.2", 2)
        told = (await second.observe(ref_to(handle))).obstacle
        assert told is not None
        assert (told.reason, told.effect) == ("CreationFailed", Effect.STALLED)
        world.api.before = deleted
        await world.api.delete(ENDPOINT_SLICES, "tiny-finetune", "default")
        await asyncio.sleep(AGAIN_SECONDS)
        await second.observe(ref_to(handle))
        assert world.endpoint == ("tiny-1-0", ["10.0.0.2"])

    run(work())


def test_the_next_attempt_takes_the_name_over_and_creates_nothing_that_is_there() -> None:
    async def work() -> None:
        world = OnePod()
        backend, _ = await named(world)
        world.end_rank_zero()
        written: list[str] = []
        world.api.after = lambda verb, resource, name: written.append(f"{verb} {name}")
        second = await submitted(backend, 2)
        world.run_rank_zero(second, "10.0.0.1", 10)
        await backend.observe(ref_to(second))
        assert written == ["create tiny-2", "patch tiny-finetune"]
        assert world.endpoint == ("tiny-2-0", ["10.0.0.1"])

    run(work())
