"""An install by somebody who may make no ClusterRoles: its page, run as it stands."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

from finetune_operator.kube.resources import Resource
from support.charts.helm_chart import needs_helm
from support.cluster.operators import KUBECONFIG, ROOT, Api, OperatorProcess, open_api, wait_until
from support.cluster.service_account import kubeconfig_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(KUBECONFIG is None, reason="FINETUNE_TEST_KUBECONFIG names no cluster"),
    pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not on the PATH"),
    needs_helm,
]
PAGE = (ROOT / "docs" / "how-to" / "install-without-cluster-roles.md").read_text(encoding="utf-8")
TITLE = "## Commands"
_RBAC = "rbac.authorization.k8s.io"
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
BINDINGS = Resource(_RBAC, "v1", "rolebindings", "RoleBinding")
GUARD = "validatingadmissionpolicy,validatingadmissionpolicybinding"
INSTALL = (
    "helm install ft charts/finetune-operator --namespace finetune-operator "
    "--set image.repository=registry.example.com/finetune-operator"
)


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    assert KUBECONFIG is not None
    with open_api(KUBECONFIG) as made:
        yield made


def blocks() -> list[str]:
    """Return the commands of the page's last section."""
    shown = re.findall(r"```console\n\$ (.*?)\n```", PAGE[PAGE.index(TITLE) :], re.DOTALL)
    assert len(shown) == 3
    return [str(one) for one in shown]


def words_of(command: str) -> str:
    """Return a command of the page as the sentence of helm has it: one line, and its own words."""
    line = " ".join(command.replace("\\\n", " ").split())
    own = {
        "template finetune-operator": "template RELEASE",
        "--namespace finetune-operator": "--namespace NAMESPACE",
        "registry.example.com/finetune-operator": "IMAGE",
    }
    for shown, word in own.items():
        line = line.replace(shown, word)
    return line


def run(command: str, namespace: str, kubeconfig: Path | str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the page as somebody, in another namespace than the page's."""
    command = command.replace("--namespace finetune-operator", f"--namespace {namespace}")
    environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    shell = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(shell, env=environ, cwd=ROOT, capture_output=True, text=True)


@contextmanager
def admin_of(api: Api, namespace: str, folder: Path) -> Iterator[Path]:
    """Have somebody with Kubernetes' own role `admin` in one namespace; yield his kubeconfig."""
    api.run(api.client.create(ACCOUNTS, {"metadata": {"name": "jo"}}, namespace))
    who = {"kind": "ServiceAccount", "name": "jo", "namespace": namespace}
    which_role = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "admin"}
    body = {"metadata": {"name": "jo"}, "subjects": [who], "roleRef": which_role}
    api.run(api.client.create(BINDINGS, body, namespace))
    file = folder / "jo.yaml"
    file.write_text(kubeconfig_of(api, namespace, "jo"))
    yield file


def left(namespace: str) -> str:
    """Return what is in a namespace besides what every namespace has."""
    kinds = "deployments,services,networkpolicies,poddisruptionbudgets,secrets,roles"
    done = run(f"kubectl get {kinds} --namespace {namespace} -o name", namespace, KUBECONFIG or "")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_admin_of_one_namespace_installs_what_an_administrator_has_prepared(
    api: Api, tmp_path: Path
) -> None:
    prepare, install, forget = blocks()
    assert KUBECONFIG is not None
    with api.namespace("unable") as namespace, admin_of(api, namespace, tmp_path) as jo:
        refused = run(INSTALL, namespace, jo)
        assert refused.returncode != 0
        assert "is forbidden" in refused.stderr
        assert words_of(prepare) in refused.stderr
        assert "--set rbac.create=false --set admissionPolicy.create=false" in refused.stderr
        assert left(namespace) == ""
        try:
            for command, who in ((prepare, KUBECONFIG), (install, jo)):
                done = run(command, namespace, who)
                assert done.returncode == 0, done.stderr
            account = tmp_path / "operator.yaml"
            account.write_text(kubeconfig_of(api, namespace, "finetune-operator"))
            with OperatorProcess(account, namespace) as operator:
                wait_until(lambda: operator.health()["leading"], 30, "it leads")
                wait_until(lambda: operator.health()["ready"], 30, "it is Ready")
                assert operator.health()["unable"] == []
            assert "secret/sh.helm.release" in left(namespace)
            done = run(forget, namespace, jo)
            assert done.returncode == 0, done.stderr
            assert "secret/sh.helm.release" not in left(namespace)
        finally:
            ours = f"{namespace}-finetune-operator"
            names = " ".join(f"{ours}{end}" for end in ("", "-view", "-edit", "-profiles"))
            for command in (
                f"kubectl delete clusterrole --ignore-not-found {names}",
                f"kubectl delete clusterrolebinding --ignore-not-found {ours}",
            ):
                assert run(command, namespace, KUBECONFIG).returncode == 0
            run(f"kubectl delete {GUARD} crds.finetune.dev", namespace, KUBECONFIG)
            ours = f"kubectl get {GUARD} -o name | grep /{namespace}-"
            run(f"{ours} | xargs kubectl delete", namespace, KUBECONFIG)
