"""Address and credentials of the cluster: $KUBECONFIG, a service account, or ~/.kube/config.

Requests do not use the package kubernetes, whose classes cost several times as much CPU time. Only
a kubeconfig with an auth-provider needs the package (docs/decisions/0064).
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune_operator.kube.api_errors import KubeConfigError, UnauthorizedError
from finetune_operator.kube.credentials import TokenFile
from finetune_operator.kube.kubeconfig import read_login
from finetune_operator.kube.login import Login, verified_context

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT = "~/.kube/config"


class ClusterAccess:
    """Address of the API server, and credentials; created by `load_access`."""

    def __init__(self, login: Login) -> None:
        self._login = login

    @property
    def host(self) -> str:
        """Address `https://HOST:PORT`, without a trailing slash."""
        return self._login.host

    @property
    def server_name(self) -> str | None:
        """Expected name in the server's certificate; None for the name of the host."""
        return self._login.server_name

    @property
    def proxy(self) -> str | None:
        """URL of the proxy for requests; None for no proxy."""
        return self._login.proxy

    @property
    def namespace(self) -> str:
        """Default namespace."""
        return self._login.namespace

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context, which verifies the server and has the client's certificate.

        Raises:
            KubeConfigError: a certificate cannot be read.
        """
        context = verified_context(self._login.ca)
        if (certificate := self._login.credentials.certificate) is not None:
            certificate.load_into(context)
        if not self._login.verifies:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    async def headers(self) -> dict[str, str]:
        """Return the `Authorization` header; empty if the login uses certificates.

        This is cheap: a token file is read at most once a minute.

        Raises:
            UnauthorizedError: there is no token now.
        """
        with _login_failures():
            header = await self._login.credentials.header()
        return {"Authorization": header} if header else {}

    async def renew(self) -> None:
        """Log in again after a 401, because tokens expire.

        Raises:
            UnauthorizedError: the login failed.
        """
        with _login_failures():
            await self._login.credentials.renew()


@contextmanager
def _login_failures() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Each login has its own errors: of a plugin, a file or a server.
        message = str(error) or type(error).__name__
        raise UnauthorizedError(0, "LoginFailed", f"there is no token now ({message})") from error


async def load_access(kubeconfig: str | None = None) -> ClusterAccess:
    """Find the cluster and the credentials.

    Sources, in this order: `kubeconfig`, $KUBECONFIG, the pod's service account, ~/.kube/config.

    Raises:
        KubeConfigError: there is no kubeconfig, or it cannot be read.
        UnauthorizedError: the credential plugin or the issuer fails.
    """
    named = kubeconfig or os.environ.get("KUBECONFIG")
    if not named and (_ACCOUNT / "token").is_file():
        return ClusterAccess(_login_of_pod())
    try:
        login = read_login(named or _DEFAULT)
    except KubeConfigError as error:
        raise KubeConfigError(
            f"no cluster can be reached through {named or _DEFAULT} ({error}); set KUBECONFIG to a "
            "kubeconfig that kubectl works with"
        ) from error
    with _login_failures():
        await login.credentials.log_in()
    return ClusterAccess(login)


def _login_of_pod() -> Login:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
    if not host or not port:
        raise KubeConfigError(
            f"{_ACCOUNT} contains a token, but KUBERNETES_SERVICE_HOST or _PORT is not set; set "
            "both, or KUBECONFIG"
        )
    address = f"[{host}]" if ":" in host else host
    return Login(f"https://{address}:{port}", TokenFile(_ACCOUNT / "token"), _ACCOUNT / "ca.crt")
