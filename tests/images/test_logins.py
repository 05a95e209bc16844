"""Each way to authenticate to a cluster, from the operator's image without most of `kubernetes`."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune_operator.kube.resources import Resource
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.issuer import Issuer, make_certificate
from support.cluster.operators import Api
from support.images.image_runs import Container

pytestmark = [
    pytest.mark.skipif(PROGRAMS is None, reason="KUBEBUILDER_ASSETS names no API server"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not on the PATH"),
]

ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
TOKENS = Resource("", "v1", "serviceaccounts/pod/token", "TokenRequest")
# Uses the client of the operator and ftctl.
ASK = """
import asyncio
from finetune_operator.kube.config import load_access
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import Resource

async def ask():
    async with HttpClient(await load_access()) as client:
        group = "authentication.k8s.io"
        kind = Resource(group, "v1", "selfsubjectreviews", "SelfSubjectReview", False)
        review = await client.create(kind, {"metadata": {}})
        print(review["status"]["userInfo"]["username"])

asyncio.run(ask())
"""


class Cluster:
    """An API server, its trusted issuer of OIDC tokens, and kubeconfigs."""

    def __init__(self, folder: Path, plane: ControlPlane, issuer: Issuer) -> None:
        self.folder = folder
        self.plane = plane
        self.issuer = issuer

    def kubeconfig(self, user: dict[str, object]) -> Path:
        """Write a kubeconfig of a user with the server's address and certificate."""
        server = {
            "server": self.plane.address,
            "certificate-authority-data": base64.b64encode(self.plane.certificate).decode(),
        }
        file = self.folder / "given"
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "a",
            "clusters": [{"name": "a", "cluster": server}],
            "users": [{"name": "a", "user": user}],
            "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        }
        file.write_text(json.dumps(kubeconfig), encoding="utf-8")
        file.chmod(0o644)
        return file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert PROGRAMS is not None
    folder = tmp_path_factory.mktemp("cluster")
    folder.chmod(0o755)
    make_certificate(folder, "clients", authority=None)
    with Issuer(folder) as issuer:
        flags = [
            f"--client-ca-file={folder / 'clients.crt'}",
            f"--oidc-issuer-url={issuer.address}",
            f"--oidc-ca-file={folder / 'issuer.crt'}",
            "--oidc-client-id=operator",
            "--oidc-username-claim=email",
        ]
        with ControlPlane(PROGRAMS, folder, flags) as plane:
            yield Cluster(folder, plane, issuer)


def who(container: Container, kubeconfig: Path, **mounts: Path) -> str:
    """Return the user name by which the API server knows a program of the image."""
    given = {kubeconfig: "/given", **{path: f"/{name}" for name, path in mounts.items()}}
    done = container.run("python", "-c", ASK, env={"KUBECONFIG": "/given"}, mounts=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_by_a_token(cluster: Cluster, operator_container: Container) -> None:
    assert who(operator_container, cluster.kubeconfig({"token": "admin"})) == "admin"


def test_by_a_certificate(cluster: Cluster, operator_container: Container) -> None:
    make_certificate(cluster.folder, "alice", authority="clients")
    key, certificate = (
        base64.b64encode((cluster.folder / f"alice.{one}").read_bytes()).decode()
        for one in ("key", "crt")
    )
    user: dict[str, object] = {"client-key-data": key, "client-certificate-data": certificate}
    assert who(operator_container, cluster.kubeconfig(user)) == "alice"


def test_by_an_exec_plugin(cluster: Cluster, operator_container: Container) -> None:
    plugin = cluster.folder / "plugin"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "admin"},
    }
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n", encoding="utf-8")
    plugin.chmod(0o755)
    run = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "/plugin",
        "interactiveMode": "Never",
    }
    user: dict[str, object] = {"exec": run}
    assert who(operator_container, cluster.kubeconfig(user), plugin=plugin) == "admin"


def test_by_oidc_with_a_token_that_is_renewed(
    cluster: Cluster, operator_container: Container
) -> None:
    config = {
        "client-id": "operator",
        "client-secret": "secret",
        "idp-issuer-url": cluster.issuer.address,
        "id-token": cluster.issuer.token("old@example.com", seconds=-60),
        "idp-certificate-authority-data": base64.b64encode(
            (cluster.folder / "issuer.crt").read_bytes()
        ).decode(),
        "refresh-token": "again",
    }
    user: dict[str, object] = {"auth-provider": {"name": "oidc", "config": config}}
    assert who(operator_container, cluster.kubeconfig(user)) == "new@example.com"
    assert cluster.issuer.renewed == ["again"]


def test_by_the_service_account_of_a_pod(cluster: Cluster, operator_container: Container) -> None:
    api = Api(str(cluster.plane.kubeconfig))
    api.run(api.client.create(ACCOUNTS, {"metadata": {"name": "pod"}}, "default"))
    response = api.run(api.client.create(TOKENS, {"spec": {}}, "default"))
    token = str(response["status"]["token"])
    api.close()
    folder = cluster.folder / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text(token, encoding="utf-8")
    (folder / "ca.crt").write_bytes(cluster.plane.certificate)
    (folder / "namespace").write_text("default", encoding="utf-8")
    host, _, port = cluster.plane.address.removeprefix("https://").rpartition(":")
    done = operator_container.run(
        *("python", "-c", ASK),
        env={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
        mounts={folder: "/run/secrets/kubernetes.io/serviceaccount"},
    )
    assert done.stdout.strip() == "system:serviceaccount:default:pod", done.stderr
