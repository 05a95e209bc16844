"""What a release finds in the cluster: definitions of others, older or newer, and other operators.

By helm, on an API server of its own.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from finetune_operator.api.crd_revision import REVISION_ANNOTATION, revision, revision_of
from finetune_operator.kube.api_errors import (
    ForbiddenError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    NAMESPACES,
    Object,
    Resource,
)
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.operators import ROOT, Api, wait_until
from support.kubernetes.kubernetes_cases import profile

HELM = shutil.which("helm")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(HELM is None, reason="helm is not on the PATH"),
    pytest.mark.skipif(PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no control plane"),
]
CHART = ROOT / "charts" / "finetune-operator"
INSTALL = ROOT / "charts" / "kustomize" / "install.yaml"
JOBS, PROFILES = "finetunejobs.finetune.dev", "finetuneprofiles.finetune.dev"
_ADMISSION = "admissionregistration.k8s.io"
_POLICIES = Resource(_ADMISSION, "v1", "validatingadmissionpolicies", "", False)
_ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "", False)
_BINDINGS = Resource(_ADMISSION, "v1", "validatingadmissionpolicybindings", "", False)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[Api]:
    made = Api(str(plane.kubeconfig))
    for name in ("one", "two", "team-a", "team-b"):
        made.run(made.client.create(NAMESPACES, {"metadata": {"name": name}}))
    yield made
    made.close()


class Releases:
    """helm on one cluster; what it installed is gone after the test."""

    def __init__(self, plane: ControlPlane, api: Api) -> None:
        self._environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        self._api = api

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Run helm; return what it refuses, empty where it does not."""
        assert HELM is not None
        command = [HELM, *arguments]
        done = subprocess.run(
            command, env=self._environ, input=stdin, capture_output=True, text=True
        )
        return done.stderr if done.returncode else ""

    def put(self, namespace: str, name: str = "ft", **values: object) -> str:
        """Install or upgrade a release of a namespace; return what helm refuses."""
        given = {"image": {"repository": "registry.test/x"}, **values}
        place = ("--install", name, str(CHART), "--namespace", namespace)
        return self.run("upgrade", *place, "--values", "-", stdin=json.dumps(given))

    def clear(self) -> None:
        client = self._api.client
        for namespace in ("one", "two"):
            for name in ("ft", "other"):
                self.run("uninstall", name, "--namespace", namespace, "--ignore-not-found")
        for kind in (_BINDINGS, _POLICIES):
            for one in self._api.run(client.list(kind)).items:
                self._api.run(client.delete(kind, one["metadata"]["name"]))
        for one in self._api.run(client.list(CRDS)).items:
            name = one["metadata"]["name"]
            # The API server cannot finish the deletion of a kind before its storage is ready.
            wait_until(partial(is_served, self._api, name), 60)
            self._api.run(client.delete(CRDS, name))
        wait_until(lambda: not self._api.run(client.list(CRDS)).items, 60)


@pytest.fixture
def releases(plane: ControlPlane, api: Api) -> Iterator[Releases]:
    made = Releases(plane, api)
    yield made
    made.clear()


def has(api: Api, name: str) -> int:
    return revision_of(api.run(api.client.get(CRDS, name)))


def is_served(api: Api, name: str) -> bool:
    """Whether objects of a definition can be listed; its storage is made after it."""
    kind = {JOBS: FINE_TUNE_JOBS, PROFILES: FINE_TUNE_PROFILES}[name]
    try:
        api.run(api.client.list(kind))
    except (NotFoundError, ThrottledError, UnavailableError):
        return False
    return True


def renumber(api: Api, name: str, number: int) -> None:
    change = {"metadata": {"annotations": {REVISION_ANNOTATION: str(number)}}}
    api.run(api.client.patch(CRDS, name, None, change))


def add_field(api: Api, name: str, field: str, number: int) -> None:
    """Make a definition newer by a field of the spec."""
    [version] = api.run(api.client.get(CRDS, name))["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"][field] = {"type": "string"}
    change = {"metadata": {"annotations": {REVISION_ANNOTATION: str(number)}}}
    api.run(api.client.patch(CRDS, name, None, {**change, "spec": {"versions": [version]}}))


def make_profile(api: Api, name: str) -> bool:
    """Make a profile, and say whether its kind is served."""
    kind = FINE_TUNE_PROFILES
    spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    made = {"apiVersion": kind.api_version, "kind": kind.kind, "spec": spec}
    try:
        api.run(api.client.create(kind, {**made, "metadata": {"name": name}}))
    except (NotFoundError, UnavailableError):
        return False
    return True


def knows_field(api: Api, name: str, field: str) -> bool:
    """Write a field of a profile, and say whether it is kept; a changed kind is away at first."""
    try:
        return field in write(api, name, {"spec": {field: "known"}})
    except UnavailableError:
        return False


def write(api: Api, name: str, change: Object) -> Object:
    """Change a profile, and return its spec as it is then."""
    spec: Object = api.run(api.client.patch(FINE_TUNE_PROFILES, name, None, change))["spec"]
    return spec


def apply_by_hand(api: Api, number: int | None) -> None:
    """Apply both definitions, with a revision other than their own if `number` is given."""
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        made = yaml.safe_load(file.read_text())
        if number is not None:
            made["metadata"]["annotations"][REVISION_ANNOTATION] = str(number)
        api.run(api.client.create(CRDS, made))


def is_guarded(api: Api) -> bool:
    try:
        renumber(api, JOBS, 0)
    except ForbiddenError:
        return True
    renumber(api, JOBS, revision(JOBS))
    return False


def test_whatever_applies_an_older_definition_is_refused_with_the_way_back(
    api: Api, releases: Releases
) -> None:
    assert releases.put("one") == ""
    wait_until(lambda: is_guarded(api), 20, "the API server knows the policy")
    renumber(api, JOBS, 7)
    with pytest.raises(ForbiddenError, match=r"revision 6 of .* is older than 7, .*crds.install=f"):
        renumber(api, JOBS, 6)
    with pytest.raises(ForbiddenError, match="revision 0 of"):
        api.run(api.client.patch(CRDS, JOBS, None, {"metadata": {"annotations": None}}))
    nobody_keeps = {"metadata": {"annotations": {"helm.sh/resource-policy": None}}}
    api.run(api.client.patch(CRDS, JOBS, None, nobody_keeps))
    with pytest.raises(
        ForbiddenError, match=f"kubectl annotate crd {JOBS} helm.sh/resource-policy"
    ):
        renumber(api, JOBS, 6)
    renumber(api, JOBS, 7)


def test_a_newer_definition_and_its_fields_outlive_an_older_chart(
    api: Api, releases: Releases
) -> None:
    assert releases.put("one") == ""
    wait_until(lambda: make_profile(api, "a"), 20, "the API server knows profiles")
    add_field(api, PROFILES, "soon", 99)
    wait_until(lambda: knows_field(api, "a", "soon"), 20, "the API server knows the field")

    assert releases.put("one", replicas=1) == ""
    assert (has(api, JOBS), has(api, PROFILES)) == (revision(JOBS), 99)
    written = write(api, "a", {"metadata": {"labels": {"a": "b"}}})
    assert written["soon"] == "known"
    assert releases.run("uninstall", "ft", "--namespace", "one") == ""
    assert write(api, "a", {"metadata": {"labels": {"a": "c"}}}) == written


def test_a_newer_definition_that_nothing_keeps_is_not_given_up(
    api: Api, releases: Releases
) -> None:
    assert releases.put("one", crds={"keep": False}) == ""
    renumber(api, PROFILES, 99)
    said = releases.put("one", replicas=1)
    assert "helm would delete it and every job with it" in said
    keep = {"metadata": {"annotations": {"helm.sh/resource-policy": "keep"}}}
    api.run(api.client.patch(CRDS, PROFILES, None, keep))  # as the sentence says
    assert releases.put("one", replicas=1) == ""
    assert has(api, PROFILES) == 99


@pytest.mark.parametrize("number", [None, 99], ids=["the same", "newer"])
def test_definitions_that_were_applied_by_hand_are_used_as_they_are(
    api: Api, releases: Releases, number: int | None
) -> None:
    there = {name: number or revision(name) for name in (JOBS, PROFILES)}
    apply_by_hand(api, number)
    assert releases.put("one") == ""
    assert {name: has(api, name) for name in there} == there
    assert releases.run("uninstall", "ft", "--namespace", "one") == ""
    assert {name: has(api, name) for name in there} == there


def test_older_definitions_that_were_applied_by_hand_are_named_with_the_command(
    api: Api, releases: Releases
) -> None:
    apply_by_hand(api, 0)
    said = releases.put("one")
    assert f"the cluster has {JOBS} of revision 0, and this release needs {revision(JOBS)}" in said
    assert "it was not made by helm" in said
    assert said.rstrip().endswith("ftctl crd | kubectl apply --server-side --force-conflicts -f -")


@pytest.mark.parametrize("namespace", ["one", "two"], ids=["the same release", "another"])
def test_definitions_that_a_release_left_are_used_by_the_next(
    api: Api, releases: Releases, namespace: str
) -> None:
    assert releases.put("one") == ""
    assert releases.run("uninstall", "ft", "--namespace", "one") == ""
    uid = api.run(api.client.get(CRDS, JOBS))["metadata"]["uid"]
    for replicas in (2, 1):
        assert releases.put(namespace, replicas=replicas) == ""
    assert releases.run("rollback", "ft", "--namespace", namespace) == ""
    assert api.run(api.client.get(CRDS, JOBS))["metadata"]["uid"] == uid


def test_older_definitions_that_a_release_left_are_upgraded(api: Api, releases: Releases) -> None:
    assert releases.put("one", crds={"guard": False}, admissionPolicy={"create": False}) == ""
    assert releases.run("uninstall", "ft", "--namespace", "one") == ""
    wait_until(lambda: not is_guarded(api), 20, "the API server has forgotten an earlier policy")
    renumber(api, JOBS, 0)
    said = releases.put("one")
    if said:  # by the chart, as this helm would stop halfway
        assert "helm 4.0 cannot install over it. First run: ftctl crd | kubectl apply" in said
        assert releases.run("status", "ft", "--namespace", "one").endswith("not found\n")
        renumber(api, JOBS, revision(JOBS))
        assert releases.put("one") == ""
    assert has(api, JOBS) == revision(JOBS)


def test_a_second_release_uses_the_definitions_of_the_first(api: Api, releases: Releases) -> None:
    assert releases.put("one", settings={"namespaces": ["team-a"]}) == ""
    assert releases.put("two", settings={"namespaces": ["team-b"]}) == ""
    assert releases.run("uninstall", "ft", "--namespace", "two") == ""
    assert has(api, JOBS) == revision(JOBS)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        pytest.param([], [], "every namespace", id="both serve all"),
        pytest.param([], ["team-a"], "team-a", id="the second serves one of all"),
        pytest.param(["team-a"], [], "some namespaces", id="the second serves all"),
        pytest.param(["team-a", "team-b"], ["team-b"], "team-b", id="both serve one"),
    ],
)
def test_two_releases_that_serve_one_namespace_are_refused(
    api: Api, releases: Releases, first: list[str], second: list[str], both: str
) -> None:
    none = {"install": False}
    assert releases.put("one", crds=none, settings={"namespaces": first}) == ""
    said = releases.put("two", crds=none, settings={"namespaces": second})
    assert f"release ft of namespace one serves {both} already" in said
    assert said.rstrip().endswith("helm uninstall ft --namespace one")
    assert releases.put("one", crds=none, settings={"namespaces": first}, replicas=1) == ""


@pytest.mark.parametrize(
    ("option", "served"), [("nameOverride", []), ("fullnameOverride", ["team-a"])]
)
def test_an_upgrade_may_change_the_name_of_its_objects(
    api: Api, releases: Releases, option: str, served: list[str]
) -> None:
    values: dict[str, Any] = {"crds": {"install": False}, "settings": {"namespaces": served}}
    assert releases.put("one", **values) == ""
    assert releases.put("one", **values, **{option: "tuner"}) == ""
    bindings = [one["metadata"]["name"] for one in api.run(api.client.list(_ROLE_BINDINGS)).items]
    ours = [name for name in bindings if name.startswith("one-")]
    assert len(ours) == 1
    assert ours[0].endswith("tuner")
    assert "release ft of namespace one serves" in releases.put(
        "two", **values, **{option: "other"}
    )
    assert releases.put("one", **values) == ""


def test_two_releases_of_one_namespace_do_not_wait_for_one_lease(releases: Releases) -> None:
    none = {"install": False}
    assert releases.put("one", crds=none, settings={"namespaces": ["team-a"]}) == ""
    given = {"namespaces": ["team-b"]}
    said = releases.put("one", "other", crds=none, settings=given)
    assert "the Lease of release ft in this namespace, so that only one of both would work" in said
    option, _, value = said.rstrip().rpartition("--set ")[2].partition("=")
    assert option == "settings.leaseName"
    assert releases.put("one", "other", crds=none, settings={**given, "leaseName": value}) == ""
    assert releases.run("uninstall", "other", "--namespace", "one") == ""
    roles = {"create": False}  # by which a release knows what others serve
    said = releases.put("one", "other", crds=none, rbac=roles, settings={"leaseName": value})
    assert "release ft of this namespace serves team-a already" in said
    assert releases.put("one", crds=none, settings={"namespaces": ["team-a"]}, replicas=1) == ""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")
def test_an_operator_that_kubectl_applied_counts_as_a_release(
    plane: ControlPlane, releases: Releases
) -> None:
    environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    apply = ["kubectl", "apply", "--server-side", "-f", str(INSTALL)]
    subprocess.run(apply, env=environ, check=True, capture_output=True)

    none = {"install": False}
    said = releases.put("one", crds=none)
    assert "ClusterRoleBinding finetune-operator-finetune-operator serves every namespace" in said
    subprocess.run(said.rpartition("first run: ")[2], shell=True, env=environ, check=True)
    assert releases.put("one", crds=none) == ""


def test_who_may_not_make_admission_policies_leaves_the_guard_out(releases: Releases) -> None:
    assert releases.put("one", crds={"guard": False}, admissionPolicy={"create": False}) == ""


def test_the_policies_are_in_what_kubectl_and_kustomize_apply() -> None:
    kinds = [one["kind"] for one in yaml.safe_load_all(INSTALL.read_text()) if one]
    assert kinds.count("ValidatingAdmissionPolicyBinding") == 2


def test_an_upgrade_that_would_refuse_the_pods_of_a_profile_names_the_values(
    api: Api, releases: Releases
) -> None:
    assert releases.put("one", admissionPolicy={"create": False}) == ""
    wait_until(lambda: is_served(api, PROFILES), 60)
    sources: list[Object] = [
        {"hostPath": {"path": "/mnt/nvme/"}},
        {"hostPath": {"path": "/data/sets"}},
        {"csi": {"driver": "smb.csi.k8s.io"}},
        {"nfs": {"server": "nfs.test", "path": "/"}},
        {"emptyDir": {}},
    ]
    volumes = [
        {"name": f"v{at}", "mountPath": f"/v{at}", "source": source}
        for at, source in enumerate(sources)
    ]
    profile = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneProfile",
        "metadata": {"name": "fast"},
        "spec": {"image": "reg.test/t:1", "volumes": volumes},
    }
    api.run(api.client.create(FINE_TUNE_PROFILES, profile))

    refusal = releases.put("one", admissionPolicy={"hostPaths": ["/data"]})

    wanted = {
        "hostPaths": "{/data,/mnt/nvme}",
        "csiDrivers": "{blob.csi.azure.com,file.csi.azure.com,smb.csi.k8s.io}",
    }
    for name, value in wanted.items():
        assert f"write --set 'admissionPolicy.{name}={value}'" in refusal
    assert "admissionPolicy.volumes lacks nfs of FineTuneProfile fast" in refusal
    policy = {
        "hostPaths": ["/data", "/mnt/nvme"],
        "csiDrivers": ["smb.csi.k8s.io"],
        "volumes": ["csi", "emptyDir", "hostPath", "nfs"],
    }
    assert releases.put("one", admissionPolicy=policy) == ""
    # The policy that an upgrade added can be changed by the next.
    assert releases.put("one", admissionPolicy={**policy, "hostPaths": ["/data", "/mnt"]}) == ""
    # Without roles to create, helm may run for a user who may not list profiles.
    assert releases.put("one", rbac={"create": False}) == ""
