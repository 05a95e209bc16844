"""What others delete or change of a living attempt's children is put back, and nothing else is."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest

from finetune_operator.backends.kubernetes.child_names import CHILDREN_ANNOTATION
from finetune_operator.kube.api_errors import ForbiddenError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    EVENTS,
    FINE_TUNE_JOBS,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)
from support.kernel.kernel_world import KEY
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import KubernetesWorld

NOBODY = 9400  # where no progress is served
CHILD = "tiny-finetune"
KEPT = (NETWORK_POLICIES, SERVICES, ENDPOINT_SLICES)
Change = Callable[[KubernetesWorld], Coroutine[Any, Any, None]]


async def living() -> KubernetesWorld:
    """Return a cluster in which an attempt of two nodes runs, and its status is written."""
    world = KubernetesWorld(NOBODY)
    await world.apply()
    await world.settle()
    await world.make_pods(1)
    await world.run_pods(1, 0, 1)
    world.now += timedelta(minutes=1)
    await world.settle()
    return world


def contents(world: KubernetesWorld) -> dict[str, Object]:
    """Return the children that a job has once, without what a deletion changes."""
    found = {}
    for kind in KEPT:
        for one in world.api.objects(kind):
            gone = {"uid", "resourceVersion", "creationTimestamp", "generation"}
            metadata = {key: value for key, value in one["metadata"].items() if key not in gone}
            found[kind.kind] = {**one, "metadata": metadata}
    return found


def written(world: KubernetesWorld) -> list[str]:
    """Return the writes to children from now on, as they happen."""
    found: list[str] = []
    count = world.api.after

    def note(verb: str, resource: Resource, name: str) -> None:
        if resource in KEPT:
            found.append(f"{verb} {resource.plural}")
        count(verb, resource, name)

    world.api.after = note
    return found


def patching(resource: Resource, **change: Any) -> Change:
    async def patch(world: KubernetesWorld) -> None:
        await world.api.patch(resource, CHILD, "ns", change)

    return patch


def deleting(resource: Resource) -> Change:
    async def delete(world: KubernetesWorld) -> None:
        await world.api.delete(resource, CHILD, "ns")

    return delete


RULES: list[Object] = [{"from": [{"podSelector": {}}]}]
OPEN = {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
ELSEWHERE = [{"addresses": ["10.9.9.9"], "hostname": "tiny-1-0", "conditions": {"ready": True}}]
BARE = {"labels": {"finetune.dev/job-uid": None}, "ownerReferences": None}


@pytest.mark.parametrize(
    ("change", "write"),
    [
        *(pytest.param(deleting(one), f"create {one.plural}", id=f"no {one.kind}") for one in KEPT),
        pytest.param(
            patching(NETWORK_POLICIES, spec={"ingress": RULES}), "patch networkpolicies", id="rules"
        ),
        pytest.param(
            patching(NETWORK_POLICIES, spec=OPEN), "patch networkpolicies", id="selector of pods"
        ),
        pytest.param(
            patching(SERVICES, spec={"selector": {"app": "mine"}}), "patch services", id="selector"
        ),
        pytest.param(
            patching(SERVICES, metadata={"labels": {"finetune.dev/job": "other"}}),
            "patch services",
            id="label",
        ),
        pytest.param(
            patching(SERVICES, metadata={"ownerReferences": None}), "patch services", id="owner"
        ),
        pytest.param(
            patching(ENDPOINT_SLICES, endpoints=ELSEWHERE), "patch endpointslices", id="address"
        ),
    ],
)
def test_what_was_deleted_or_changed_is_as_it_was(change: Change, write: str) -> None:
    async def work() -> None:
        world = await living()
        before, writes = contents(world), written(world)
        assert set(before) == {one.kind for one in KEPT}
        await change(world)
        writes.clear()
        await world.settle()
        assert contents(world) == before
        assert writes == [write]

    run(work())


@pytest.mark.parametrize(
    "order",
    [pytest.param(one, id=" ".join(kind.kind for kind in one)) for one in permutations(KEPT)],
)
def test_children_deleted_while_another_is_restored_are_restored(
    order: tuple[Resource, ...],
) -> None:
    async def work() -> None:
        world = await living()
        before, left = contents(world), list(order)

        def delete_next(verb: str, resource: Resource, name: str) -> None:
            is_restore = verb == "create" and resource in KEPT
            if left and (is_restore or len(left) == len(KEPT)):
                forgotten(world, left.pop(0))

        world.api.before = delete_next
        await world.api.list(EVENTS)  # any request: the first child is deleted
        await world.settle()
        assert left == []
        assert contents(world) == before

    run(work())


def forgotten(world: KubernetesWorld, resource: Resource) -> None:
    """Delete a child; the watch reports it before the next response."""
    world.api.remove(resource, CHILD, "ns")
    cached = world.cache(resource).get(Key("ns", CHILD))
    assert cached is not None
    world.cache(resource).remove(cached)


@pytest.mark.parametrize("resource", [NETWORK_POLICIES, SERVICES], ids=lambda one: one.kind)
def test_a_child_of_a_kind_that_is_listed_late_is_restored(resource: Resource) -> None:
    async def work() -> None:
        world = await living()
        before = contents(world)
        await world.api.delete(resource, CHILD, "ns")
        world.start_process()
        await world.catch_up()
        world.caches[resource] = ObjectCache(resource)  # its list was refused
        await world.reconciler.reconcile(KEY)
        assert contents(world) != before
        await world.settle()
        assert contents(world) == before

    run(work())


@pytest.mark.parametrize("resource", KEPT, ids=lambda one: one.kind)
def test_what_others_add_stays(resource: Resource) -> None:
    async def work() -> None:
        world = await living()
        labels = {"theirs": "yes"}
        change: Object = {"metadata": {"labels": labels, "annotations": labels}}
        if resource == SERVICES:
            change["spec"] = {"internalTrafficPolicy": "Cluster", "ipFamilies": ["IPv4"]}
        await world.api.patch(resource, CHILD, "ns", change)
        before, writes = contents(world), written(world)
        await world.settle()
        assert writes == []
        assert contents(world) == before

    run(work())


def test_what_changed_while_the_operator_was_down_is_put_back_by_the_next() -> None:
    async def work() -> None:
        world = await living()
        before = contents(world)
        await world.api.delete(SERVICES, CHILD, "ns")
        await world.api.patch(NETWORK_POLICIES, CHILD, "ns", {"spec": {"ingress": []}})
        world.start_process()
        await world.settle()
        assert contents(world) == before

    run(work())


async def cancelled(world: KubernetesWorld) -> None:
    await world.change(suspend=True)
    await world.settle()


async def going(world: KubernetesWorld) -> None:
    await world.api.patch(FINE_TUNE_JOBS, "tiny", "ns", {"metadata": {"finalizers": ["a/b"]}})
    await world.catch_up()  # so much is known to the operator
    await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")


async def of_a_version_before(world: KubernetesWorld) -> None:
    await _annotate(world, None)
    await world.api.patch(
        FINE_TUNE_JOBS, "tiny", "ns", {"status": {"attempts": _without_digest(world)}}
    )


async def forged(world: KubernetesWorld) -> None:
    text = (await world.api.get(JOBS, "tiny-1", "ns"))["metadata"]["annotations"]
    kept = json.loads(text[CHILDREN_ANNOTATION])
    kept["NetworkPolicy"]["spec"]["ingress"] = RULES
    await _annotate(world, json.dumps(kept))


async def _annotate(world: KubernetesWorld, text: str | None) -> None:
    change = {"metadata": {"annotations": {CHILDREN_ANNOTATION: text}}}
    await world.api.patch(JOBS, "tiny-1", "ns", change)


def _without_digest(world: KubernetesWorld) -> list[Object]:
    attempts = world.job["status"]["attempts"]
    return [{key: one for key, one in each.items() if key != "digest"} for each in attempts]


@pytest.mark.parametrize("what", [cancelled, going, of_a_version_before, forged])
def test_children_of_an_attempt_that_ends_or_that_nothing_tells_of_are_left_alone(
    what: Change,
) -> None:
    async def work() -> None:
        world = await living()
        await what(world)
        world.start_process()
        for resource in KEPT:
            await world.api.delete(resource, CHILD, "ns")
        writes = written(world)
        await world.settle()
        assert [one for one in writes if "endpointslices" not in one] == []

    run(work())


def test_a_forged_record_is_told() -> None:
    async def work() -> None:
        world = await living()
        await forged(world)
        await world.settle()
        assert "the record of Job ns/tiny-1 about its Service" in told(world)

    run(work())


def told(world: KubernetesWorld) -> str:
    return " ".join(one["message"] for one in world.api.objects(EVENTS))


async def for_a_while(
    world: KubernetesWorld, seconds: float, meanwhile: Change | None = None, *, every: float = 0.7
) -> None:
    """Reconcile all the time; before each others may do something."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        if meanwhile is not None:
            await meanwhile(world)
        await world.catch_up()
        await world.settle()
        await asyncio.sleep(every)


def test_a_fight_is_told_and_slowed_and_forgotten_when_it_is_over() -> None:
    async def work() -> None:
        world = await living()
        writes = written(world)
        fight = patching(NETWORK_POLICIES, spec={"ingress": RULES})

        async def edit(world: KubernetesWorld) -> None:
            ours = len(writes)
            await fight(world)
            del writes[ours:]

        await for_a_while(world, 3.5, edit)
        assert len(writes) == 2  # each within 5 s
        assert "repeatedly" not in told(world)
        await for_a_while(world, 600, edit, every=7)
        assert len(writes) <= 10
        sentence = "NetworkPolicy ns/tiny-finetune is repeatedly deleted or changed"
        assert sentence in told(world)
        assert told(world).count(sentence) == 1
        await for_a_while(world, 900, every=70)
        await edit(world)
        writes.clear()
        await for_a_while(world, 1)
        assert writes == ["patch networkpolicies"]

    run(work())


def test_what_may_not_be_put_back_is_told_with_the_servers_sentence() -> None:
    async def work() -> None:
        world = await living()
        sentence = 'services is forbidden: User "operator" cannot create resource "services"'

        def refuse(verb: str, resource: Resource, name: str) -> None:
            if (verb, resource) == ("create", SERVICES):
                raise ForbiddenError(403, "Forbidden", sentence)

        await world.api.delete(SERVICES, CHILD, "ns")
        world.api.before = refuse
        await for_a_while(world, 20)
        assert (
            f"Service ns/tiny-finetune was deleted or changed and cannot be restored: {sentence}"
            in (told(world))
        )
        assert world.job["status"]["phase"] != "Restarting"

    run(work())


def test_an_object_of_somebody_elses_under_a_childs_name_is_told_and_left_alone() -> None:
    async def work() -> None:
        world = await living()
        await world.api.delete(SERVICES, CHILD, "ns")
        await world.api.create(SERVICES, {"metadata": {"name": CHILD}, "spec": {}}, "ns")
        writes = written(world)
        await for_a_while(world, 20)
        assert writes == []
        assert "Service ns/tiny-finetune is in the way" in told(world)

    run(work())
