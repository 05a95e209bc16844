"""The chart on a real API server: every object under strict validation, and what is refused.

Objects are sent with dryRun, in a namespace of their own that admits restricted pods alone.
"""

import json
import re
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from support.charts.chart_goldens import VALUES, objects
from support.charts.helm_chart import CHART, Json, made_of, needs_helm, run_helm
from support.cluster.operators import KUBECONFIG
from support.cluster.plain_api import JSON, Answer, PlainApi

pytestmark = [pytest.mark.cluster, needs_helm]

NAMESPACES = "/api/v1/namespaces"
RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
DEFINED = (".coreos.com/v1", "finetune.dev/v1alpha1")
"""Ends of the API versions that only a definition makes known."""
UNLIMITED = ("--set", "admissionPolicy.create=false")
TENANT = "tenant"
DEFAULTS = ("--values", str(VALUES["defaults"]))
ADMINISTRATORS = tuple(
    word
    for one in ("crds", "crdguard", "rbac", "admissionpolicy")
    for word in ("--show-only", f"templates/{one}.yaml")
)
"""As the chart's README says it."""
MADE_BY_THE_USER = {
    *("Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount")
}


@pytest.fixture(scope="module")
def server() -> Iterator[PlainApi]:
    """A real API server; at the end nothing of these tests is left."""
    if KUBECONFIG is None:
        pytest.skip("FINETUNE_TEST_KUBECONFIG names no cluster")
    made = PlainApi(KUBECONFIG)
    runtime = {"metadata": {"name": "gvisor"}, "handler": "runc"}
    made.send("POST", RUNTIMES, json.dumps(runtime), JSON)
    yield made
    made.send("DELETE", f"{RUNTIMES}/gvisor")


@pytest.fixture
def namespace(server: PlainApi) -> Iterator[str]:
    """A namespace that admits no pod but of the restricted standard, and knows our accounts."""
    name = f"chart-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name, "labels": RESTRICTED}
    assert server.send("POST", NAMESPACES, json.dumps({"metadata": metadata}), JSON).is_accepted
    yield name
    server.send("DELETE", f"{NAMESPACES}/{name}")


def create(server: PlainApi, made: Json, namespace: str) -> Answer:
    """Create an object with dryRun, in another namespace than its own if it has one."""
    path = "/api/v1" if made["apiVersion"] == "v1" else f"/apis/{made['apiVersion']}"
    plural = re.sub("y$", "ie", made["kind"].lower()) + "s"
    if "namespace" in made["metadata"]:
        path += f"/namespaces/{namespace}"
        made = {**made, "metadata": {**made["metadata"], "namespace": namespace}}
    text = json.dumps(made)
    return server.send(
        "POST", f"{path}/{plural}", text, JSON, dryRun="All", fieldValidation="Strict"
    )


def pods(made: Json) -> list[Json]:
    """Return the pod that an object is or makes."""
    if made["kind"] == "Pod":
        return [made]
    if made["kind"] != "Deployment":
        return []
    template = made["spec"]["template"]
    metadata = {**template["metadata"], "name": made["metadata"]["name"], "namespace": "x"}
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]


@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_accepted_and_its_pods_are_restricted(
    server: PlainApi, namespace: str, name: str
) -> None:
    made = [one for one in objects(name).values() if not one["apiVersion"].endswith(DEFINED)]
    of_pods = [pod for one in made for pod in pods(one)]

    for one in made:
        if one["kind"] != "Pod":
            answer = create(server, one, namespace)
            assert (answer.is_accepted, answer.warning) == (True, None), answer.message
    for account in {pod["spec"]["serviceAccountName"] for pod in of_pods}:
        path = f"{NAMESPACES}/{namespace}/serviceaccounts"
        server.send("POST", path, json.dumps({"metadata": {"name": account}}), JSON)
    for pod in of_pods:
        answer = create(server, pod, namespace)
        assert (answer.is_accepted, answer.warning) == (True, None), answer.message
    assert of_pods


def test_pod_that_the_standard_does_not_admit_is_refused(server: PlainApi, namespace: str) -> None:
    spec = {"containers": [{"name": "a", "image": "a"}], "serviceAccountName": "default"}
    metadata = {"name": "a", "namespace": "x"}

    answer = create(
        server, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace
    )

    assert not answer.is_accepted


def install(namespace: str, *arguments: str, user: str = "") -> "subprocess.CompletedProcess[str]":
    """Run `helm install` in a namespace, without the definitions."""
    who = ("--kube-as-user", user) if user else ()
    values = ("image.repository=reg.test/operator", "crds.install=false")
    sets = [word for value in values for word in ("--set", value)]
    where = ("--namespace", namespace, "--kubeconfig", str(KUBECONFIG))
    return run_helm("install", namespace, str(CHART), *where, *who, *sets, *arguments)


def made_in(server: PlainApi, namespace: str) -> set[str]:
    """Return what lies in a namespace, by kind."""
    kinds = {
        "serviceaccounts": "/api/v1",
        "services": "/api/v1",
        "secrets": "/api/v1",
        "deployments": "/apis/apps/v1",
        "networkpolicies": "/apis/networking.k8s.io/v1",
        "roles": "/apis/rbac.authorization.k8s.io/v1",
    }
    return {
        f"{kind}/{one['metadata']['name']}"
        for kind, path in kinds.items()
        for one in server.send("GET", f"{path}/namespaces/{namespace}/{kind}").body["items"]
        if one["metadata"]["name"] != "default"
    }


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        pytest.param(
            "settings.namespaces={default,not-there}",
            "settings.namespaces holds not-there, which is not in the cluster; make it: kubectl "
            "create namespace not-there\n",
            id="a namespace that is not there",
        ),
        pytest.param(
            "resources.limits.memory=banana", "which is no quantity", id="a quantity that is none"
        ),
    ],
)
def test_nothing_is_installed_with_values_that_cannot_work(
    server: PlainApi, namespace: str, value: str, sentence: str
) -> None:
    answer = install(namespace, "--set", value)

    assert answer.returncode != 0
    assert sentence in answer.stderr
    assert made_in(server, namespace) == set()


def test_a_namespace_of_its_own_may_be_made_with_the_release_and_no_other(
    server: PlainApi, namespace: str
) -> None:
    fresh = f"{namespace}-fresh"
    served = f"settings.namespaces={{{fresh},not-there}}"

    answer = install(fresh, "--create-namespace", "--set", served)

    assert answer.returncode != 0
    told = [line for line in answer.stderr.splitlines() if "is not in the cluster" in line]
    assert [line for line in told if "holds not-there" not in line] == []
    assert told
    assert server.send("GET", f"{NAMESPACES}/{fresh}").status == 404


def test_a_name_that_no_namespace_can_have_is_not_to_be_made(namespace: str) -> None:
    answer = install(namespace, "--set", "settings.namespaces={team_A}")

    assert "settings.namespaces holds team_A, which is no name of a namespace" in answer.stderr
    assert "create namespace" not in answer.stderr


def test_user_of_one_namespace_installs_beside_what_an_administrator_applied(
    server: PlainApi, namespace: str
) -> None:
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    binding: Json = {
        "metadata": {"name": "tenant"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "admin",
        },
        "subjects": [{"kind": "User", "name": TENANT}],
    }
    assert server.send("POST", roles, json.dumps(binding), JSON).is_accepted

    refused = install(namespace, user=TENANT)
    assert f'User "{TENANT}" cannot list resource "clusterrolebindings"' in refused.stderr
    assert made_in(server, namespace) == set()

    without_roles = ("--set", "rbac.create=false")
    limited = install(namespace, *without_roles, user=TENANT)
    assert f'User "{TENANT}" cannot list resource "validatingadmissionpolicies"' in limited.stderr
    assert "--show-only templates/admissionpolicy.yaml | kubectl apply" in limited.stderr
    assert made_in(server, namespace) == set()

    answer = install(namespace, *without_roles, *UNLIMITED, user=TENANT)

    assert answer.returncode == 0, answer.stderr
    assert f"deployments/{namespace}-finetune-operator" in made_in(server, namespace)
    left = {one["kind"] for one in made_of(*DEFAULTS, *ADMINISTRATORS)}
    assert left == {one["kind"] for one in made_of(*DEFAULTS)} - MADE_BY_THE_USER
