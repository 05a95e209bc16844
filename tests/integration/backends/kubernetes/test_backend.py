"""The kubernetes backend on a real API server with the real Job controller; no node is needed.

Pods stay Pending, so nothing is pulled and nothing trains: that is the end-to-end tests' part.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    Backend,
    BackendContext,
    Found,
    Handle,
    Observation,
    Request,
)
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.child_names import CHILDREN_ANNOTATION
from finetune_operator.errors import AlreadyOwnedError, NoLogYetError, TransientError
from finetune_operator.kube.api_errors import ConflictError, ForbiddenError
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from finetune_operator.testing.suite import OTHER_UID, UID, BackendSuite, Harness
from finetune_trainer.config import ExitCode, FailureClass, Termination
from support.api.builders import after, job, manifest, planned, ref_to
from support.cluster.operators import KUBECONFIG, Api, condition, open_api, wait_until
from support.kubernetes.kubernetes_cases import CASES, JOB, profile

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
]
KINDS = (JOBS, SERVICES, NETWORK_POLICIES, ENDPOINT_SLICES)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.namespace("kubernetes") as made:
        yield made


def caches() -> Callable[[Resource], ObjectCache]:
    """Return caches that nobody fills but with one profile: everything else is asked for."""
    made: dict[Resource, ObjectCache] = {}

    def cache(resource: Resource) -> ObjectCache:
        if resource not in made:
            made[resource] = ObjectCache(resource)
        return made[resource]

    metadata = {"name": "default", "resourceVersion": "1"}
    spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    cache(FINE_TUNE_PROFILES).put({"metadata": metadata, "spec": spec})
    return cache


class OwnedBackend(KubernetesBackend):
    """The backend, whose children belong to real FineTuneJobs that stand for those of the tests.

    A child's owner must exist, or the garbage collector takes it away.
    """

    def __init__(self, client: HttpClient, owners: Mapping[str, Object]) -> None:
        super().__init__(BackendContext(Path(), cluster=Cluster(client, caches())))
        self._owners = owners

    async def submit(self, request: Request) -> Handle:
        return await super().submit(given_to(request, self._owners[request.job_uid]))

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        uid = self._owners[job.metadata.uid]["metadata"]["uid"]
        metadata = job.metadata.model_copy(update={"uid": uid})
        return await super().find(job.model_copy(update={"metadata": metadata}), attempt)


def given_to(request: Request, owner: Object) -> Request:
    """Return the request with another owner in it."""
    uid, name = owner["metadata"]["uid"], owner["metadata"]["name"]

    def change(made: Mapping[str, Any]) -> Object:
        (reference,) = made["metadata"]["ownerReferences"]
        references = [{**reference, "uid": uid, "name": name}]
        metadata = {**made["metadata"], "ownerReferences": references}
        if kept := metadata.get("annotations", {}).get(CHILDREN_ANNOTATION):
            children = json.loads(kept)
            children["metadata"]["ownerReferences"] = references
            kept = {CHILDREN_ANNOTATION: json.dumps(children)}
            metadata["annotations"] = {**metadata["annotations"], **kept}
        return {**made, "metadata": metadata}

    return replace(request, job_uid=uid, objects=tuple(map(change, request.objects)))


class KubernetesHarness(Harness):
    def __init__(self, api: Api, namespace: str) -> None:
        self.overrides: Mapping[str, Any] = {**JOB, "metadata.namespace": namespace}
        self.job = job(**self.overrides)
        self._api = api
        self._namespace = namespace
        self._owners: dict[str, Object] = {}

    @property
    def backend(self) -> KubernetesBackend:
        """The backend for tests that run one verb after the other by `Api.run`."""
        return OwnedBackend(self._api.client, self._owners)

    @asynccontextmanager
    async def process(self) -> AsyncIterator[Backend]:
        async with await HttpClient.connect(KUBECONFIG) as client:
            yield OwnedBackend(client, self._owners)

    async def state(self) -> Any:
        async with await HttpClient.connect(KUBECONFIG) as client:
            return [
                (str(kind), one["metadata"]["name"], one["metadata"]["uid"])
                for kind in KINDS
                for one in (await client.list(kind, self._namespace)).items
            ]

    def own(self, uid: str) -> Object:
        """Create a job that stands for the one of that uid."""
        made = manifest(name=f"owner-{uid}", managedBy="tests")
        del made["metadata"]["namespace"]
        created = self._api.client.create(FINE_TUNE_JOBS, made, self._namespace)
        self._owners[uid] = self._api.run(created)
        return self._owners[uid]


@pytest.fixture
def harness(api: Api, namespace: str) -> KubernetesHarness:
    made = KubernetesHarness(api, namespace)
    for uid in (UID, OTHER_UID):
        made.own(uid)
    return made


class TestKubernetesBackend(BackendSuite):
    @pytest.fixture
    def harness(self, harness: KubernetesHarness) -> KubernetesHarness:
        return harness


def test_a_gang_is_created_once_by_as_many_writes_as_it_has_objects(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    plan = planned(**{**harness.overrides, "topology__nodes": 2})
    owned = given_to(harness.backend.render(plan, Attempt(1)), harness.own("uid-2"))
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    before = dict(api.client.calls.by_kind)
    handles = [api.run(backend.submit(owned)) for _ in range(3)]
    assert len(set(handles)) == 1
    made = {
        key: count - before.get(key, 0)
        for key, count in api.client.calls.by_kind.items()
        if key[0] not in ("get", "list") and count != before.get(key, 0)
    }
    assert made == {
        ("create", "networkpolicies", 201): 1,
        ("create", "services", 201): 1,
        ("create", "jobs", 201): 1,
    }
    pods = wait_until(lambda: api.run(api.client.list(PODS, namespace)).items, 30)
    assert {one["metadata"]["ownerReferences"][0]["uid"] for one in pods} == {handles[0].uid}
    # Nothing writes endpoints of a Service without a selector, which is what makes it cheap.
    assert api.run(api.client.list(ENDPOINT_SLICES, namespace)).items == []


def address(api: Api, namespace: str, index: int, address: str) -> None:
    """Give an address to the pod of that index, as its kubelet would."""
    (pod,) = (
        one
        for one in api.run(api.client.list(PODS, namespace)).items
        if one["metadata"]["name"].startswith(f"tiny-1-{index}-")
    )
    status = {"podIP": address, "podIPs": [{"ip": address}]}
    name, body = pod["metadata"]["name"], {"status": status}
    api.run(api.client.patch(PODS, name, namespace, body, subresource="status"))


def gang_of_two(
    api: Api, harness: KubernetesHarness, namespace: str
) -> tuple[KubernetesBackend, Handle]:
    """Submit a gang of two nodes whose pods exist; the backend stays the same process's."""
    plan = planned(**{**harness.overrides, "topology__nodes": 2})
    owned = given_to(harness.backend.render(plan, Attempt(1)), harness.own("uid-2"))
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    handle = api.run(backend.submit(owned))
    wait_until(lambda: len(api.run(api.client.list(PODS, namespace)).items) == 2, 30)
    return backend, handle


def test_rank_zero_is_found_by_name_once_its_pod_has_an_address(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend, handle = gang_of_two(api, harness, namespace)
    address(api, namespace, 1, "10.1.2.9")  # nobody asks for another's name
    for each in ("10.1.2.3", "10.1.2.4"):
        address(api, namespace, 0, each)
        before = sum(api.client.calls.by_kind.values())
        api.run(backend.observe(ref_to(handle)))
        written = sum(api.client.calls.by_kind.values())
        api.run(backend.observe(ref_to(handle)))
        assert sum(api.client.calls.by_kind.values()) - written < written - before
        (made,) = api.run(api.client.list(ENDPOINT_SLICES, namespace)).items
        (endpoint,) = made["endpoints"]
        assert (endpoint["hostname"], endpoint["addresses"]) == ("tiny-1-0", [each])
        assert made["metadata"]["labels"]["kubernetes.io/service-name"] == "tiny-finetune"


def test_a_name_of_rank_zero_that_is_taken_is_told_and_given_once_it_is_free(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    foreign = {"metadata": {"name": "tiny-finetune"}, "addressType": "IPv4", "endpoints": []}
    api.run(api.client.create(ENDPOINT_SLICES, foreign, namespace))
    backend, handle = gang_of_two(api, harness, namespace)
    address(api, namespace, 0, "10.1.2.3")
    seen = api.run(backend.observe(ref_to(handle)))
    assert seen.phase is AttemptPhase.PENDING
    assert seen.obstacle is not None
    assert seen.obstacle.reason == "CreationFailed"
    assert seen.obstacle.message == (
        f"EndpointSlice {namespace}/tiny-finetune is in the way: it exists and has no owner; "
        "delete it, or give this job another name"
    )
    assert seen.requeue_seconds is not None
    calls = dict(api.client.calls.by_kind)
    assert api.run(backend.observe(ref_to(handle))).obstacle == seen.obstacle
    again = {key: count - calls.get(key, 0) for key, count in api.client.calls.by_kind.items()}
    assert not any(count for (verb, *_), count in again.items() if verb == "create")
    api.run(api.client.delete(ENDPOINT_SLICES, "tiny-finetune", namespace))
    later = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    in_its_way = api.run(later.observe(ref_to(handle))).obstacle
    assert in_its_way is None or in_its_way.reason != "CreationFailed"
    (made,) = api.run(api.client.list(ENDPOINT_SLICES, namespace)).items
    assert made["endpoints"][0]["addresses"] == ["10.1.2.3"]


@pytest.mark.parametrize("kind", [SERVICES, NETWORK_POLICIES, JOBS], ids=lambda kind: kind.kind)
def test_what_a_user_has_under_a_name_of_ours_is_named_and_left_alone(
    api: Api, harness: KubernetesHarness, namespace: str, kind: Resource
) -> None:
    plan = planned(**{**harness.overrides, "topology__nodes": 2})
    owned = given_to(harness.backend.render(plan, Attempt(1)), harness.own("uid-2"))
    (ours,) = (one for one in owned.objects if one["kind"] == kind.kind)
    foreign = {**ours, "metadata": {**ours["metadata"], "ownerReferences": [], "labels": {}}}
    there = api.run(api.client.create(kind, foreign, namespace))
    name = there["metadata"]["name"]
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    with pytest.raises(AlreadyOwnedError, match=f"{kind.kind} {namespace}/{name} is in the way"):
        api.run(backend.submit(owned))
    left = api.run(api.client.get(kind, name, namespace))
    assert left["metadata"]["uid"] == there["metadata"]["uid"]
    assert "ownerReferences" not in left["metadata"]
    if kind is not JOBS:
        assert api.run(api.client.list(JOBS, namespace)).items == []


def test_jobs_of_one_name_in_three_namespaces_know_nothing_of_each_other(api: Api) -> None:
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    with api.namespace("a") as a, api.namespace("b") as b, api.namespace("c") as c:
        handles = {}
        for namespace in (a, b, c):
            harness = KubernetesHarness(api, namespace)
            plan = planned(**harness.overrides)
            request = given_to(harness.backend.render(plan, Attempt(1)), harness.own("uid-1"))
            handles[namespace] = api.run(backend.submit(request))
            wait_until(partial(pods_of, api, namespace), 30)
        api.run(backend.cancel(ref_to(handles[b]), after(1.0)))
        wait_until(lambda: api.run(backend.observe(ref_to(handles[b]))).all_gone, 20)
        seen = [api.run(backend.observe(ref_to(handles[one]))).phase.value for one in (a, b, c)]
        assert seen == ["Pending", "Failed", "Pending"]
        # A pod that is on its way out waits for its controller to have counted it.
        wait_until(lambda: not pods_of(api, b), 30)
        assert [len(pods_of(api, one)) for one in (a, c)] == [1, 1]


def pods_of(api: Api, namespace: str) -> list[Object]:
    return api.run(api.client.list(PODS, namespace)).items


def test_everything_of_a_job_goes_with_it(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend, handle = gang_of_two(api, harness, namespace)
    address(api, namespace, 0, "10.1.2.3")
    api.run(backend.observe(ref_to(handle)))
    kinds = (*KINDS, PODS)
    owned = {kind: api.run(api.client.list(kind, namespace)).items for kind in kinds}
    assert {kind.kind: len(found) for kind, found in owned.items()} == {
        "Job": 1, "Service": 1, "NetworkPolicy": 1, "EndpointSlice": 1, "Pod": 2,
    }  # fmt: skip
    api.run(api.client.delete(FINE_TUNE_JOBS, "owner-uid-2", namespace))
    # The garbage collector asks every 30 s which kinds there are; it may not know ours yet.
    wait_until(lambda: not any(api.run(api.client.list(one, namespace)).items for one in kinds), 60)


def test_the_longest_name_a_job_may_have_is_short_enough_for_its_pods(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    longest = "a" + "-9" * 24 + "9"
    assert len(longest) == 50
    plan = planned(**{**harness.overrides, "topology__nodes": 2, "metadata.name": longest})
    request = harness.backend.render(plan, Attempt(9999))
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    handle = api.run(backend.submit(given_to(request, harness.own("uid-2"))))
    wait_until(lambda: len(pods_of(api, namespace)) == 2, 30)
    hosts = sorted(one["spec"]["hostname"] for one in pods_of(api, namespace))
    assert hosts == [f"{longest}-9999-0", f"{longest}-9999-1"]
    assert not api.run(backend.observe(ref_to(handle))).all_gone


def test_a_pod_without_a_node_is_told_in_words_within_five_seconds(
    api: Api, harness: KubernetesHarness
) -> None:
    backend = harness.backend
    handle = api.run(backend.submit(backend.render(planned(**harness.overrides), Attempt(1))))

    def told() -> Observation | None:
        seen = api.run(backend.observe(ref_to(handle)))
        return seen if seen.obstacle else None

    seen = wait_until(told, 5)
    assert seen is not None
    assert seen.obstacle is not None
    assert seen.phase is AttemptPhase.PENDING
    # The scheduler looks for a node first, for the claims (which do not exist) afterwards.
    said = {"Unschedulable": "no nodes available", "VolumeNotReady": "not found"}
    assert seen.obstacle.message.startswith("pod tiny-1-0-")
    assert said[seen.obstacle.reason] in seen.obstacle.message


FORBIDDING: list[Any] = [
    pytest.param(
        Resource("", "v1", "resourcequotas", "ResourceQuota"),
        {"hard": {"pods": "0"}},
        "exceeded quota: none",
        id="a quota",
    ),
    pytest.param(
        Resource("", "v1", "limitranges", "LimitRange"),
        {"limits": [{"type": "Pod", "max": {"memory": "1Mi"}}]},
        "maximum memory usage per Pod is 1Mi",
        id="a limit range",
    ),
]


@pytest.mark.parametrize(("kind", "spec", "says"), FORBIDDING)
def test_pods_that_the_namespace_forbids_are_told_from_events(
    api: Api, harness: KubernetesHarness, namespace: str, kind: Resource, spec: Object, says: str
) -> None:
    api.run(api.client.create(kind, {"metadata": {"name": "none"}, "spec": spec}, namespace))
    if kind.kind == "ResourceQuota":
        wait_until(lambda: api.run(api.client.get(kind, "none", namespace)).get("status"), 30)
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    owned = given_to(
        harness.backend.render(planned(**harness.overrides), Attempt(1)), harness.own("uid-2")
    )
    handle = api.run(backend.submit(owned))

    def told() -> Observation | None:
        seen = api.run(backend.observe(ref_to(handle)))
        return seen if seen.obstacle else None

    seen = wait_until(told, 30)
    assert seen is not None
    assert seen.obstacle is not None
    assert seen.obstacle.reason == "PodsNotCreated"
    assert says in seen.obstacle.message


def patch(api: Api, namespace: str, name: str, **spec: Any) -> None:
    """Change a batch Job, as somebody may with kubectl."""
    api.run(api.client.patch(JOBS, name, namespace, {"spec": spec}))


def resume(api: Api, namespace: str, name: str) -> None:
    """Resume a batch Job, and wait until its controller has acted upon it."""
    patch(api, namespace, name, suspend=False)
    # The one that is made after it is dealt with after it.
    probe = {**CASES["one-node-on-the-cpu"].request().objects[-1]}
    probe["metadata"] = {"name": f"probe-{uuid4().hex[:8]}", "namespace": namespace}
    api.run(api.client.create(JOBS, probe, namespace))
    made = str(probe["metadata"]["name"])
    wait_until(lambda: api.run(api.client.get(JOBS, made, namespace))["status"].get("active"), 30)
    api.run(api.client.delete(JOBS, made, namespace))


def ended_as(api: Api, namespace: str, name: str) -> tuple[str, bool]:
    """Return why the batch Job is Failed, and whether it has a pod."""
    there = api.run(api.client.get(JOBS, name, namespace))
    reason = condition(there, "Failed").get("reason", "")
    own = [one for one in pods_of(api, namespace) if one["metadata"]["name"].startswith(f"{name}-")]
    return reason, bool(own)


@pytest.mark.parametrize(
    ("overrides", "runs", "undoing"),
    [
        pytest.param({"queue": {"name": "team"}}, True, {}, id="its queue resumes it"),
        pytest.param(
            {"queue": {"name": "team"}}, False, {"activeDeadlineSeconds": None},
            id="its queue let it never go",
        ),
        pytest.param(
            {}, True, {"parallelism": 1, "backoffLimit": 6}, id="somebody lets it try again"
        ),
    ],
)  # fmt: skip
def test_a_suspended_attempt_that_is_given_up_never_makes_a_pod_again(
    api: Api,
    harness: KubernetesHarness,
    namespace: str,
    overrides: Object,
    runs: bool,
    undoing: Object,
) -> None:
    backend = harness.backend
    plan = planned(**{**harness.overrides, **overrides})
    handle = api.run(backend.submit(backend.render(plan, Attempt(1))))
    if runs:
        patch(api, namespace, "tiny-1", suspend=False)
        wait_until(lambda: pods_of(api, namespace), 30)
    patch(api, namespace, "tiny-1", suspend=True)
    wait_until(lambda: not pods_of(api, namespace), 20)
    assert not api.run(backend.observe(ref_to(handle))).all_gone
    api.run(backend.cancel(ref_to(handle), after(1.0)))
    patch(api, namespace, "tiny-1", **undoing, suspend=False)
    wait_until(lambda: api.run(backend.observe(ref_to(handle))).all_gone, 20)
    resume(api, namespace, "tiny-1")
    assert ended_as(api, namespace, "tiny-1") == ("GivenUp", False)


def test_the_next_attempt_waits_until_the_one_before_has_failed_for_good(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend = harness.backend
    plan = planned(**harness.overrides)
    api.run(backend.submit(backend.render(plan, Attempt(1))))
    patch(api, namespace, "tiny-1", suspend=True)
    second = backend.render(plan, Attempt(2))

    def refusal() -> str:
        """The Job's controller may write first; the reconciler tries a conflict again, too."""
        with pytest.raises((TransientError, ConflictError)) as raised:
            api.run(backend.submit(second))
        return str(raised.value)

    wait_until(lambda: "tiny-1 has not ended yet" in refusal(), 30)
    wait_until(lambda: ended_as(api, namespace, "tiny-1")[0], 20)
    api.run(backend.submit(second))
    resume(api, namespace, "tiny-1")
    assert ended_as(api, namespace, "tiny-1") == ("GivenUp", False)


def test_a_queued_attempt_that_is_cancelled_never_starts(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend = harness.backend
    plan = planned(**{**harness.overrides, "queue": {"name": "team"}})
    handle = api.run(backend.submit(backend.render(plan, Attempt(1))))
    waiting = api.run(backend.observe(ref_to(handle)))
    assert waiting.obstacle is not None
    assert (waiting.obstacle.reason, waiting.all_gone) == ("KueueNotInstalled", False)
    api.run(backend.cancel(ref_to(handle), after(30.0)))
    wait_until(lambda: api.run(backend.observe(ref_to(handle))).all_gone, 30)
    assert api.run(backend.observe(ref_to(handle))).phase is AttemptPhase.FAILED
    resume(api, namespace, "tiny-1")
    assert ended_as(api, namespace, "tiny-1") == ("GivenUp", False)


def test_a_scheduler_that_ignores_the_pods_is_named_by_the_status(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    request = harness.backend.render(planned(**harness.overrides), Attempt(1))
    owned = given_to(request, harness.own("uid-2"))
    *others, batch_job = owned.objects
    template = batch_job["spec"]["template"]
    template = {**template, "spec": {**template["spec"], "schedulerName": "volcano"}}
    batch_job = {**batch_job, "spec": {**batch_job["spec"], "template": template}}
    now = datetime.now(UTC)
    cluster = Cluster(api.client, caches())
    backend = KubernetesBackend(BackendContext(Path(), cluster=cluster, now=lambda: now))
    handle = api.run(backend.submit(replace(owned, objects=(*others, batch_job))))
    wait_until(partial(pods_of, api, namespace), 30)
    assert api.run(backend.observe(ref_to(handle))).obstacle is None
    now += timedelta(seconds=60)
    found = api.run(backend.observe(ref_to(handle))).obstacle
    assert found is not None
    assert found.reason == "SchedulerNotResponding"
    assert found.message.startswith("scheduler volcano has not tried to place pod tiny-1-0-")


def test_the_last_job_of_the_name_is_waited_for(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    request = harness.backend.render(planned(**harness.overrides), Attempt(1))
    backend = KubernetesBackend(BackendContext(Path(), cluster=Cluster(api.client, caches())))
    first = harness.own("uid-2")
    api.run(backend.submit(given_to(request, first)))
    later = {**first, "metadata": {**first["metadata"], "uid": "the-next-one"}}
    with pytest.raises(TransientError, match="is still owned by a deleted job of the same name"):
        api.run(backend.submit(given_to(request, later)))


def test_of_all_attempts_only_the_last_two_are_kept(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend = harness.backend
    plan = planned(**harness.overrides)

    def is_gone(handle: Handle) -> bool:
        return api.run(backend.observe(ref_to(handle))).all_gone

    for number in (1, 2, 3):
        handle = api.run(backend.submit(backend.render(plan, Attempt(number))))
        api.run(backend.cancel(ref_to(handle), after(1.0)))
        wait_until(partial(is_gone, handle), 20)
    kept = api.run(api.client.list(JOBS, namespace)).items
    alive = {one["metadata"]["name"] for one in kept if "deletionTimestamp" not in one["metadata"]}
    assert alive == {"tiny-2", "tiny-3"}


@pytest.mark.parametrize("name", CASES)
def test_the_api_server_takes_every_golden(api: Api, namespace: str, name: str) -> None:
    resources = {kind.kind: kind for kind in KINDS}
    for made in CASES[name].request().objects:
        metadata = {**made["metadata"], "namespace": namespace, "ownerReferences": []}
        body = {**made, "metadata": metadata}
        stored = api.run(api.client.create(resources[made["kind"]], body, namespace))
        assert stored["metadata"]["uid"]


def test_the_log_tail_of_the_root_cause_outlives_its_pod(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend = harness.backend
    handle = api.run(backend.submit(backend.render(planned(**harness.overrides), Attempt(1))))
    (pod,) = wait_until(lambda: api.run(api.client.list(PODS, namespace)).items, 30)
    name = pod["metadata"]["name"]
    said = Termination(
        failure_class=FailureClass.DATA_ERROR, exit_code=ExitCode.DATA, message="row 3 is empty"
    )
    ended = {"exitCode": 65, "reason": "Error", "message": said.to_json()}
    container = {"name": "trainer", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Failed",
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }
    failed = {"status": status}
    api.run(api.client.patch(PODS, name, namespace, failed, subresource="status"))
    seen = api.run(backend.observe(ref_to(handle)))
    assert (seen.phase, seen.all_gone) == (AttemptPhase.FAILED, True)
    assert seen.termination == said
    api.run(api.client.delete(PODS, name, namespace))
    wait_until(lambda: api.run(api.client.list(PODS, namespace)).items == [], 30)

    async def lines() -> list[str]:
        return [line async for line in backend.logs(ref_to(handle), 0)]

    assert api.run(lines()) == [
        f"the pod of rank 0 of {namespace}/tiny-1 no longer exists",
        f"the last lines of pod {name}:",
        "(none)",  # as it never had a node
    ]


def test_a_rank_that_has_not_started_has_no_log_yet(
    api: Api, harness: KubernetesHarness, namespace: str
) -> None:
    backend = harness.backend
    handle = api.run(backend.submit(backend.render(planned(**harness.overrides), Attempt(1))))

    async def lines() -> list[str]:
        return [line async for line in backend.logs(ref_to(handle), 0)]

    with pytest.raises(NoLogYetError, match=r"does not exist yet|has not started"):
        api.run(lines())
    wait_until(lambda: api.run(api.client.list(PODS, namespace)).items, 30)
    with pytest.raises(NoLogYetError, match=r"pod tiny-1-0\S* of rank 0 has not started"):
        api.run(lines())


def test_pods_keep_to_the_restricted_pod_security_standard_but_for_infiniband(
    api: Api, namespace: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.run(api.client.patch(NAMESPACES, namespace, None, {"metadata": {"labels": labels}}))
    accounts = Resource("", "v1", "serviceaccounts", "ServiceAccount")
    wait_until(lambda: api.get(accounts, namespace, "default"), 30)

    def create_pod(name: str) -> None:
        template = CASES[name].request().objects[-1]["spec"]["template"]
        made = {**template, "metadata": {**template["metadata"], "name": name}}
        api.run(api.client.create(PODS, made, namespace))

    create_pod("one-node-on-the-cpu")
    create_pod("two-nodes-spot")
    with pytest.raises(ForbiddenError, match='must not include "IPC_LOCK"'):
        create_pod("rdma-packed")
