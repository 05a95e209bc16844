"""Of several namespaces with a Role each, one is deleted and made again."""

from pathlib import Path

import pytest

from finetune_operator.kube.resources import CONFIG_MAPS, NAMESPACES
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.cluster.permissions import FOR_THE_LEASE, WHERE_JOBS_ARE, Permission
from support.cluster.service_account import open_account

CHILDREN = Permission(CONFIG_MAPS, ("create", "get", "list", "patch", "watch"))
RIGHTS = (*WHERE_JOBS_ARE, CHILDREN)
# The first four keep jobs from being looked at; of the others only their restoration is lost.
REFUSED = (
    *("finetunejobs.finetune.dev", "jobs.batch", "pods", "configmaps"),
    *("services", "networkpolicies.networking.k8s.io", "endpointslices.discovery.k8s.io"),
)


def is_gone(api: Api, namespace: str) -> bool:
    return api.get(NAMESPACES, "", namespace) is None


def starts(api: Api, namespace: str, name: str, seconds: float) -> None:
    """Apply a job, and wait until its first attempt was created."""
    api.apply(namespace, name)
    wait_until(lambda: f"{name}-1" in api.attempts(namespace), seconds, f"{name} starts")


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_a_namespace_that_is_deleted_keeps_no_other_from_being_served_and_may_come_back(
    api: Api, tmp_path: Path
) -> None:
    with api.namespace("home") as home, open_account(api, home, tmp_path) as account:
        account.grant((*RIGHTS, *FOR_THE_LEASE))
        other = f"{home}-other"
        made = {"metadata": {"name": other}}
        api.run(api.client.create(NAMESPACES, made))
        account.grant_in(other, RIGHTS)
        served = f"{other},{home}"
        with OperatorProcess(account.kubeconfig, home, namespaces=served) as operator:
            operator.wait_for("synced", 60)
            for namespace in (other, home):
                starts(api, namespace, "before", 10)
            api.run(api.client.delete(NAMESPACES, other))
            wait_until(lambda: is_gone(api, other), 60, "the namespace is gone")
            starts(api, home, "meanwhile", 10)
            assert operator.health("healthz")["complaints"] == []
        with OperatorProcess(account.kubeconfig, home, namespaces=served) as operator:
            operator.wait_for("synced", 60)
            starts(api, home, "after", 10)
            assert api.attempts(home) == ["after-1", "before-1", "meanwhile-1"]
            told = operator.health("readyz")
            assert told["code"] == 200
            assert set(told["refused"]) == {f"{kind} {other}" for kind in REFUSED}
            api.run(api.client.create(NAMESPACES, made))
            account.grant_in(other, RIGHTS)
            starts(api, other, "back", 30)
            wait_until(lambda: operator.health("readyz")["refused"] == {}, 30)
            assert len(operator.said("list forbidden")) == 1
            assert not any(
                line["message"].startswith(("Request attempt #2", "Request attempt #3"))
                for line in operator.lines
            )
            api.run(api.client.delete(NAMESPACES, other))
