"""The operator beside an API server that does wrong what is asked of it; only the embedded one can.

What each fault looks like to a client is shown here as well, as nobody else shows it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from finetune_operator.kube.api_errors import GoneError, ThrottledError, UnavailableError
from finetune_operator.kube.resources import CONFIG_MAPS
from support.cluster.clusters import embedded_cluster
from support.cluster.faults import Fault, FaultyApi
from support.cluster.operators import Api, OperatorProcess, condition, wait_until


@dataclass(frozen=True)
class World:
    api: Api
    faults: FaultyApi
    namespace: str
    operator: OperatorProcess

    def is_open(self, *names: str) -> bool:
        return {f"{name}-1" for name in names} <= set(self.api.attempts(self.namespace))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One cluster and one operator for all."""
    with embedded_cluster(tmp_path_factory.mktemp("embedded")) as cluster:
        assert cluster.faults is not None
        api = Api(cluster.kubeconfig)
        api.install_crds()
        with (
            api.namespace("faults") as namespace,
            OperatorProcess(cluster.kubeconfig, namespace, resync_seconds=2) as operator,
        ):
            operator.wait_for("synced")
            yield World(api, cluster.faults, namespace, operator)
        api.close()


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    shared.faults.clear()
    assert shared.operator.is_running
    assert len(shared.operator.said("leading")) == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(429, retry_after=1), id="throttled"),
        pytest.param(Fault(500), id="internal error"),
        pytest.param(Fault(seconds=0.3), id="slow"),
    ],
)
def test_writes_that_fail_for_a_while_are_made_once_they_succeed(
    world: World, fault: Fault
) -> None:
    creation = replace(fault, times=1, verbs={"create"}, resources={"configmaps"})
    status = replace(fault, times=1, verbs={"patch"}, resources={"finetunejobs"})
    name = f"fault-{fault.status}"
    world.faults.add(creation)
    world.faults.add(status)
    world.api.apply(world.namespace, name)
    wait_until(lambda: world.is_open(name), 20)
    world.api.play(world.namespace, f"{name}-1", phase="Running", ready="1", step="1")
    wait_until(lambda: world.api.phase(world.namespace, name) == "Running", 20)
    assert (creation.times, status.times) == (0, 0)
    assert [one for one in world.api.attempts(world.namespace) if name in one] == [f"{name}-1"]
    job = world.api.job(world.namespace, name)
    assert condition(job, "Stalled")["status"] == "False"


def test_what_happened_while_versions_expired_is_seen_deletions_included(world: World) -> None:
    api, namespace = world.api, world.namespace
    for name in ("stays", "goes"):
        api.apply(namespace, name)
    wait_until(lambda: world.is_open("stays", "goes"), 30)
    world.faults.add(Fault(503, verbs={"watch"}))
    world.faults.drop_watches()
    api.delete(namespace, "goes")
    api.apply(namespace, "comes")
    api.play(namespace, "stays-1", phase="Running", ready="1", step="1")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "goes-1") is None, 30)
    world.faults.expire_versions()
    world.faults.clear()
    wait_until(lambda: api.phase(namespace, "stays") == "Running", 15)
    wait_until(lambda: world.is_open("comes"), 15)
    assert "goes-1" not in api.attempts(namespace)
    again = api.apply(namespace, "goes")
    wait_until(lambda: world.is_open("goes"), 30)
    owners = (api.get(CONFIG_MAPS, namespace, "goes-1") or {})["metadata"]["ownerReferences"]
    assert owners[0]["uid"] == again["metadata"]["uid"]


def test_watches_that_fall_silent_are_made_good_by_the_next_list(world: World) -> None:
    world.faults.silence_watches()
    world.api.apply(world.namespace, "unheard")
    wait_until(lambda: world.is_open("unheard"), 15)


def test_a_client_sees_each_fault_as_a_real_server_would_show_it(world: World) -> None:
    client, namespace = world.api.client, world.namespace
    # Of no other kind: the operator gets its Lease all the time.
    fault = Fault(429, retry_after=3, times=1, verbs={"get"}, resources={"configmaps"})
    world.faults.add(fault)
    with pytest.raises(ThrottledError) as throttled:
        world.api.run(client.get(CONFIG_MAPS, "any", namespace))
    assert throttled.value.retry_after == 3
    old = world.api.run(client.list(CONFIG_MAPS, namespace)).resource_version
    world.faults.expire_versions()

    async def watch(version: str) -> list[str]:
        found = client.watch(CONFIG_MAPS, namespace, resource_version=version, timeout_seconds=30)
        return [event.type async for event in found]

    with pytest.raises(GoneError):
        world.api.run(watch(old))
    new = world.api.run(client.list(CONFIG_MAPS, namespace)).resource_version

    async def drop() -> None:
        while True:  # the watch may not have begun yet
            await asyncio.sleep(0.3)
            world.faults.drop_watches()

    async def dropped() -> list[str]:
        dropping = asyncio.create_task(drop())
        try:
            return await watch(new)
        finally:
            dropping.cancel()

    with pytest.raises(UnavailableError):
        world.api.run(dropped())
