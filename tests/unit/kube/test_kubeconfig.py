"""How a kubeconfig is read, and each way in which it logs in; programs are started for real."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.api_errors import KubeConfigError, UnauthorizedError
from finetune_operator.kube.auth_provider import AuthProvider
from finetune_operator.kube.config import ClusterAccess, load_access
from finetune_operator.kube.credentials import TokenFile
from finetune_operator.kube.kubeconfig import read_login
from finetune_operator.kube.login import Certificate, Login

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a kubeconfig of one user."""

    def write(user: dict[str, Any], name: str = "config", **cluster: Any) -> str:
        file = tmp_path / name
        made = {
            "current-context": name,
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "clusters": [{"name": name, "cluster": {"server": f"https://{name}:6443/", **cluster}}],
            "users": [{"name": name, "user": user}],
        }
        file.write_text(yaml.safe_dump(made))
        return str(file)

    return write


def header_of(path: str) -> str | None:
    async def work() -> str | None:
        return (await (await load_access(path)).headers()).get("Authorization")

    return asyncio.run(work())


def script(folder: Path, text: str) -> str:
    """Return a shell script's path, relative to the folder."""
    (folder / "plugin").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "plugin").chmod(0o755)
    return "./plugin"


def plugin(folder: Path, text: str, **more: Any) -> dict[str, Any]:
    version = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": version, "command": script(folder, text), **more}}


def credential(**status: str) -> str:
    return f"echo '{json.dumps({'kind': 'ExecCredential', 'status': status})}'"


def test_the_cluster_of_the_current_context_is_read(write: Write, tmp_path: Path) -> None:
    more = {"tls-server-name": "api", "proxy-url": "http://proxy:3128"}
    path = write({"token": "t"}, **more, **{"certificate-authority": "ca.crt"})
    login = read_login(path)
    assert (login.host, login.server_name, login.proxy) == (
        "https://config:6443",
        "api",
        more["proxy-url"],
    )
    assert login.ca == tmp_path / "ca.crt"


def test_a_name_counts_where_it_stands_first_and_paths_begin_at_their_file(
    write: Write, tmp_path: Path
) -> None:
    one, two = write({"token": "1"}, "one"), write({"token": "2"}, "two")
    absent = str(tmp_path / "absent")
    assert header_of(f"{absent}:{two}:{one}") == "Bearer 2"


@pytest.mark.parametrize(
    ("user", "header"),
    [
        pytest.param({"token": "t"}, "Bearer t", id="token"),
        pytest.param({"token": 12345678}, "Bearer 12345678", id="a token that looks like a number"),
        pytest.param({"username": "a", "password": "b"}, "Basic YTpi", id="password"),
        pytest.param({}, None, id="nobody"),
    ],
)
def test_what_does_not_change_is_sent(write: Write, user: dict[str, Any], header: str) -> None:
    assert header_of(write(user)) == header


def test_a_token_file_is_read_again_after_a_minute(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "token"
    token = TokenFile(file, clock=lambda: now[0])

    def header(written: str, at: float) -> str | None:
        file.write_text(f"{written}\n")
        now[0] = at
        return asyncio.run(token.header())

    said = [header("first", 0), header("second", 59), header("third", 61)]
    assert said == ["Bearer first", "Bearer first", "Bearer third"]


def test_a_plugin_is_run_once_and_again_when_its_token_was_refused(
    write: Write, tmp_path: Path
) -> None:
    text = 'echo x >>"$COUNT"; printf \'{"status": {"token": "%s"}}\' "$(wc -l <"$COUNT")"'
    path = write(plugin(tmp_path, text, env=[{"name": "COUNT", "value": str(tmp_path / "count")}]))

    async def work() -> list[str]:
        access = await load_access(path)
        said = [await access.headers() for _ in range(3)]
        await asyncio.gather(access.renew(), access.renew())  # two requests that were refused
        return [one["Authorization"] for one in [*said, await access.headers()]]

    assert asyncio.run(work()) == ["Bearer 1"] * 3 + ["Bearer 2"]


def test_a_plugin_is_run_again_when_its_token_ends(write: Write, tmp_path: Path) -> None:
    ended = credential(token="old", expirationTimestamp="2020-01-01T00:00:00Z")
    text = f'echo x >>"$0.count"; {ended}'
    path = write(plugin(tmp_path, text))

    async def work() -> None:
        access = await load_access(path)
        await access.headers()

    asyncio.run(work())
    assert len((tmp_path / "plugin.count").read_text().split()) == 2


def test_a_plugin_is_told_of_the_cluster(write: Write, tmp_path: Path) -> None:
    text = f'echo "$KUBERNETES_EXEC_INFO" >"$0.info"; {credential(token="t")}'
    path = write(plugin(tmp_path, text, provideClusterInfo=True))
    assert header_of(path) == "Bearer t"
    told = json.loads((tmp_path / "plugin.info").read_text())
    assert told["spec"]["cluster"] == {"server": "https://config:6443/"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "echo 'no such tenant' >&2; exit 3", "exited with 3: no such tenant", id="fails"
        ),
        pytest.param("echo hello", "printed no ExecCredential", id="talks"),
        pytest.param("echo '{\"status\": {}}'", "printed no ExecCredential", id="no token"),
    ],
)
def test_a_plugin_that_gets_no_token_is_named(
    write: Write, tmp_path: Path, text: str, said: str
) -> None:
    path = write(plugin(tmp_path, text))
    with pytest.raises(
        UnauthorizedError, match=rf"\./plugin, the credential plugin of the kubeconfig, {said}"
    ):
        header_of(path)


def test_a_plugin_that_is_not_installed_says_how(write: Write) -> None:
    version = "client.authentication.k8s.io/v1"
    hint = "install it: az aks install-cli"
    user = {"exec": {"apiVersion": version, "command": "kubelogin-x", "installHint": hint}}
    with pytest.raises(UnauthorizedError, match=f"kubelogin-x, .* cannot be started .*{hint}"):
        header_of(write(user))


@pytest.mark.parametrize("is_text", [False, True], ids=["files", "data"])
def test_client_certificates_are_taken_from_files_and_from_the_kubeconfig(
    write: Write, tmp_path: Path, is_text: bool
) -> None:
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=me"]
    names = ["-keyout", "me.key", "-out", "me.crt"]
    subprocess.run(
        ["openssl", "req", *options, *names], cwd=tmp_path, check=True, capture_output=True
    )
    user = {"client-certificate": "me.crt", "client-key": "me.key"}
    if is_text:
        data = {key: base64.b64encode((tmp_path / one).read_bytes()) for key, one in user.items()}
        user = {f"{key}-data": one.decode() for key, one in data.items()}

    context = ClusterAccess(read_login(write(user))).ssl_context()
    assert context.check_hostname


def test_a_certificate_that_is_none_is_refused_in_a_sentence() -> None:
    login = Login("https://x")
    for wrong in (Login("https://x", ca="none"), Login("https://x", ca=Path("/nowhere"))):
        with pytest.raises(KubeConfigError, match="certificate authority"):
            ClusterAccess(wrong).ssl_context()
    with pytest.raises(KubeConfigError, match="client certificate"):
        Certificate("none", None).load_into(ClusterAccess(login).ssl_context())


def test_an_auth_provider_is_left_to_the_package(write: Write) -> None:
    claims = base64.urlsafe_b64encode(b'{"exp": 4102444800}').decode().rstrip("=")
    settings = {"id-token": f"e30.{claims}.x", "client-id": "a", "idp-issuer-url": "https://x"}
    path = write({"auth-provider": {"name": "oidc", "config": settings}})
    assert isinstance(read_login(path).credentials, AuthProvider)
    assert header_of(path) == f"Bearer e30.{claims}.x"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("[1", "it is not valid YAML", id="no YAML"),
        pytest.param("word", "is not a kubeconfig", id="a word"),
        pytest.param(
            "clusters: []", "no current-context; choose one: kubectl config", id="no context"
        ),
        pytest.param("current-context: a", "has no context a", id="nowhere to go"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "broken"
    file.write_text(content)
    with pytest.raises(KubeConfigError, match=said):
        asyncio.run(load_access(str(file)))


def test_a_field_that_is_wrong_is_named_without_what_it_holds(write: Write) -> None:
    path = write({"token": ["secret"]})
    with pytest.raises(KubeConfigError, match="token of user config: input should be") as told:
        read_login(path)
    assert "secret" not in str(told.value)


def test_a_proxy_that_cannot_be_used_is_refused(write: Write) -> None:
    path = write({}, **{"proxy-url": "socks5://x"})
    with pytest.raises(KubeConfigError, match="socks5://x; only http and https work"):
        read_login(path)
