"""Which cluster, and as whom: kubeconfig or service account, read by kubernetes.aio.

kubernetes.aio supports every way to log in (exec plugins, OIDC, tokens renewed on disk). Requests
do not go through its generated classes, which cost several times as much.
"""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune_operator.kube.errors import KubeConfigError, UnauthorizedError

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration

_TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class ClusterAccess:
    """The API server's address and the credentials; made by `load_access`."""

    def __init__(self, configuration: "Configuration", loader: Any = None) -> None:
        self._configuration = configuration
        self._loader = loader

    @property
    def host(self) -> str:
        """`https://HOST:PORT`, without a slash at its end."""
        return str(self._configuration.host).rstrip("/")

    @property
    def server_name(self) -> str | None:
        """Name the server's certificate must have, where it is not the host's."""
        return self._configuration.tls_server_name or None

    @property
    def proxy(self) -> str | None:
        """Proxy to send requests through."""
        return self._configuration.proxy or None

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context: how to verify the server, and the client's certificate."""
        config = self._configuration
        context = ssl.create_default_context(
            cafile=config.ssl_ca_cert or None, cadata=config.ca_cert_data or None
        )
        if config.cert_file:
            context.load_cert_chain(config.cert_file, keyfile=config.key_file)
        if not config.verify_ssl:
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
            token = await self._configuration.get_api_key_with_prefix(
                "BearerToken", alias="authorization"
            )
        return {"Authorization": token} if token else {}

    async def renew(self) -> None:
        """Log in again after a 401; for exec plugins and OIDC, whose tokens expire.

        Raises:
            UnauthorizedError: that failed.
        """
        if self._loader is not None:
            with _login_failures():
                await self._loader.load_and_set(self._configuration)


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
    """
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

    configuration = Configuration()
    try:
        if kubeconfig is None and not os.environ.get("KUBECONFIG") and _TOKEN_FILE.is_file():
            load_incluster_config(client_configuration=configuration)
            return ClusterAccess(configuration)
        loader = await load_kube_config(kubeconfig, client_configuration=configuration)
        return ClusterAccess(configuration, loader)
    except (ConfigException, OSError, yaml.YAMLError, AttributeError, TypeError) as error:
        # The client fails with some of these on a file that holds no mapping.
        named = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
        raise KubeConfigError(
            f"no cluster can be reached through {named} ({error}); set KUBECONFIG to a kubeconfig "
            "that kubectl works with"
        ) from error
