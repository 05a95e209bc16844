"""A release whose operator lacks its rights: helm fails, and what is missing can be read."""

import json
from collections.abc import Iterator

import pytest

from finetune_operator.kube.resources import Object
from support.cluster.operators import wait_until
from support.cluster.real_cluster import CHART, RealCluster, Release, namespace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMESPACE = "not-able"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{NAMESPACE}-finetune-operator"
WITHOUT_RIGHTS = {
    "rbac": {"create": False},
    "crds": {"install": False},
    "admissionPolicy": {"create": False},
    "settings": {"namespaces": [NAMESPACE]},
}


@pytest.fixture
def place(cluster: RealCluster, release: Release) -> Iterator[None]:
    """A namespace of its own, where the account may post Events, and nothing else."""
    cluster.apply(namespace(NAMESPACE))
    where = ("--namespace", NAMESPACE)
    cluster.kubectl("create", "role", "events", "--verb=create", "--resource=events", *where)
    who = f"--serviceaccount={ACCOUNT.removeprefix('system:serviceaccount:')}"
    cluster.kubectl("create", "rolebinding", "events", "--role=events", who, *where)
    try:
        yield
    finally:
        cluster.run("helm", "uninstall", NAMESPACE, *where)
        cluster.run("kubectl", "delete", "namespace", NAMESPACE)


def pods(cluster: RealCluster) -> list[Object]:
    return cluster.list("pods", "--namespace", NAMESPACE)


def is_running(pod: Object) -> bool:
    return any("running" in one["state"] for one in pod["status"].get("containerStatuses", ()))


def test_release_without_rights_fails_and_its_pods_say_what_gives_them(
    cluster: RealCluster, release: Release, place: None
) -> None:
    where = ("--namespace", NAMESPACE)
    # How long it waits does not matter: it would wait for ever.
    command = ("helm", "install", NAMESPACE, str(CHART), *release.side, *where, "--values", "-")
    values = json.dumps({**release.values(), **WITHOUT_RIGHTS}).encode()
    refused = cluster.run(*command, "--wait", "--timeout", "20s", stdin=values)

    assert refused.returncode != 0, refused.stdout
    wait_until(lambda: all(map(is_running, pods(cluster))), 60, "they run")
    (deployment,) = cluster.list("deployments", *where)
    assert "availableReplicas" not in deployment["status"]
    described = cluster.kubectl("describe", "pods", *where)
    lacks = "get and update leases.coordination.k8s.io finetune-operator"
    mended = f"{ACCOUNT} may not {lacks} in namespace {NAMESPACE}; fix it with: kubectl create"
    assert described.count(mended) == 2  # both replicas: none of them could ever lead
    assert [one["status"]["containerStatuses"][0]["restartCount"] for one in pods(cluster)] == [
        0,
        0,
    ]
