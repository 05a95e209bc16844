"""`ftctl doctor --cluster` on an API server of its own, with faults one after the other.

Where a command of its findings can run here, it is run as it stands, and mends the fault.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.api.crd_revision import REVISION_ANNOTATION
from finetune_operator.cli.app import app
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    KUEUE_GROUP,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    Object,
    Resource,
)
from support.api.builders import manifest
from support.cluster.control_plane import GUEST, PROGRAMS, ControlPlane
from support.cluster.operators import ROOT, Api, wait_until
from support.kubernetes.kubernetes_cases import JOB, profile

pytestmark = pytest.mark.skipif(
    PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no control plane"
)

HOME = "finetune-operator"
LABELS = {"app.kubernetes.io/name": "finetune-operator"}
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", False)
VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
_ADMISSION = "admissionregistration.k8s.io"
_RBAC = "rbac.authorization.k8s.io"
_BINDINGS = Resource(_RBAC, "v1", "rolebindings", "")
POLICIES = Resource(_ADMISSION, "v1", "validatingadmissionpolicies", "", False)
BINDINGS = Resource(_ADMISSION, "v1", "validatingadmissionpolicybindings", "", False)

Doctor = Callable[..., "Report"]


class Report:
    """What it said."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.found: list[dict[str, str]] = json.loads(text)

    def of(self, name: str, topic: str = "") -> dict[str, str]:
        """Return the one finding of that name, and of a topic that begins so."""
        named = [one for one in self.found if one["name"] == name]
        [found] = [one for one in named if one["topic"].startswith(topic)]
        return found

    def states(self, topic: str) -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.found if one["topic"].startswith(topic)}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[Api]:
    made = Api(str(plane.kubeconfig))
    yield made
    made.close()


@pytest.fixture
def doctor(plane: ControlPlane, tmp_path: Path) -> Doctor:
    """Run it as the administrator or somebody without rights, in this process or its own."""

    def run(*arguments: str, as_guest: bool = False, is_apart: bool = False) -> Report:
        file = plane.kubeconfig
        if as_guest:
            config = yaml.safe_load(file.read_text())
            config["users"][0]["user"] = {"token": GUEST}
            file = tmp_path / "guest"
            file.write_text(yaml.safe_dump(config))
        command = ["doctor", "--cluster", "-o", "json", *arguments]
        environ = {"KUBECONFIG": str(file)}
        if is_apart:
            done = subprocess.run(
                [sys.executable, "-m", "finetune_operator", *command],
                env={**os.environ, **environ},
                capture_output=True,
                text=True,
            )
            return Report(done.returncode, done.stdout)
        invoked = CliRunner().invoke(app, command, env=environ)
        return Report(invoked.exit_code, invoked.stdout)

    return run


@pytest.fixture
def mend(plane: ControlPlane) -> Callable[[dict[str, str]], None]:
    """Run the command of a finding, in a shell of the administrator's."""

    def run(finding: dict[str, str]) -> None:
        assert PROGRAMS is not None
        path = os.pathsep.join([str(Path(sys.executable).parent), PROGRAMS, os.environ["PATH"]])
        environ = {**os.environ, "PATH": path, "KUBECONFIG": str(plane.kubeconfig)}
        shell = ["bash", "-euo", "pipefail", "-c", finding["command"]]
        done = subprocess.run(shell, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def put(api: Api) -> Iterator[Callable[..., None]]:
    """Create an object, and delete it after the test."""
    made: list[tuple[Resource, str, str | None]] = []

    def put(resource: Resource, name: str, namespace: str | None = None, **fields: Any) -> None:
        metadata = {"name": name, **fields.pop("metadata", {})}
        status = fields.pop("status", None)
        body: Object = {"metadata": metadata, **fields}
        api.run(api.client.create(resource, body, namespace))
        made.append((resource, name, namespace))
        if status is not None:
            change = {"status": status}
            api.run(api.client.patch(resource, name, namespace, change, subresource="status"))

    yield put
    for resource, name, namespace in reversed(made):
        api.run(api.client.delete(resource, name, namespace, grace_seconds=0))


def put_namespace(api: Api, name: str) -> None:
    if api.get(NAMESPACES, "", name) is None:
        api.run(api.client.create(NAMESPACES, {"metadata": {"name": name}}))


def put_operator(
    put: Callable[..., None], name: str, release: str = "", *, ready: int, **settings: str
) -> None:
    """Have a Deployment of two replicas as the chart makes it, of which so many are ready.

    `release` is helm's, if helm made it.
    """
    annotations = {"meta.helm.sh/release-name": release} if release else {}
    labels = {**LABELS, "app.kubernetes.io/instance": name}
    env = [{"name": f"FINETUNE_OPERATOR_{key}", "value": one} for key, one in settings.items()]
    container = {"name": "operator", "image": "x", "env": env}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 2, "selector": {"matchLabels": labels}, "template": pod}
    counts = dict.fromkeys(("readyReplicas", "updatedReplicas", "availableReplicas"), ready)
    status = {"replicas": 2, **counts}
    metadata = {"labels": labels, "annotations": annotations}
    put(DEPLOYMENTS, name, HOME, metadata=metadata, spec=spec, status=status)


def put_lease(put: Callable[..., None], holder: str, age_seconds: float) -> None:
    renewed = datetime.now(UTC) - timedelta(seconds=age_seconds)
    text = renewed.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    spec = {"holderIdentity": holder, "renewTime": text, "leaseDurationSeconds": 15}
    put(LEASES, "finetune-operator", HOME, spec=spec)


def test_an_empty_cluster_lacks_everything_and_each_fault_has_a_command(doctor: Doctor) -> None:
    report = doctor()
    missing = [one for one in report.found if one["state"] == "missing"]
    assert {one["topic"] for one in missing} == {
        "CustomResourceDefinitions",
        "operator",
        "profiles",
    }
    assert all(one["command"] for one in missing)
    assert report.of("finetunejobs.finetune.dev")["command"] == report.of("Deployment")["command"]
    assert report.of("finetunejobs.finetune.dev")["detail"] == "is not in the cluster"
    assert report.code == 1


def test_crds_are_installed_by_the_command_that_is_shown(
    doctor: Doctor, api: Api, put: Callable[..., None], mend: Callable[[dict[str, str]], None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "finetune-operator", ready=0)
    mend(doctor().of("finetunejobs.finetune.dev"))
    api.install_crds()  # returns when they are served
    assert set(doctor().states("CustomResourceDefinitions").values()) == {"ok"}


def test_a_crd_older_than_this_package_is_a_fault_and_the_command_renews_it(
    doctor: Doctor, api: Api, mend: Callable[[dict[str, str]], None]
) -> None:
    api.install_crds()
    name = "finetunejobs.finetune.dev"
    old = {"metadata": {"annotations": {REVISION_ANNOTATION: None}}}
    api.run(api.client.patch(CRDS, name, None, old))
    found = doctor().of(name)
    assert "without a revision, older than this ftctl's" in found["detail"]
    mend(found)
    assert doctor().of(name)["state"] == "ok"

    newer = {"metadata": {"annotations": {REVISION_ANNOTATION: "999"}}}
    api.run(api.client.patch(CRDS, name, None, newer))
    assert "revision 999, newer than" in doctor().of(name)["detail"]
    api.install_crds()


def test_the_operator_is_looked_for_with_its_replicas_and_its_lease(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "finetune-operator", ready=2)
    report = doctor()
    assert report.of(f"{HOME}/finetune-operator")["state"] == "ok"
    lease = f"Lease {HOME}/finetune-operator"
    assert "no replica has ever led" in report.of(lease)["detail"]
    put_lease(put, "pod-a", age_seconds=0)
    report = doctor()
    assert report.of(lease)["detail"] == "is held by pod-a"
    assert report.of("namespace default")["detail"].startswith("is served by")


def test_a_leader_that_renews_no_more_is_told(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "finetune-operator", ready=2)
    put_lease(put, "pod-a", age_seconds=600)
    found = doctor().of(f"Lease {HOME}/finetune-operator")
    assert "was not renewed by pod-a since" in found["detail"]
    assert found["command"].startswith(f"kubectl -n {HOME} logs deployment/finetune-operator")


def test_replicas_that_are_not_ready_say_why(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "finetune-operator", ready=0)
    waits = {"reason": "ImagePullBackOff", "message": "no such image"}
    container = {"name": "operator", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"containerStatuses": [{**container, "state": {"waiting": waits}}]}
    labels = {**LABELS, "app.kubernetes.io/instance": "finetune-operator"}
    spec = {"containers": [{"name": "operator", "image": "x"}]}
    put(PODS, "finetune-operator-0", HOME, metadata={"labels": labels}, spec=spec, status=status)
    report = doctor()
    found = report.of(f"{HOME}/finetune-operator")
    assert report.of(f"Lease {HOME}/finetune-operator")["command"] == found["command"]  # first
    assert found["state"] == "missing"
    assert "0 of 2 replicas ready" in found["detail"]
    assert "ImagePullBackOff: no such image" in found["detail"]
    # An upgrade to an image that is not there: the replicas before it go on.
    now = {"status": {"replicas": 3, "readyReplicas": 2, "unavailableReplicas": 1}}
    api.run(api.client.patch(DEPLOYMENTS, "finetune-operator", HOME, now, subresource="status"))
    found = doctor().of(f"{HOME}/finetune-operator")
    assert found["detail"].startswith("2 of 2 replicas ready, version unknown")
    assert ", but not all are updated and available; the image x cannot" in found["detail"]


def test_two_operators_of_one_namespace_and_none_of_another_are_told(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    for name, release, served in (("one", "ours", "team-a, team-b"), ("two", "", "team-b")):
        settings = {"NAMESPACES": served, "LEADER_ELECTION": "false"}
        put_operator(put, name, release, ready=2, **settings)
    both = doctor("-n", "team-b").of("namespace team-b", "operator")
    assert "is served by finetune-operator/one and finetune-operator/two" in both["detail"]
    assert both["command"] == f"kubectl -n {HOME} delete deployment two"
    assert doctor("-n", "team-a").of("namespace team-a", "operator")["state"] == "ok"
    none = doctor("-n", "team-c").of("namespace team-c", "operator")
    assert "is served by no operator" in none["detail"]
    assert none["command"].startswith(f"helm upgrade ours charts/finetune-operator -n {HOME} ")
    assert "--set 'settings.namespaces={team-a,team-b,team-c}'" in none["command"]
    of_helm = {"metadata": {"annotations": {"meta.helm.sh/release-name": None}}}
    api.run(api.client.patch(DEPLOYMENTS, "one", HOME, of_helm))
    command = doctor("-n", "team-c").of("namespace team-c", "operator")["command"]
    served = "FINETUNE_OPERATOR_NAMESPACES=team-a,team-b,team-c"
    assert command == f"kubectl -n {HOME} set env deployment/one {served}"


def test_two_operators_that_wait_for_one_lease_are_told(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    put_lease(put, "one-a", age_seconds=0)
    put_operator(put, "one", "one", ready=2, NAMESPACES="team-a")
    put_operator(put, "two", "two", ready=2, NAMESPACES="team-b", LEASE_NAME="finetune-operator")
    report = doctor("-n", "team-b")
    assert report.of(f"Lease {HOME}/finetune-operator")["state"] == "ok"
    fault = report.of(f"Lease of {HOME}/two")
    assert fault["detail"] == f"is shared with {HOME}/one, so only one Deployment works"
    upgrade = f"helm upgrade two charts/finetune-operator -n {HOME} --reset-then-reuse-values"
    assert fault["command"] == f"{upgrade} --set settings.leaseName=two"
    of_helm = {"metadata": {"annotations": {"meta.helm.sh/release-name": None}}}
    api.run(api.client.patch(DEPLOYMENTS, "two", HOME, of_helm))
    command = doctor("-n", "team-b").of(f"Lease of {HOME}/two")["command"]
    assert command == (f"kubectl -n {HOME} set env deployment/two FINETUNE_OPERATOR_LEASE_NAME=two")


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH")
def test_an_operator_without_rights_in_a_namespace_that_it_serves_is_told(
    doctor: Doctor, api: Api, put: Callable[..., None], mend: Callable[[dict[str, str]], None]
) -> None:
    for name in (HOME, "team-a", "team-b"):
        put_namespace(api, name)
    put_operator(put, "finetune-operator", ready=2, NAMESPACES="team-a,team-b")
    account = {"spec": {"template": {"spec": {"serviceAccountName": "finetune-operator"}}}}
    api.run(api.client.patch(DEPLOYMENTS, "finetune-operator", HOME, account))

    fault = doctor("-n", "team-b").of("its rights in team-b")

    assert fault["state"] == "missing"
    assert fault["detail"].startswith(
        f"{HOME}:finetune-operator may not list finetunejobs.finetune.dev, patch "
        "finetunejobs.finetune.dev/status, create jobs.batch, list pods"
    )
    mend(fault)
    for name in ("team-a", "team-b"):
        assert doctor("-n", name).of(f"its rights in {name}")["state"] == "ok"


def test_a_user_without_rights_sees_what_is_lacking_and_what_could_not_be_asked(
    doctor: Doctor, api: Api, mend: Callable[[dict[str, str]], None]
) -> None:
    api.install_crds()
    report = doctor(as_guest=True)
    assert report.of("user")["detail"] == GUEST
    rights = report.states("your rights")
    assert rights["create finetunejobs.finetune.dev"] == "missing"
    assert rights["get pods/log"] == "absent"
    for name in ("finetunejobs.finetune.dev", "FineTuneProfiles", "Nodes", "StorageClasses"):
        assert report.of(name)["state"] == "unknown"
    assert (
        "exists; you may not read its revision" in report.of("finetunejobs.finetune.dev")["detail"]
    )

    role = "kubectl create role guests --verb=list --resource=deployments.apps"
    mend({"command": f"{role}; kubectl create rolebinding guests --role=guests --user={GUEST}"})
    mend(report.of("list finetuneprofiles.finetune.dev"))
    report = doctor(as_guest=True)
    assert set(report.states("operator").values()) == {"unknown"}  # it may be elsewhere
    assert report.of("list finetuneprofiles.finetune.dev")["state"] == "ok"
    assert report.of("FineTuneProfiles")["state"] == "missing"  # there are none, as it may see now
    # Others start without rights too.
    cluster = "kubectl delete clusterrolebinding,clusterrole finetune-profiles"
    mend({"command": f"{cluster}; kubectl delete rolebinding,role guests"})


def test_a_profile_for_other_namespaces_is_opened_by_the_command(
    doctor: Doctor, api: Api, mend: Callable[[dict[str, str]], None]
) -> None:
    api.install_crds()
    put_namespace(api, "elsewhere")
    with api.profile("h100", profile()):
        none: Object = {"spec": {"allow": {"namespaces": []}}}
        api.run(api.client.patch(FINE_TUNE_PROFILES, "h100", None, none))
        for namespace in ("default", "elsewhere"):
            fault = doctor("-n", namespace).of(f"namespace {namespace}", "profiles")
            assert fault["detail"] == "no profile may be used in it"
            mend(fault)
            assert doctor("-n", namespace).states("profiles") == {"h100": "ok"}


def test_a_namespace_that_does_not_exist_is_made_by_the_command(
    doctor: Doctor, api: Api, mend: Callable[[dict[str, str]], None]
) -> None:
    fault = doctor("-n", "not-yet").of("namespace not-yet", "your rights")
    assert fault["detail"] == "does not exist"
    mend(fault)
    assert api.get(NAMESPACES, "", "not-yet") is not None


def test_storage_is_judged_by_its_driver_or_by_a_volume_that_shows_it(
    doctor: Doctor, put: Callable[..., None]
) -> None:
    for name, driver in (
        ("azurefile", "file.csi.azure.com"),
        ("managed", "disk.csi.azure.com"),
        ("own", "example.com/x"),
        ("seen", "example.com/y"),
    ):
        put(CLASSES, name, provisioner=driver)
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"]}
    source = {"hostPath": {"path": "/x"}}
    put(VOLUMES, "pv-1", spec={**spec, **source, "storageClassName": "seen"})
    assert doctor().states("storage") == {
        "azurefile": "ok",
        "managed": "absent",
        "own": "unknown",
        "seen": "ok",
    }


def test_gpus_are_counted_and_nodes_whose_driver_does_not_run_are_told(
    doctor: Doctor, put: Callable[..., None]
) -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    offers = {**ready, "allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}
    product = {"nvidia.com/gpu.product": "H100"}
    for name in ("a", "b"):
        put(NODES, name, metadata={"labels": product}, status=offers)
    put(NODES, "c", metadata={"labels": product}, spec={"unschedulable": True}, status=offers)
    put(NODES, "mute", metadata={"labels": {"accelerator": "nvidia"}}, status=ready)
    found = [one for one in doctor().found if one["topic"] == "GPU nodes"]
    told = {(one["name"], one["state"], one["detail"].partition(":")[0]) for one in found}
    assert told == {
        ("2 nodes", "ok", "8 nvidia.com/gpu (H100) each"),
        ("1 node", "absent", "8 nvidia.com/gpu (H100) each, cordoned"),
        ("mute", "missing", "has GPUs, and offers none"),
    }


DAEMON_SETS = Resource("apps", "v1", "daemonsets", "DaemonSet")
TEMPLATE = {
    "metadata": {"labels": {"app": "net"}},
    "spec": {"containers": [{"name": "net", "image": "registry.test/net"}]},
}
AKS_POLICY = "kubernetes.azure.com/network-policy"


@pytest.mark.parametrize(
    ("name", "engine", "ready", "state"),
    [
        pytest.param("cilium", "Cilium", 3, "ok", id="Cilium"),
        pytest.param("calico-node", "Calico", 3, "ok", id="Calico"),
        pytest.param("azure-npm", "Azure NPM", 3, "ok", id="Azure NPM"),
        pytest.param("azure-npm", "Azure NPM", 2, "absent", id="Azure NPM, not on every node"),
        pytest.param("azure-cns", "enforcement", 3, "unknown", id="a plugin without policies"),
    ],
)
def test_enforcement_of_network_policies_is_known_by_daemon_sets(
    doctor: Doctor, put: Callable[..., None], name: str, engine: str, ready: int, state: str
) -> None:
    spec = {"selector": {"matchLabels": {"app": "net"}}, "template": TEMPLATE}
    status = {
        "currentNumberScheduled": 3,
        "desiredNumberScheduled": 3,
        "numberMisscheduled": 0,
        "numberReady": ready,
    }
    put(DAEMON_SETS, name, "kube-system", spec=spec, status=status)
    assert doctor().states("NetworkPolicies") == {engine: state}


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        pytest.param(["none", "none"], {"enforcement": "absent"}, id="AKS without policies"),
        pytest.param(["calico", "calico"], {"Calico": "ok"}, id="AKS with Calico"),
        pytest.param(["none", "calico"], {"enforcement": "unknown"}, id="nodes that differ"),
        pytest.param([], {"enforcement": "unknown"}, id="no label"),
    ],
)
def test_enforcement_of_network_policies_is_known_by_labels_of_aks(
    doctor: Doctor, put: Callable[..., None], policies: list[str], expected: dict[str, str]
) -> None:
    for at, policy in enumerate(policies):
        put(NODES, f"aks-{at}", metadata={"labels": {AKS_POLICY: policy}})
    report = doctor()
    assert report.states("NetworkPolicies") == expected
    if expected == {"enforcement": "absent"}:
        assert "every pod of the cluster can connect" in report.of("enforcement")["detail"]
        assert report.of("enforcement")["command"].startswith("az aks update --network-policy")


def test_enforcement_is_unknown_to_a_user_who_may_not_list_daemon_sets(doctor: Doctor) -> None:
    found = doctor(as_guest=True).of("enforcement")
    assert found["state"] == "unknown"
    assert found["detail"].startswith("cannot be determined: you may list neither DaemonSets")


def test_a_policy_without_a_binding_has_no_effect_and_is_a_fault(
    doctor: Doctor, put: Callable[..., None]
) -> None:
    topic = "admission policy"
    assert doctor().states(topic) == {"ValidatingAdmissionPolicy": "absent"}
    rule = {
        "apiGroups": ["batch"],
        "apiVersions": ["v1"],
        "resources": ["jobs"],
        "operations": ["*"],
    }
    spec = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "object.metadata.name != 'x'"}],
    }
    put(POLICIES, "limits", metadata={"labels": LABELS}, spec=spec)
    assert doctor().states(topic) == {"limits": "missing"}
    bound = {"policyName": "limits", "validationActions": ["Deny"]}
    put(BINDINGS, "limits", metadata={"labels": LABELS}, spec=bound)
    assert doctor().states(topic) == {"limits": "ok"}


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on the PATH")
def test_the_policy_is_made_by_the_command_also_where_helm_did_not_install(
    doctor: Doctor, api: Api, put: Callable[..., None], mend: Callable[[dict[str, str]], None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "finetune-operator", ready=2)

    mend(doctor().of("ValidatingAdmissionPolicy"))

    ((name, state),) = doctor().states("admission policy").items()
    assert name.startswith(f"{HOME}-finetune-operator-limits-")
    assert state == "ok"
    for kind in (BINDINGS, POLICIES):
        api.run(api.client.delete(kind, name))


def test_the_policy_is_a_value_of_the_release_that_is_there(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    put_namespace(api, HOME)
    put_operator(put, "ours-finetune-operator", ready=2)
    release = {"metadata": {"annotations": {"meta.helm.sh/release-name": "ours"}}}
    api.run(api.client.patch(DEPLOYMENTS, "ours-finetune-operator", HOME, release))

    command = doctor().of("ValidatingAdmissionPolicy")["command"]

    assert command.startswith(f"helm upgrade ours charts/finetune-operator -n {HOME} ")


@pytest.mark.full
def test_a_cluster_that_hangs_ends_nothing_but_the_answers(
    doctor: Doctor, plane: ControlPlane, api: Api
) -> None:
    with plane.frozen_server():
        report = doctor(is_apart=True)  # whose connections nobody closes
    assert report.code == 1
    assert {one["state"] for one in report.found} == {"missing", "unknown"}

    timer = plane.stop_etcd(60)
    try:
        report = doctor(is_apart=True)  # what is in the server's memory is told all the same
    finally:
        timer.cancel()
        timer.function(*timer.args)
    assert report.of(report.found[0]["name"])["state"] == "ok"
    assert "unknown" in report.states("CustomResourceDefinitions").values()


def test_a_text_lists_each_command_once(plane: ControlPlane) -> None:
    done = CliRunner().invoke(
        app, ["doctor", "--cluster"], env={"KUBECONFIG": str(plane.kubeconfig)}
    )
    assert "Commands that fix it:" in done.stdout
    assert done.stdout.count("helm install finetune-operator") == 1
    assert done.exit_code == 1


def test_options_that_mean_nothing_here_are_refused() -> None:
    for wrong in (["doctor", "-n", "a"], ["doctor", "--cluster", "--azureml", "--profile", "x"]):
        assert CliRunner().invoke(app, wrong).exit_code == 2


LOCAL_QUEUES = Resource(KUEUE_GROUP, "v1beta1", "localqueues", "LocalQueue")


def put_kueue(api: Api, put: Callable[..., None]) -> None:
    """Serve the kind LocalQueue, as far as the doctor reads it."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": LOCAL_QUEUES.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    names = {"plural": LOCAL_QUEUES.plural, "kind": LOCAL_QUEUES.kind}
    spec = {"group": KUEUE_GROUP, "names": names, "scope": "Namespaced", "versions": [version]}
    # Groups of Kubernetes need the annotation.
    metadata = {"annotations": {"api-approved.kubernetes.io": "unapproved, a test"}}
    put(CRDS, f"{LOCAL_QUEUES.plural}.{KUEUE_GROUP}", metadata=metadata, spec=spec)

    def is_served() -> bool:
        try:
            api.run(api.client.list(LOCAL_QUEUES))
        except NotFoundError:
            return False
        return True

    wait_until(is_served, 30, "the kind LocalQueue is served")


def test_a_queue_without_kueue_and_a_queue_that_is_missing_or_inactive_are_faults(
    doctor: Doctor, api: Api, put: Callable[..., None]
) -> None:
    api.install_crds()
    put_namespace(api, "team-q")
    topic = "queues (Kueue)"
    assert doctor("-n", "team-q").states(topic) == {"Kueue": "absent"}
    body = manifest(**JOB, queue={"name": "gold"})
    kind = {name: body[name] for name in ("apiVersion", "kind")}
    put(FINE_TUNE_JOBS, "llama", "team-q", spec=body["spec"], **kind)
    fault = doctor("-n", "team-q").of("Kueue", topic)
    assert (fault["state"], fault["detail"]) == ("missing", "not installed, so llama cannot start")
    assert fault["command"].startswith("kubectl apply ")

    put_kueue(api, put)
    report = doctor("-n", "team-q")
    assert report.of("Kueue", topic)["detail"] == "serves kueue.x-k8s.io/v1beta1"
    fault = report.of("gold", topic)
    assert fault["detail"] == "does not exist in team-q; llama cannot start"

    stopped = {"type": "Active", "status": "False", "reason": "Stopped", "message": "is stopped"}
    spec, status = {"clusterQueue": "all"}, {"conditions": [stopped]}
    kind = {"apiVersion": LOCAL_QUEUES.api_version, "kind": LOCAL_QUEUES.kind}
    put(LOCAL_QUEUES, "gold", "team-q", spec=spec, status=status, **kind)
    put(LOCAL_QUEUES, "silver", "team-q", spec=spec, **kind)
    report = doctor("-n", "team-q")
    assert report.of("gold", topic)["detail"] == "admits no job: is stopped"
    assert report.of("silver", topic)["detail"] == "of ClusterQueue all"
    guest = doctor("-n", "team-q", as_guest=True)
    assert guest.of("LocalQueues", topic)["state"] == "unknown"


def test_a_bundle_of_a_user_who_may_only_read_jobs_names_the_parts_that_are_left_out(
    plane: ControlPlane, api: Api, put: Callable[..., None], tmp_path: Path
) -> None:
    api.install_crds()
    role = {"rules": [{"apiGroups": ["finetune.dev"], "resources": ["*"], "verbs": ["get"]}]}
    put(Resource(_RBAC, "v1", "roles", ""), "reader", "default", **role)
    subjects = [{"kind": "User", "name": GUEST, "apiGroup": _RBAC}]
    ref = {"kind": "Role", "name": "reader", "apiGroup": _RBAC}
    put(_BINDINGS, "reader", "default", subjects=subjects, roleRef=ref)
    body = manifest(**JOB)
    kind = {name: body[name] for name in ("apiVersion", "kind")}
    put(FINE_TUNE_JOBS, "tiny", "default", spec=body["spec"], **kind)
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": GUEST}
    kubeconfig = tmp_path / "guest"
    kubeconfig.write_text(yaml.safe_dump(config))

    command = ["doctor", "tiny", "--cluster", "--bundle", str(tmp_path / "out.tar.gz")]
    invoked = CliRunner().invoke(app, command, env={"KUBECONFIG": str(kubeconfig)})

    assert invoked.exit_code == 0, invoked.output
    for part in ("profile", "jobs", "pods", "events", "the operator's log"):
        assert f"- {part}: you may not read it" in invoked.stdout
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        names = [one.name for one in archive]
        table = archive.extractfile("bundle/doctor/cluster.txt")
        assert table is not None
        text = table.read().decode()
    assert "bundle/job.yaml" in names
    assert "bundle/pods.yaml" not in names
    assert GUEST not in text.split()
    assert "USER" in text.split()
