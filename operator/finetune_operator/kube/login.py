"""A cluster and its login, from a kubeconfig or from the service account of a pod.

Logins that change over time are in `credentials.py`. `config.py` creates the TLS context and the
headers.
"""

import base64
import binascii
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from finetune_operator.kube.api_errors import KubeConfigError


@dataclass(frozen=True)
class Certificate:
    """A client certificate and its key, each a file or PEM text.

    Attributes:
        key: None if the file of the certificate also contains the key.
    """

    certificate: Path | str
    key: Path | str | None

    def load_into(self, context: ssl.SSLContext) -> None:
        """Use the certificate for connections of a TLS context.

        Raises:
            KubeConfigError: the certificate or the key cannot be read.
        """
        with tempfile.TemporaryDirectory() as folder:  # ssl reads certificates only from files
            certificate = _as_file(self.certificate, folder)
            key = None if self.key is None else _as_file(self.key, folder)
            try:
                context.load_cert_chain(certificate, key)
            except OSError as error:  # an SSLError is one
                raise KubeConfigError(
                    f"the client certificate of the kubeconfig cannot be used ({error}); get a new "
                    "kubeconfig"
                ) from error


class Credentials(Protocol):
    """Authorization of requests."""

    @property
    def certificate(self) -> Certificate | None:
        """Client certificate for new connections, available after `log_in`."""

    async def log_in(self) -> None:
        """Obtain the credentials for the first request."""

    async def header(self) -> str | None:
        """Return the value of the header `Authorization`; None to send no header."""

    async def renew(self) -> None:
        """Obtain a new token, because the server has refused the current token."""


@dataclass(frozen=True)
class Fixed:
    """A header or certificate that never changes.

    Attributes:
        authorization: Value of the header; None to send no header.
    """

    authorization: str | None = None
    certificate: Certificate | None = None

    async def log_in(self) -> None:
        """Do nothing."""

    async def header(self) -> str | None:
        """Return the fixed header."""
        return self.authorization

    async def renew(self) -> None:
        """Do nothing: there is no other token."""


@dataclass(frozen=True)
class Login:
    """Address of the API server, its verification, and the credentials.

    Attributes:
        host: `https://HOST:PORT`.
        ca: Certificate authority of the server, a file or PEM text; None for the system's CAs.
        verifies: Whether the certificate of the server is verified.
        server_name: Expected name in the server's certificate; None for the name of the host.
        proxy: URL of a proxy; None for no proxy.
        namespace: Default namespace.
    """

    host: str
    credentials: Credentials = field(default_factory=Fixed)
    ca: Path | str | None = None
    verifies: bool = True
    server_name: str | None = None
    proxy: str | None = None
    namespace: str = "default"


def verified_context(ca: Path | str | None) -> ssl.SSLContext:
    """Return a TLS context that verifies servers.

    Args:
        ca: Certificate authority of the servers, a file or PEM text; None for the system's CAs.

    Raises:
        KubeConfigError: the certificate authority cannot be read.
    """
    try:
        return ssl.create_default_context(
            cafile=ca if isinstance(ca, Path) else None,
            cadata=ca if isinstance(ca, str) else None,
        )
    except OSError as error:  # an SSLError is one
        named = f" {ca}" if isinstance(ca, Path) else ""
        raise KubeConfigError(
            f"the certificate authority{named} of the kubeconfig cannot be used ({error}); get a "
            "new kubeconfig"
        ) from error


def file_or_text(file: str, data: str, folder: Path) -> Path | str | None:
    """Return a certificate or key of a kubeconfig: the file, or PEM text if there is data.

    Args:
        file: Path, which may be relative to the folder; empty for none.
        data: PEM in base64; empty for none.
        folder: Folder of the kubeconfig.

    Raises:
        KubeConfigError: the data is not base64.
    """
    if data:
        try:
            return base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise KubeConfigError(
                "a certificate or key in the kubeconfig is not valid base64"
            ) from error
    return (folder / file) if file else None


def _as_file(part: Path | str, folder: str) -> Path:
    if isinstance(part, Path):
        return part
    number, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "w") as file:
        file.write(part)
    return Path(name)
