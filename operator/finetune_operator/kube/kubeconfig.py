"""Reads a kubeconfig, or several merged into one as by kubectl; `config.py` calls it."""

import base64
import os
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune_operator.kube.api_errors import KubeConfigError
from finetune_operator.kube.auth_provider import AuthProvider
from finetune_operator.kube.credentials import ExecCommand, ExecPlugin, TokenFile
from finetune_operator.kube.login import Certificate, Credentials, Fixed, Login, file_or_text


class _Part(BaseModel):
    # Other programs may add fields. Numbers are read as strings, as in other clients.
    model_config = ConfigDict(extra="ignore", frozen=True, coerce_numbers_to_str=True)


class _Cluster(_Part):
    server: str
    ca: str = Field("", alias="certificate-authority")
    ca_data: str = Field("", alias="certificate-authority-data")
    insecure: bool = Field(False, alias="insecure-skip-tls-verify")
    server_name: str = Field("", alias="tls-server-name")
    proxy: str = Field("", alias="proxy-url")


class _Variable(_Part):
    name: str
    value: str = ""


class _Exec(_Part):
    api_version: str = Field(alias="apiVersion")
    command: str
    args: list[str] | None = None
    env: list[_Variable] | None = None
    hint: str = Field("", alias="installHint")
    provides_cluster: bool = Field(False, alias="provideClusterInfo")
    interactive: str = Field("IfAvailable", alias="interactiveMode")


class _User(_Part):
    token: str = ""
    token_file: str = Field("", alias="tokenFile")
    certificate: str = Field("", alias="client-certificate")
    certificate_data: str = Field("", alias="client-certificate-data")
    key: str = Field("", alias="client-key")
    key_data: str = Field("", alias="client-key-data")
    username: str = ""
    password: str = ""
    plugin: _Exec | None = Field(None, alias="exec")
    provider: dict[str, Any] | None = Field(None, alias="auth-provider")


class _Context(_Part):
    cluster: str
    user: str = ""
    namespace: str = ""


_Found = TypeVar("_Found", bound=_Part)


def read_login(paths: str) -> Login:
    """Return the login of the current context of a kubeconfig.

    Args:
        paths: One file, or several as in $KUBECONFIG. If several define a name, the first counts.
            Missing files are ignored.

    Raises:
        KubeConfigError: the file cannot be read, or refers to a missing cluster, user or context.
    """
    files = [Path(entry).expanduser() for entry in paths.split(os.pathsep) if entry]
    found = [(file, read_content(file)) for file in files if file.exists()]
    if not found:
        raise KubeConfigError(f"there is no kubeconfig {paths}")
    current = next(
        (entry["current-context"] for _, entry in found if entry.get("current-context")), None
    )
    if current is None:
        raise KubeConfigError(
            f"{paths} has no current-context; choose one: kubectl config use-context NAME"
        )
    context, _ = _named(found, "context", str(current), _Context)
    cluster, cluster_file = _named(found, "cluster", context.cluster, _Cluster)
    user, user_file = (
        _named(found, "user", context.user, _User) if context.user else (_User(), cluster_file)
    )
    if cluster.proxy and not cluster.proxy.startswith(("http://", "https://")):
        raise KubeConfigError(
            f"cluster {context.cluster} has the proxy-url {cluster.proxy}; only http and https work"
        )
    return Login(
        cluster.server.rstrip("/"),
        _credentials(user, context.user, user_file, cluster),
        file_or_text(cluster.ca, cluster.ca_data, cluster_file.parent),
        not cluster.insecure,
        cluster.server_name or None,
        cluster.proxy or None,
        context.namespace or "default",
    )


def read_content(file: Path) -> dict[str, Any]:
    """Return the content of one kubeconfig.

    Raises:
        KubeConfigError: the file cannot be read or is not a kubeconfig.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or "it is not valid YAML"
        raise KubeConfigError(f"{file} cannot be read ({why})") from error
    if not isinstance(content, dict):
        raise KubeConfigError(f"{file} is not a kubeconfig")
    return content


def _named(
    found: list[tuple[Path, dict[str, Any]]], kind: str, name: str, model: type[_Found]
) -> tuple[_Found, Path]:
    """Return the entry of that kind and name, and its file."""
    for file, content in found:
        for entry in content.get(f"{kind}s") or ():
            if isinstance(entry, dict) and str(entry.get("name")) == name:
                try:
                    return model.model_validate(entry.get(kind) or {}), file
                except ValidationError as error:
                    # The error does not quote the value, which may be a password.
                    field = ".".join(map(str, error.errors()[0]["loc"]))
                    problem = error.errors()[0]["msg"]
                    message = f"{file}: {field} of {kind} {name}: {problem[0].lower()}{problem[1:]}"
                    raise KubeConfigError(message) from None
    raise KubeConfigError(f"{found[0][0]} has no {kind} {name}, which its current context names")


def _credentials(user: _User, name: str, file: Path, cluster: _Cluster) -> Credentials:
    if user.provider is not None:
        return AuthProvider(str(user.provider.get("name")), file, name)
    folder = file.parent
    public = file_or_text(user.certificate, user.certificate_data, folder)
    key = file_or_text(user.key, user.key_data, folder)
    certificate = Certificate(public, key) if public is not None else None
    if user.token_file:
        return TokenFile(folder / user.token_file, certificate)
    if user.token:
        return Fixed(f"Bearer {user.token}", certificate)
    if user.plugin is not None:
        return ExecPlugin(_command(user.plugin, folder, cluster), certificate)
    if user.username and user.password:
        basic = f"{user.username}:{user.password}".encode()
        return Fixed(f"Basic {base64.b64encode(basic).decode()}", certificate)
    return Fixed(None, certificate)


def _command(plugin: _Exec, folder: Path, cluster: _Cluster) -> ExecCommand:
    info = cluster.model_dump(by_alias=True, exclude_defaults=True, exclude={"ca"})
    return ExecCommand(
        plugin.api_version,
        plugin.command,
        tuple(plugin.args or ()),
        {variable.name: variable.value for variable in plugin.env or ()},
        plugin.hint,
        folder,
        info if plugin.provides_cluster else None,
        plugin.interactive,
    )
