"""Login by an auth-provider of the kubeconfig (OIDC), through the package kubernetes.

`kubeconfig.py` creates it. All other logins are in `credentials.py` and need no package.
"""

import asyncio
from pathlib import Path

from finetune_operator.kube.api_errors import KubeConfigError
from finetune_operator.kube.login import Certificate


class AuthProvider:
    """Reads the token of an auth-provider, and renews an expired one.

    Args:
        name: Name of the provider, such as oidc.
        file: The kubeconfig that contains the user; renewed tokens are saved there.
        user: Name of the user.
    """

    certificate: Certificate | None = None

    def __init__(self, name: str, file: Path, user: str) -> None:
        self._name = name
        self._file = file
        self._user = user
        self._unsaved: dict[str, str] = {}
        self._header: str | None = None
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    async def log_in(self) -> None:
        """Read the token from the kubeconfig, and renew it if it has expired.

        Raises:
            KubeConfigError: the package is not installed, or the issuer issues no token.
        """
        try:
            from kubernetes.aio.client import Configuration

            from finetune_operator.kube.oidc import OidcLoader
        except ModuleNotFoundError as error:
            raise KubeConfigError(
                f"the kubeconfig logs in by auth-provider {self._name}, which needs the package "
                'kubernetes; pip install "finetune-operator[operator]"'
            ) from error
        # One refresh at a time: an issuer may accept a refresh token only once.
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            loader = OidcLoader(self._file, self._user, self._unsaved)
            configuration = Configuration()
            await loader.load_and_set(configuration)
            self._unsaved = loader.unsaved
            self._header = await configuration.get_api_key_with_prefix(
                "BearerToken", alias="authorization"
            )

    async def header(self) -> str | None:
        """Return the token as a header."""
        return self._header

    async def renew(self) -> None:
        """Read the token again, because another process may have renewed it; otherwise log in."""
        await self.log_in()
