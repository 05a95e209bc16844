"""Jobs of the kubernetes backend that cannot run: what is reported, and what a fix changes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)
from finetune_operator.reconcile.decide import RECHECK_SECONDS
from support.cluster.operators import Api, OperatorProcess, condition, wait_until
from support.kubernetes.kubernetes_cases import JOB, profile

PROMPT_SECONDS = RECHECK_SECONDS / 2
"""Long before a job would be looked at anyway, on however slow a machine."""
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")


@dataclass
class Place:
    """A namespace, the operator that serves it, and profiles of its own."""

    api: Api
    namespace: str
    operator: OperatorProcess
    profile: str

    def apply(self, name: str, **overrides: Any) -> None:
        backend = {"type": "kubernetes", "kubernetes": {"profile": self.profile}}
        self.api.apply(self.namespace, name, **{**JOB, "backend": backend, **overrides})

    def put_profile(self, name: str, **changes: Any) -> None:
        """Create a profile, or change what it allows."""
        spec = profile(**changes).model_dump(by_alias=True, exclude_none=True, mode="json")
        client = self.api.client
        try:
            self.api.run(client.patch(FINE_TUNE_PROFILES, name, None, {"spec": spec}))
        except NotFoundError:
            kind = {"apiVersion": FINE_TUNE_PROFILES.api_version, "kind": FINE_TUNE_PROFILES.kind}
            made = {**kind, "metadata": {"name": name}, "spec": spec}
            self.api.run(client.create(FINE_TUNE_PROFILES, made))

    def refusal(self, name: str, kind: str = "Accepted") -> Object:
        """Wait until a condition is False and the job stalled, and return that condition."""

        def told() -> Object | None:
            job = self.api.job(self.namespace, name)
            found: Object = condition(job, kind)
            is_told = found["status"] == "False" and condition(job, "Stalled")["status"] == "True"
            return found if is_told else None

        found = wait_until(told, PROMPT_SECONDS, f"{kind} of {name}")
        assert found is not None
        return found

    def ration(self) -> None:
        """Let no batch Job be created until the quota `none` is deleted."""
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
        self.api.run(self.api.client.create(QUOTAS, quota, self.namespace))
        wait_until(self._is_rationed, 20)

    def _is_rationed(self) -> bool:
        there = self.api.get(QUOTAS, self.namespace, "none")
        return there is not None and "hard" in there.get("status", {})

    def created(self, name: str, seconds: float = PROMPT_SECONDS) -> None:
        """Wait until the job has its batch Job."""
        wait_until(lambda: self.api.get(JOBS, self.namespace, f"{name}-1"), seconds, name)

    def started(self, name: str, seconds: float = PROMPT_SECONDS) -> None:
        """Wait until the job has its batch Job, and says nothing bad of itself any more."""
        self.created(name, seconds)
        wait_until(
            lambda: condition(self.api.job(self.namespace, name), "Stalled")["status"] == "False",
            PROMPT_SECONDS,
        )


@pytest.fixture(scope="module")
def place(api: Api) -> Iterator[Place]:
    name = f"bad-input-{uuid4().hex[:8]}"
    with (
        api.namespace("bad-input") as namespace,
        OperatorProcess(api.kubeconfig, namespace) as operator,
    ):
        operator.wait_for("synced")
        made = Place(api, namespace, operator, name)
        made.put_profile(name)
        yield made
        api.run(api.client.delete(FINE_TUNE_PROFILES, name))


def test_a_job_whose_profile_is_missing_waits_for_it(place: Place) -> None:
    missing = f"{place.profile}-later"
    place.apply("early", backend={"type": "kubernetes", "kubernetes": {"profile": missing}})
    told = place.refusal("early")
    assert told["message"].startswith(
        f"spec.backend.kubernetes.profile {missing} does not exist; create"
    )
    place.put_profile(missing)
    place.started("early")
    place.api.run(place.api.client.delete(FINE_TUNE_PROFILES, missing))


def test_a_job_that_fits_on_no_gpu_of_its_profile_has_no_child_until_it_fits(place: Place) -> None:
    small = f"{place.profile}-t4"
    place.put_profile(small, nodes={"instanceTypes": ["Standard_NC16as_T4_v3"]})
    place.apply(
        "heavy",
        backend={"type": "kubernetes", "kubernetes": {"profile": small}},
        model={"source": "hf://meta-llama/Llama-3.1-70B"},
        method={"type": "lora"},
        topology={"gpusPerNode": 1, "processesPerNode": None},
    )
    found = place.refusal("heavy", "Planned")
    assert found["reason"] == "DoesNotFit"
    assert "does not fit on Standard_NC16as_T4_v3" in found["message"]
    assert place.api.get(JOBS, place.namespace, "heavy-1") is None
    place.put_profile(small, nodes={"instanceTypes": [], "gpuMemoryGiB": 180})
    place.created("heavy")
    assert condition(place.api.job(place.namespace, "heavy"), "Planned")["status"] == "True"
    place.api.run(place.api.client.delete(FINE_TUNE_PROFILES, small))


def test_more_nodes_than_the_profile_allows_are_refused_until_it_allows_them(place: Place) -> None:
    place.apply("large", topology__nodes=5, training__globalBatchSize=5)
    assert place.refusal("large")["message"] == (
        f"spec.topology.nodes 5 is more than the 4 that profile {place.profile} allows; "
        "use at most 4"
    )
    place.put_profile(place.profile, allow={"maxNodes": 5})
    place.started("large")


def test_a_variable_that_the_operator_sets_is_refused_by_its_field(place: Place) -> None:
    variable = {"name": "MASTER_ADDR", "value": "elsewhere"}
    template = {"spec": {"containers": [{"name": "trainer", "env": [variable]}]}}
    place.apply("reserved", pod_template=template)
    assert place.refusal("reserved")["message"] == (
        "spec.podTemplate.spec.containers[0].env[0].name MASTER_ADDR is set by the operator; "
        "remove it"
    )
    place.api.change(place.namespace, "reserved", suspend=True)
    place.api.change(place.namespace, "reserved", suspend=False, podTemplate=None)
    place.started("reserved")


def test_a_backend_that_nobody_has_installed_is_named_with_those_that_are(place: Place) -> None:
    place.apply("unknown", backend={"type": "nowhere"})
    told = place.refusal("unknown")
    assert told["reason"] == "BackendNotFound"
    assert told["message"].startswith(
        "spec.backend.type nowhere is not installed (available: azureml,"
    )


@pytest.mark.parametrize("kind", [JOBS, SERVICES, NETWORK_POLICIES], ids=str)
def test_a_child_of_somebody_else_in_the_way_is_named_with_its_owner_and_left_alone(
    place: Place, kind: Resource
) -> None:
    api, name = place.api, f"taken-{kind.plural}"
    place.apply(f"{name}-model", topology__nodes=2)
    place.created(f"{name}-model")
    (model,) = (
        one
        for one in api.run(api.client.list(kind, place.namespace)).items
        if one["metadata"]["name"].startswith(f"{name}-model")
    )
    owner = api.run(api.client.create(CONFIG_MAPS, {"metadata": {"name": name}}, place.namespace))
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": name,
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    taken = model["metadata"]["name"].replace(f"{name}-model", name)
    chosen = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "selector")
    spec = {key: value for key, value in model["spec"].items() if key not in chosen}
    if kind is JOBS:
        del spec["template"]["metadata"]["labels"]
    body = {"metadata": {"name": taken, "ownerReferences": [theirs]}, "spec": spec}
    before = api.run(api.client.create(kind, body, place.namespace))
    place.apply(name, topology__nodes=2)
    told = place.refusal(name, "ResourcesReady")
    assert told["reason"] == "CreationFailed"
    for word in (f"{kind.kind} {place.namespace}/{taken}", f"ConfigMap {name}"):
        assert word in told["message"]
    there = api.get(kind, place.namespace, taken)
    assert there is not None
    assert there["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]
    assert there["spec"] == before["spec"]


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_quota_is_told_in_the_conditions_and_is_no_obstacle_once_it_is_gone(
    place: Place,
) -> None:
    api, namespace = place.api, place.namespace
    place.ration()
    place.apply("rationed")
    told = place.refusal("rationed", "ResourcesReady")
    assert told["reason"] == "CreationFailed"
    assert "exceeded quota: none" in told["message"]
    assert condition(api.job(namespace, "rationed"), "Accepted")["status"] == "True"
    api.run(api.client.delete(QUOTAS, "none", namespace))
    start = time.monotonic()
    place.started("rationed", 60)
    print(f"{time.monotonic() - start:.1f} s after the quota was gone")


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_job_that_a_quota_keeps_from_starting_is_suspended_resumed_and_deleted(
    place: Place,
) -> None:
    api, namespace = place.api, place.namespace
    place.ration()

    def is_suspended(name: str) -> bool:
        return api.phase(namespace, name) == "Suspended"

    for name in ("parked", "dropped"):
        place.apply(name, topology__nodes=2)
        place.refusal(name, "ResourcesReady")
        api.change(namespace, name, suspend=True)
        wait_until(partial(is_suspended, name), PROMPT_SECONDS, name)
        assert condition(api.job(namespace, name), "Stalled")["status"] == "False"
    api.run(api.client.delete(QUOTAS, "none", namespace))
    api.delete(namespace, "dropped")
    api.change(namespace, "parked", suspend=False)
    place.started("parked")
    told = api.job(namespace, "parked")
    assert told is not None
    assert [one["number"] for one in told["status"]["attempts"]] == [1]
    # The garbage collector pauses while other tests add and remove CRDs.
    wait_until(lambda: not api.get(SERVICES, namespace, "dropped-finetune"), 60, "nothing left")
    assert api.get(JOBS, namespace, "dropped-1") is None


def test_a_refusal_and_its_end_follow_what_is_watched_and_wait_for_nothing_else(
    place: Place,
) -> None:
    """How long that takes is measured where nothing else runs: `make bench-operator`."""
    operator, missing = place.operator, f"{place.profile}-late"

    def asked() -> list[int]:
        kinds = (FINE_TUNE_JOBS.plural, FINE_TUNE_PROFILES.plural)
        calls = operator.calls("get", "list").items()
        return [count for call, count in calls if call.split()[1] in kinds]

    def written() -> list[Object]:
        return [one for one in operator.said("status written") if one["job"].endswith("/late")]

    before = asked()
    place.apply("late", backend={"type": "kubernetes", "kubernetes": {"profile": missing}})
    place.refusal("late")
    wait_until(written, PROMPT_SECONDS)
    assert len(written()) == 1  # by the first look
    place.put_profile(missing)
    place.started("late")
    assert asked() == before
    place.api.run(place.api.client.delete(FINE_TUNE_PROFILES, missing))


def test_a_copied_manifest_waits_until_the_job_that_has_its_folders_is_deleted(
    place: Place,
) -> None:
    api, namespace = place.api, place.namespace
    place.apply("model", output__uri="pvc://models/shared")
    place.created("model")
    place.apply("copy", output__uri="pvc://models/shared/copy")
    told = place.refusal("copy")
    assert told["reason"] == "FolderInUse"
    assert told["message"].startswith(
        "spec.output.uri pvc://models/shared/copy is inside pvc://models/shared, spec.output.uri "
        f"of the job {namespace}/model"
    )
    assert api.get(JOBS, namespace, "copy-1") is None
    api.delete(namespace, "model")
    place.started("copy")
