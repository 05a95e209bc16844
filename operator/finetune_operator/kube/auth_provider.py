"""Logging in by an auth-provider of the kubeconfig (OIDC), which the package kubernetes knows.

`kubeconfig.py` makes it. Every other way to log in is in `credentials.py` and needs no package.
"""

from typing import Any

from finetune_operator.kube.api_errors import KubeConfigError
from finetune_operator.kube.login import Certificate


class AuthProvider:
    """Gets tokens as the package does, which writes those it has renewed into the kubeconfig.

    Args:
        name: The provider's, such as oidc.
        paths: The kubeconfig.
    """

    certificate: Certificate | None = None

    def __init__(self, name: str, paths: str) -> None:
        self._name = name
        self._paths = paths
        self._configuration: Any = None
        self._loader: Any = None

    async def log_in(self) -> None:
        """Read the token, and renew it where it has ended.

        Raises:
            KubeConfigError: the package is not installed.
        """
        try:
            from kubernetes.aio.client import Configuration
            from kubernetes.aio.config import load_kube_config
        except ModuleNotFoundError as error:
            raise KubeConfigError(
                f"the kubeconfig logs in by auth-provider {self._name}, which needs the package "
                'kubernetes; pip install "finetune-operator[operator]"'
            ) from error
        self._configuration = Configuration()
        self._loader = await load_kube_config(self._paths, client_configuration=self._configuration)

    async def header(self) -> str | None:
        """Return the token as a header."""
        made = self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        header: str | None = await made
        return header

    async def renew(self) -> None:
        """Read the token again, and renew it where it has ended."""
        await self._loader.load_and_set(self._configuration)
