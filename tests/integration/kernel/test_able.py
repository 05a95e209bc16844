"""Ready means able: a replica without its rights or its CRDs is not, and names what mends it.

The commands that it names are run as they stand. The control plane is the tests' own, as they take
away what other tests need: KUBEBUILDER_ASSETS names the folder of its programs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

from finetune_operator import __version__
from finetune_operator.api.crd import crd_files
from finetune_operator.api.crd_revision import REVISION_ANNOTATION, revision
from finetune_operator.kube.resources import CRDS, EVENTS, LEASES, PODS, Resource
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.operators import Api, OperatorProcess, wait_until
from support.cluster.permissions import (
    ABOUT_ITSELF,
    CLUSTER_WIDE,
    FOR_THE_LEASE,
    WHERE_JOBS_ARE,
    Permission,
)
from support.cluster.service_account import open_account

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no control plane"),
    pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not on the PATH"),
]

HERE = (*WHERE_JOBS_ARE, *FOR_THE_LEASE, *ABOUT_ITSELF)
UNASKED = "has not reviewed the rights of this replica yet"
JOBS_CRD = "finetunejobs.finetune.dev"
SOON: dict[str, Any] = {"resync_seconds": 1}
SHORT: dict[str, Any] = {"lease_seconds": 3, "renew_deadline_seconds": 2, "renew_seconds": 0.5}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="module")
def own_api(plane: ControlPlane) -> Iterator[Api]:
    made = Api(str(plane.kubeconfig))
    made.install_crds()
    yield made
    made.close()


def run(plane: ControlPlane, command: str) -> str:
    """Run a command as an administrator would; it must succeed."""
    own = str(Path(sys.executable).parent)
    environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    environ["PATH"] = os.pathsep.join((own, environ["PATH"]))
    done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def is_ready(operator: OperatorProcess) -> bool:
    found = operator.health()
    assert (found["code"] == 200) == found["ready"]
    return bool(found["ready"])


def unable(operator: OperatorProcess) -> list[str]:
    """Return what is missing, once that is known; it costs no restart."""

    def known() -> list[str]:
        said: list[str] = operator.health()["unable"]
        return [] if said and said[0].endswith(UNASKED) else said

    said = wait_until(known, 20, "it is known what is missing")
    assert not is_ready(operator)
    assert operator.health("healthz")["code"] == 200
    return said


def is_all(operator: OperatorProcess, wanted: str) -> bool:
    """Say whether nothing else is missing.

    Between a refusal and the questions that follow, the API server's sentence is all there is.
    """
    return all(wanted in one for one in unable(operator))


def mend(plane: ControlPlane, operator: OperatorProcess) -> None:
    """Run what the operator says, until it is Ready."""
    for fault in unable(operator):
        run(plane, fault.partition("; fix it with: ")[2])
    wait_until(lambda: is_ready(operator), 20, "it is Ready again")


def without(rights: tuple[Permission, ...], resource: Resource, verb: str) -> list[Permission]:
    """Return rights but for one verb of one kind."""
    made = []
    for one in rights:
        is_it = one.resource == resource and not one.subresource
        verbs = tuple(each for each in one.verbs if not (is_it and each == verb))
        made.append(Permission(one.resource, verbs, one.subresource, one.names))
    assert made != list(rights)
    return [one for one in made if one.verbs]


def test_a_replica_without_any_right_names_each_that_it_lacks_and_the_command_that_gives_it(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    with (
        own_api.namespace("bare") as namespace,
        open_account(own_api, namespace, tmp_path, cluster_wide=()) as account,
        OperatorProcess(account.kubeconfig, namespace, **SOON) as operator,
    ):
        who = f"system:serviceaccount:{namespace}:operator"
        lease = "leases.coordination.k8s.io"
        crd = "customresourcedefinitions.apiextensions.k8s.io"
        wait_until(lambda: len(operator.said("not ready")) == 6, 20, "it is told")
        said = unable(operator)
        assert [one.partition(";")[0] for one in said] == [
            f"{who} may not get {crd} finetunejobs.finetune.dev",
            f"{who} may not get {crd} finetuneprofiles.finetune.dev",
            f"{who} may not get and update {lease} finetune-operator in namespace {namespace}",
            f"{who} may not create {lease} in namespace {namespace}",
            f"{who} may not list and watch {JOBS_CRD} in namespace {namespace}",
            f"{who} may not list and watch finetuneprofiles.finetune.dev",
        ]
        assert [line["fault"] for line in operator.said("not ready")] == said
        mend(plane, operator)
        operator.wait_for("synced")
        assert operator.health()["leading"]


def test_a_right_that_is_taken_away_is_missed_and_named_alone(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    in_namespace = [(LEASES, "get"), (LEASES, "update")]
    in_namespace += [(one.resource, "list") for one in WHERE_JOBS_ARE[:1]]
    in_cluster = [(one.resource, one.verbs[0]) for one in CLUSTER_WIDE]
    with (
        own_api.namespace("taken") as namespace,
        open_account(own_api, namespace, tmp_path) as account,
        OperatorProcess(account.kubeconfig, namespace, **SOON) as operator,
    ):
        account.grant(HERE)
        wait_until(lambda: is_ready(operator) and operator.health()["leading"], 30, "it leads")
        for resource, verb in (*in_namespace, *in_cluster):
            if (resource, verb) in in_cluster:
                account.grant_everywhere(without(CLUSTER_WIDE, resource, verb))
            else:
                account.grant(without(HERE, resource, verb))
            wanted = f"{namespace}:operator may not {verb} {resource}"
            wait_until(partial(is_all, operator, wanted), 30, wanted)
            account.grant(HERE)
            account.grant_everywhere(CLUSTER_WIDE)
            wait_until(lambda: is_ready(operator), 20, f"{verb} {resource} is back")


def test_a_standby_that_could_not_take_the_lease_over_is_not_ready(
    own_api: Api, tmp_path: Path
) -> None:
    with (
        own_api.namespace("standby") as namespace,
        open_account(own_api, namespace, tmp_path) as account,
        OperatorProcess(own_api.kubeconfig, namespace, "leader") as leader,
    ):
        account.grant(without(HERE, LEASES, "update"))
        wait_until(lambda: is_ready(leader) and leader.health()["leading"], 30, "it leads")
        with OperatorProcess(account.kubeconfig, namespace, "standby") as standby:
            (said,) = unable(standby)
            assert "operator may not update leases.coordination.k8s.io finetune-operator" in said
            account.grant(HERE)
            wait_until(lambda: is_ready(standby), 20, "it is Ready")
            assert not standby.health()["leading"]


def test_probes_cost_no_request_and_a_round_of_questions_comes_seldom(own_api: Api) -> None:
    with (
        own_api.namespace("probes") as namespace,
        OperatorProcess(own_api.kubeconfig, namespace) as operator,
    ):
        wait_until(lambda: is_ready(operator) and operator.health()["leading"], 30, "it leads")
        questions = ("create selfsubject", "get customresourcedefinitions")

        def asked() -> int:
            counts = operator.health()["calls"].items()
            return sum(count for kind, count in counts if kind.startswith(questions))

        before = asked()
        assert before <= 10
        renewed = "update leases 200"
        wait_until(lambda: operator.health()["calls"].get(renewed, 0) > 2, 20, "some probes")
        assert asked() == before


def test_what_is_missing_stands_where_kubectl_describes_the_pod(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    container = {"name": "operator", "image": "registry.test/x:1"}
    body = {"metadata": {"name": "replica"}, "spec": {"containers": [container]}}
    with (
        own_api.namespace("described") as namespace,
        open_account(own_api, namespace, tmp_path) as account,
    ):
        account.grant(without(HERE, LEASES, "update"))
        pod = own_api.run(own_api.client.create(PODS, body, namespace))["metadata"]
        own = {"pod_name": pod["name"], "pod_uid": pod["uid"]}
        with OperatorProcess(account.kubeconfig, namespace, **own) as operator:
            (said,) = unable(operator)
            wait_until(lambda: own_api.events(namespace, "replica") == ["NotReady"], 30)
            shown = run(plane, f"kubectl describe pod replica --namespace {namespace}")
            assert said in shown
            assert own_api.run(own_api.client.list(EVENTS, namespace)).items[0]["type"] == "Warning"


def older(name: str) -> dict[str, Any]:
    """Return the CRD as a release would have it whose schema has no number yet."""
    texts = [yaml.safe_load(text) for text in crd_files().values()]
    (made,) = (one for one in texts if one["metadata"]["name"] == name)
    found: dict[str, Any] = made
    found["metadata"]["annotations"].pop(REVISION_ANNOTATION)
    found["metadata"]["labels"]["app.kubernetes.io/version"] = "0.0.9"
    return found


def apply(plane: ControlPlane, folder: Path, definition: dict[str, Any]) -> None:
    file = folder / "crd.yaml"
    file.write_text(yaml.safe_dump(definition))
    run(plane, f"kubectl replace -f {file}")


def test_a_leader_whose_crd_becomes_older_writes_nothing_until_that_is_mended(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    with (
        own_api.namespace("older") as namespace,
        OperatorProcess(own_api.kubeconfig, namespace, **SOON) as operator,
    ):
        wait_until(lambda: is_ready(operator) and operator.health()["leading"], 30, "it leads")
        apply(plane, tmp_path, older(JOBS_CRD))
        (said,) = unable(operator)
        assert said == (
            f"the CustomResourceDefinition {JOBS_CRD} has revision 0 (version 0.0.9), and this "
            f"operator (version {__version__}) needs revision {revision(JOBS_CRD)}; fix it with: "
            "ftctl crd | kubectl apply --server-side --force-conflicts -f -"
        )
        wait_until(lambda: not operator.health()["leading"], 30, "it gives the Lease up")
        own_api.apply(namespace, "waits")
        rounds = len(operator.said("released the lease"))
        assert rounds == 1
        assert own_api.attempts(namespace) == []
        mend(plane, operator)
        wait_until(lambda: own_api.attempts(namespace) == ["waits-1"], 20, "it is served")


def test_a_replica_that_finds_no_crd_waits_for_it_and_then_works(
    plane: ControlPlane, own_api: Api
) -> None:
    own_api.run(own_api.client.delete(CRDS, JOBS_CRD))
    wait_until(lambda: own_api.get(CRDS, "", JOBS_CRD) is None, 60, "it is gone")
    with (
        own_api.namespace("nothing") as namespace,
        OperatorProcess(own_api.kubeconfig, namespace) as operator,
    ):
        (said,) = unable(operator)
        assert said.startswith(
            f"the cluster has no CustomResourceDefinition {JOBS_CRD}, which version {__version__}"
        )
        mend(plane, operator)
        own_api.apply(namespace, "first")
        wait_until(lambda: own_api.attempts(namespace) == ["first-1"], 20, "it is served")


def test_crds_of_another_helm_release_are_upgraded_by_that_release(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    definition = older(JOBS_CRD)
    owner = {"meta.helm.sh/release-name": "theirs", "meta.helm.sh/release-namespace": "elsewhere"}
    definition["metadata"]["annotations"] |= owner
    apply(plane, tmp_path, definition)
    with (
        own_api.namespace("theirs") as namespace,
        OperatorProcess(own_api.kubeconfig, namespace) as operator,
    ):
        (said,) = unable(operator)
        assert said.endswith(
            "fix it with: helm upgrade theirs charts/finetune-operator --namespace elsewhere "
            "--reset-then-reuse-values"
        )
    own_api.install_crds()


def test_where_questions_about_rights_are_refused_the_refused_lease_itself_is_told(
    plane: ControlPlane, own_api: Api, tmp_path: Path
) -> None:
    shown = run(plane, "kubectl get clusterrolebinding system:basic-user -o yaml")
    run(plane, "kubectl delete clusterrolebinding system:basic-user")
    try:
        with (
            own_api.namespace("silent") as namespace,
            open_account(own_api, namespace, tmp_path) as account,
            OperatorProcess(account.kubeconfig, namespace) as operator,
        ):
            account.grant(without(HERE, LEASES, "get"))
            (said,) = unable(operator)
            assert f'User "system:serviceaccount:{namespace}:operator" cannot get resource' in said
            account.grant(HERE)
            wait_until(lambda: is_ready(operator), 20, "it is Ready")
    finally:
        file = tmp_path / "binding.yaml"
        file.write_text(shown)
        run(plane, f"kubectl apply -f {file}")


def test_an_api_server_that_is_away_costs_no_replica(plane: ControlPlane, own_api: Api) -> None:
    with (
        own_api.namespace("away") as namespace,
        OperatorProcess(own_api.kubeconfig, namespace, "one", **SHORT, **SOON) as one,
    ):
        wait_until(lambda: one.health()["leading"] and is_ready(one), 30, "it leads")
        with OperatorProcess(own_api.kubeconfig, namespace, "two", **SHORT, **SOON) as two:
            wait_until(lambda: is_ready(two), 30, "the standby is Ready")
            plane.kill_server()
            try:
                codes = set()
                while not one.said("lost the lease"):
                    for each in (one, two):
                        codes |= {each.health(page)["code"] for page in ("readyz", "healthz")}
                codes |= {each.health()["code"] for each in (one, two)}
                with OperatorProcess(own_api.kubeconfig, namespace, "new", **SHORT) as new:
                    (said,) = unable(new)
                    assert said.startswith("the API server has not reviewed the rights of this")
                    plane.start_server()
                    wait_until(lambda: is_ready(new), 30, "it is Ready")
            finally:
                plane.kill_server()
                plane.start_server()
            assert codes == {200}
            wait_until(lambda: one.health()["leading"] or two.health()["leading"], 30, "one leads")
            wait_until(lambda: is_ready(one) and is_ready(two), 30, "both are Ready")
