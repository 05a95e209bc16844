"""What keeps the kubernetes backend from creating an attempt, on a server in memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Attempt, BackendContext, Found
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.pod_facts import trim_pod
from finetune_operator.errors import TransientError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, JOBS, PODS, Object, Resource
from support.api.builders import planned, ref_to
from support.kernel.fake_api import FakeApi
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_cases import JOB, profile

Caches = Callable[[Resource], ObjectCache]


def process(api: FakeApi) -> tuple[KubernetesBackend, Caches]:
    """Return the backend of one operator process, and its caches, which know a profile alone."""
    caches: dict[Resource, ObjectCache] = {}

    def cache(resource: Resource) -> ObjectCache:
        return caches.setdefault(resource, ObjectCache(resource))

    spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    metadata = {"name": "default", "resourceVersion": "1"}
    cache(FINE_TUNE_PROFILES).put({"metadata": metadata, "spec": spec})
    cache(JOBS).replace([], "0")
    return KubernetesBackend(BackendContext(Path(), cluster=Cluster(api, cache))), cache


def opened(job: FineTuneJob) -> FineTuneJob:
    """Return the job as its status tells of attempt 1."""
    return job.model_copy(update={"status": job.status.model_copy(update={"attempt": 1})})


def pod(phase: str, version: int, **status: Any) -> Object:
    metadata: Object = {
        "name": "tiny-1-0-abc",
        "uid": "p",
        "namespace": "default",
        "resourceVersion": str(version),
    }
    owner = {"kind": "Job", "name": "tiny-1", "uid": "deleted", "controller": True}
    metadata |= {"labels": {JOB_LABEL: "tiny"}, "ownerReferences": [owner]}
    return trim_pod({"metadata": metadata, "status": {"phase": phase, **status}})


def test_no_attempt_is_created_beside_a_pod_whose_batch_job_was_deleted_unseen() -> None:
    async def work() -> None:
        api = FakeApi()
        backend, cache = process(api)
        request = backend.render(planned(**JOB), Attempt(1))
        cache(PODS).put(pod("Running", 1))
        with pytest.raises(TransientError, match="pod tiny-1-0-abc still exists"):
            await backend.submit(request)
        assert api.objects(JOBS) == []
        cache(PODS).put(pod("Failed", 2))
        await backend.submit(request)
        assert [one["metadata"]["name"] for one in api.objects(JOBS)] == ["tiny-1"]

    run(work())


def test_a_pod_on_a_silent_node_that_prevents_an_attempt_is_named_with_the_remedy() -> None:
    async def work() -> None:
        backend, cache = process(FakeApi())
        times = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        conditions = [
            {"type": "Ready", "status": "False", **times},
            {"type": "ContainersReady", "status": "True", **times},
        ]
        cache(PODS).put(pod("Running", 1, conditions=conditions))
        with pytest.raises(TransientError, match=r"abc has not responded since 2026.*kubectl del"):
            await backend.submit(backend.render(planned(**JOB), Attempt(1)))

    run(work())


def keys_of(batch_job: Mapping[str, Any]) -> list[str]:
    env = batch_job["spec"]["template"]["spec"]["containers"][0]["env"]
    return [one["value"] for one in env if one["name"] == "FINETUNE_RDZV_KEY"]


def test_each_attempt_of_several_nodes_has_a_key_that_no_printed_object_shows() -> None:
    plan, keys = planned(**{**JOB, "topology__nodes": 2}), []

    async def attempt(number: int) -> None:
        api = FakeApi()
        backend, _ = process(api)
        request = backend.render(plan, Attempt(number))
        handle = await backend.submit(request)
        (created,) = api.objects(JOBS)
        (key,) = keys_of(created)
        keys.append(bytes.fromhex(key))
        shown = repr(
            (request, handle, created["metadata"], created["spec"]["template"]["metadata"])
        )
        assert key not in shown
        assert "FINETUNE_RDZV_KEY" not in shown
        adopting, _ = process(api)
        assert await adopting.submit(request) == handle
        assert api.objects(JOBS) == [created]

    run(attempt(1))
    run(attempt(2))
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]


def test_a_single_node_needs_no_key() -> None:
    async def work() -> None:
        api = FakeApi()
        backend, _ = process(api)
        await backend.submit(backend.render(planned(**JOB), Attempt(1)))
        assert [keys_of(one) for one in api.objects(JOBS)] == [[]]

    run(work())


def test_an_attempt_that_was_opened_is_found_before_a_watch_tells_of_it() -> None:
    async def work() -> None:
        api, plan = FakeApi(), planned(**JOB)
        first, _ = process(api)
        handle = await first.submit(first.render(plan, Attempt(1)))
        second, cache = process(api)
        assert await second.find(plan.job, Attempt(1)) is None  # nothing says that there is one
        found = await second.find(opened(plan.job), Attempt(1))
        assert isinstance(found, Found)
        assert found.handle == handle
        assert len(cache(JOBS)) == 1  # or the next look would take it for one that was deleted
        assert not (await second.observe(ref_to(handle))).all_gone

    run(work())


def test_an_attempt_is_not_taken_for_one_that_never_was_while_a_pod_of_it_lives() -> None:
    async def work() -> None:
        api, plan = FakeApi(), planned(**JOB)
        backend, cache = process(api)
        cache(PODS).put(pod("Running", 1))
        with pytest.raises(TransientError, match="pod tiny-1-0-abc still exists"):
            await backend.find(opened(plan.job), Attempt(1))
        cache(PODS).put(pod("Failed", 2))
        assert await backend.find(opened(plan.job), Attempt(1)) is None

    run(work())
