"""One cluster and who asks it: what `kubeconfig.py` or a pod's service account says.

The ways to log in are in `credentials.py`. `config.py` makes the TLS context and headers of it.
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
    """A client's certificate and its key, each as a file or as PEM text.

    Attributes:
        key: None where the key stands in the certificate's file.
    """

    certificate: Path | str
    key: Path | str | None

    def load_into(self, context: ssl.SSLContext) -> None:
        """Show it to servers.

        Raises:
            KubeConfigError: it cannot be read.
        """
        with tempfile.TemporaryDirectory() as folder:  # ssl reads certificates from files alone
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
    """How requests are authorized."""

    @property
    def certificate(self) -> Certificate | None:
        """What connections are opened with, after `log_in`."""

    async def log_in(self) -> None:
        """Get what the first request needs."""

    async def header(self) -> str | None:
        """Return the value of `Authorization`; None for none."""

    async def renew(self) -> None:
        """Get a new token, as the server has refused this one."""


@dataclass(frozen=True)
class Fixed:
    """A header or certificate that stays the same.

    Attributes:
        authorization: Value of the header; None for none.
    """

    authorization: str | None = None
    certificate: Certificate | None = None

    async def log_in(self) -> None:
        """Do nothing."""

    async def header(self) -> str | None:
        """Return it."""
        return self.authorization

    async def renew(self) -> None:
        """Do nothing: there is no other."""


@dataclass(frozen=True)
class Login:
    """Where the API server is, how it is recognised, and who asks.

    Attributes:
        host: `https://HOST:PORT`.
        ca: Authority of the server's certificate, a file or PEM text; None for those of the system.
        verifies: Whether that certificate is checked.
        server_name: Name in the server's certificate, where it is not the host's.
        proxy: URL of a proxy.
        namespace: What is meant where none is named.
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
        ca: Certificate authority of the servers, a file or PEM text; None for those of the system.

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
            raise KubeConfigError("a certificate or key in the kubeconfig is no base64") from error
    return (folder / file) if file else None


def _as_file(part: Path | str, folder: str) -> Path:
    if isinstance(part, Path):
        return part
    number, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "w") as file:
        file.write(part)
    return Path(name)
