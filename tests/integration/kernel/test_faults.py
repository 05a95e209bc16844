"""Replicas that die, and an API server that hangs, is away, or comes back."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.kube.resources import CONFIG_MAPS, LEASES
from support.cluster.gates import Gate
from support.cluster.operators import Api, OperatorProcess, wait_until

WRITES = ("create", "update", "patch", "delete")
QUICK: dict[str, Any] = {"lease_seconds": 6, "renew_deadline_seconds": 4, "renew_seconds": 1}


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.namespace("faults") as name:
        yield name


def started(api: Api, namespace: str, name: str) -> None:
    wait_until(lambda: f"{name}-1" in api.attempts(namespace), 20, name)


@contextmanager
def leader_and_standby(
    api: Api, namespace: str
) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    with (
        OperatorProcess(api.kubeconfig, namespace, "one", **QUICK) as one,
        OperatorProcess(api.kubeconfig, namespace, "two", **QUICK) as two,
    ):
        wait_until(lambda: one.said("synced") or two.said("synced"), 30)
        yield (one, two) if one.said("synced") else (two, one)


@pytest.mark.full
def test_killed_in_a_burst_and_started_again_it_doubles_nothing(api: Api, namespace: str) -> None:
    names = [f"burst-{number:02d}" for number in range(20)]
    with OperatorProcess(api.kubeconfig, namespace) as first:
        first.wait_for("synced")
        for name in names:
            api.apply(namespace, name)
        wait_until(lambda: len(api.attempts(namespace)) >= 4, 20)
        first.kill()
    left = set(names) - {name.removesuffix("-1") for name in api.attempts(namespace)}
    with OperatorProcess(api.kubeconfig, namespace) as second:
        started_at = second.wait_for("started")
        assert second.wait_for("synced")["jobs"] == len(names)

        def is_drained() -> bool:
            made = api.attempts(namespace)
            return made == [f"{name}-1" for name in names] and second.health()["queue"] == 0

        wait_until(is_drained, 25, "nothing is left to do")
        # One look at what was there was enough, and nothing that existed was tried again.
        assert second.calls("list")["list configmaps 200"] == 1
        # A request that was under way at the kill may have been carried out since.
        assert second.calls("create").get("create configmaps 201", 0) <= len(left)
        assert "create configmaps 409" not in second.calls("create")
        assert second.said("lost the lease") == []
        assert started_at["time"] < second.said("leading")[0]["time"]
        # Each job's Event was posted by one process or the other.
        wait_until(
            lambda: [api.events(namespace, one) for one in names] == [["AttemptCreated"]] * 20, 45
        )


def test_a_standby_takes_over_from_a_killed_leader_within_the_lease_and_two_seconds(
    api: Api, namespace: str
) -> None:
    with leader_and_standby(api, namespace) as (leader, standby):
        standby.wait_for("started")
        wait_until(lambda: standby.health()["code"] == 200, 30, "the standby is ready")
        assert not standby.health()["leading"]
        api.apply(namespace, "before")
        started(api, namespace, "before")
        leader.send(signal.SIGKILL)
        killed_at = time.monotonic()
        api.apply(namespace, "after")
        standby.wait_for("leading", QUICK["lease_seconds"] + 2)
        assert time.monotonic() - killed_at > 1
        started(api, namespace, "after")
        assert api.attempts(namespace) == ["after-1", "before-1"]


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_leader_that_stood_still_past_its_lease_writes_nothing_when_it_goes_on(
    api: Api, namespace: str
) -> None:
    with leader_and_standby(api, namespace) as (leader, standby):
        api.apply(namespace, "before")
        started(api, namespace, "before")
        wait_until(lambda: leader.health()["queue"] == 0, 30)
        before = leader.calls(*WRITES)
        leader.send(signal.SIGSTOP)
        api.apply(namespace, "meanwhile")
        started(api, namespace, "meanwhile")
        api.play(namespace, "before-1", phase="Failed", code="137", gone="yes")
        leader.send(signal.SIGCONT)
        leader.wait_for("lost the lease")
        wait_until(lambda: api.get(CONFIG_MAPS, namespace, "before-2"), 30)
        assert leader.calls(*WRITES) == before
        assert len(standby.said("leading")) == 1


def test_on_sigterm_the_lease_is_given_to_the_standby_at_once(api: Api, namespace: str) -> None:
    with OperatorProcess(api.kubeconfig, namespace, "one") as one:
        one.wait_for("synced")
        with OperatorProcess(api.kubeconfig, namespace, "two") as two:
            two.wait_for("started")
            assert two.said("leading") == []
            assert one.end() == 0
            two.wait_for("leading", 10)  # a Lease that nobody gives up lasts 15 s
            lease = api.get(LEASES, namespace, "finetune-operator")
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == "two"
            assert lease["spec"]["leaseTransitions"] == 1
    lease = api.get(LEASES, namespace, "finetune-operator")
    assert lease is not None
    assert lease["spec"]["holderIdentity"] == ""


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)  # the gate cuts off either alike
@pytest.mark.parametrize("fault", ["freeze", "shut"])
def test_without_the_api_server_it_stops_leading_and_comes_back_by_itself(
    api: Api, namespace: str, tmp_path: Path, fault: str
) -> None:
    with (
        Gate(api.kubeconfig, tmp_path) as gate,
        OperatorProcess(gate.kubeconfig, namespace, "one", **QUICK) as operator,
    ):
        operator.wait_for("synced")
        for name in ("stays", "goes"):
            api.apply(namespace, name)
            started(api, namespace, name)
        wait_until(lambda: operator.health()["queue"] == 0, 30)
        getattr(gate, fault)()
        wait_until(lambda: not operator.health()["leading"], QUICK["renew_deadline_seconds"] + 2)
        api.delete(namespace, "goes")
        api.apply(namespace, "comes")
        api.play(namespace, "stays-1", phase="Running", ready="1", step="1")
        wait_until(lambda: api.get(CONFIG_MAPS, namespace, "goes-1") is None, 30)
        assert operator.health("healthz")["complaints"] == []
        gate.open()
        opened_at = time.monotonic()
        wait_until(lambda: api.phase(namespace, "stays") == "Running", 15)
        started(api, namespace, "comes")
        assert time.monotonic() - opened_at < 15
        assert api.attempts(namespace) == ["comes-1", "stays-1"]
        assert operator.is_running
        assert len(operator.said("leading")) == 2


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
def test_it_waits_for_a_cluster_that_is_not_there_yet(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    with Gate(api.kubeconfig, tmp_path) as gate:
        gate.shut()
        with OperatorProcess(gate.kubeconfig, namespace, "one", **QUICK) as operator:
            operator.wait_for("rights cannot be reviewed")
            api.apply(namespace, "early")
            gate.open()
            operator.wait_for("synced")
            started(api, namespace, "early")
