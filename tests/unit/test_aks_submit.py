"""What keeps the aks backend from creating an attempt, on a server in memory."""

from pathlib import Path

import pytest

from aks_cases import JOB, profile
from backend_contract import planned
from fake_api import FakeApi
from finetune_operator.backends.aks.backend import AksBackend
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.errors import TransientError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, JOBS, PODS, Object, Resource
from virtual_time import run


def pod(phase: str, version: int) -> Object:
    metadata = {"name": "tiny-1-0-abc", "namespace": "default", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {JOB_LABEL: "tiny"}}, "status": {"phase": phase}}


def test_no_attempt_is_created_beside_a_pod_whose_batch_job_was_deleted_unseen() -> None:
    caches: dict[Resource, ObjectCache] = {}

    def cache(resource: Resource) -> ObjectCache:
        return caches.setdefault(resource, ObjectCache(resource))

    async def work() -> None:
        api = FakeApi()
        spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
        metadata = {"name": "default", "resourceVersion": "1"}
        cache(FINE_TUNE_PROFILES).put({"metadata": metadata, "spec": spec})
        backend = AksBackend(BackendContext(Path(), cluster=Cluster(api, cache)))
        request = backend.render(planned(**JOB), Attempt(1))
        cache(PODS).put(pod("Running", 1))
        with pytest.raises(TransientError, match="pod tiny-1-0-abc is still there"):
            await backend.submit(request)
        assert api.objects(JOBS) == []
        cache(PODS).put(pod("Failed", 2))
        await backend.submit(request)
        assert [one["metadata"]["name"] for one in api.objects(JOBS)] == ["tiny-1"]

    run(work())
