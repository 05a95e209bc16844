"""Which cluster, and as whom: $KUBECONFIG, a pod's service account, or ~/.kube/config.

Requests do not go through the classes of the package kubernetes, which cost several times as much;
it is needed only where a kubeconfig logs in by an auth-provider (docs/decisions/0067).
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
    """The API server's address and the credentials; made by `load_access`."""

    def __init__(self, login: Login) -> None:
        self._login = login

    @property
    def host(self) -> str:
        """`https://HOST:PORT`, without a slash at its end."""
        return self._login.host

    @property
    def server_name(self) -> str | None:
        """Name the server's certificate must have, where it is not the host's."""
        return self._login.server_name

    @property
    def proxy(self) -> str | None:
        """Proxy to send requests through."""
        return self._login.proxy

    @property
    def namespace(self) -> str:
        """What is meant where no namespace is named."""
        return self._login.namespace

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context: how to verify the server, and the client's certificate.

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
        """Return the `Authorization` header with a valid token; empty with certificates.

        Cheap: a token is read again at most once a minute.

        Raises:
            UnauthorizedError: there is no token now.
        """
        with _login_failures():
            header = await self._login.credentials.header()
        return {"Authorization": header} if header else {}

    async def renew(self) -> None:
        """Log in again after a 401, as tokens expire.

        Raises:
            UnauthorizedError: that failed.
        """
        with _login_failures():
            await self._login.credentials.renew()


@contextmanager
def _login_failures() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Each way to log in has errors of its own: of a plugin, a file or a server.
        said = str(error) or type(error).__name__
        raise UnauthorizedError(0, "LoginFailed", f"there is no token now ({said})") from error


async def load_access(kubeconfig: str | None = None) -> ClusterAccess:
    """Find the cluster and the credentials.

    In this order: the file given, $KUBECONFIG, the pod's service account, ~/.kube/config.

    Raises:
        KubeConfigError: there is none, or it cannot be read.
        UnauthorizedError: the program or service by which it logs in fails.
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
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{one}") for one in ("HOST", "PORT"))
    if not host or not port:
        raise KubeConfigError(
            f"{_ACCOUNT} holds a token, and KUBERNETES_SERVICE_HOST and _PORT do not say where the "
            "API server is; set them, or KUBECONFIG"
        )
    place = f"[{host}]" if ":" in host else host
    return Login(f"https://{place}:{port}", TokenFile(_ACCOUNT / "token"), _ACCOUNT / "ca.crt")
