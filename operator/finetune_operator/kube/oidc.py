"""OIDC login of a kubeconfig: a refresh that verifies the issuer and saves the renewed tokens.

`auth_provider.py` imports this module on first use, because it needs the package kubernetes. The
refresh of that package (37.0.1) verifies no certificate unless the kubeconfig has a CA for the
issuer, fails with a TypeError if it has one, and never saves a rotated refresh token.
"""

import base64
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import aiohttp
import yaml
from kubernetes.aio.config.kube_config import KubeConfigLoader

from finetune_operator.kube.api_errors import KubeConfigError
from finetune_operator.kube.kubeconfig import read_content
from finetune_operator.kube.login import file_or_text, verified_context

_EARLY_SECONDS = 60.0  # an id-token is renewed this long before it expires: clocks differ
_REQUEST_SECONDS = 30.0

logger = logging.getLogger(__name__)


class OidcLoader(KubeConfigLoader):  # type: ignore[misc]  # the package has no types
    """Loads the token of one user.

    Args:
        file: The kubeconfig that contains the user.
        user: Name of the user.
        unsaved: Renewed tokens that an earlier loader could not save.

    Attributes:
        unsaved: Renewed tokens that could not be saved.
    """

    def __init__(self, file: Path, user: str, unsaved: dict[str, str]) -> None:
        self.unsaved = unsaved
        self._file, self._name = file, user
        provider = _provider_in(read_content(file), user)
        settings = provider.get("config") or {}
        if not _is_valid(settings.get("id-token")):
            settings.update(unsaved)
        super().__init__(
            {
                "current-context": "current",
                "contexts": [{"name": "current", "context": {"cluster": "none", "user": user}}],
                "clusters": [{"name": "none", "cluster": {}}],
                "users": [{"name": user, "user": {"auth-provider": provider}}],
            }
        )

    async def _load_oid_token(self) -> str:
        # The package decodes a token as plain base64, which fails if its name or groups hold
        # characters that differ in base64url.
        provider = self._user["auth-provider"]
        if not _is_valid(provider["config"].safe_get("id-token")):
            await self._refresh_oidc(provider)
        self.token = f"Bearer {provider['config']['id-token']}"
        return self.token

    async def _refresh_oidc(self, provider: Any) -> None:
        """Get a new id-token.

        Raises:
            KubeConfigError: the issuer cannot be verified or refuses the refresh token.
        """
        settings = provider["config"]
        if not settings.safe_get("refresh-token"):
            raise self._error(
                "the id-token has expired, and there is no refresh-token; log in again"
            )
        renewed = await self._request(settings, str(settings["idp-issuer-url"]).rstrip("/"))
        settings.value.update(renewed)
        self._save(renewed)

    async def _request(self, settings: Any, issuer: str) -> dict[str, str]:
        try:
            async with self._session(settings) as session:
                url = self._https(f"{issuer}/.well-known/openid-configuration")
                async with session.get(url) as response:
                    endpoint = self._https(
                        (await response.json(content_type=None))["token_endpoint"]
                    )
                async with session.post(endpoint, **_token_request(settings)) as response:
                    body = await response.json(content_type=None)
            renewed = {"id-token": body["id_token"]}
            if body.get("refresh_token"):
                renewed["refresh-token"] = body["refresh_token"]
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", error.certificate_error)
            raise self._error(
                f"the certificate of the OIDC issuer {issuer} cannot be verified ({why}), so no "
                "token or secret was sent; set idp-certificate-authority to the certificate "
                "authority of the issuer"
            ) from error
        except aiohttp.ClientResponseError as error:
            raise self._error(
                f"{error.request_info.url} returned HTTP status {error.status}; log in again"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise self._error(f"the OIDC issuer {issuer} cannot be reached ({why})") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._error(f"the OIDC issuer {issuer} sent no id_token; log in again") from error
        return renewed

    def _session(self, settings: Any) -> aiohttp.ClientSession:
        ca = file_or_text(
            settings.safe_get("idp-certificate-authority") or "",
            settings.safe_get("idp-certificate-authority-data") or "",
            self._file.parent,
        )
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=verified_context(ca)),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
            raise_for_status=True,
            trust_env=True,
        )

    def _https(self, url: str) -> str:
        if not url.startswith("https://"):
            raise self._error(f"{url} of the OIDC issuer must begin with https://")
        return url

    def _save(self, renewed: dict[str, str]) -> None:
        """Replace the tokens in the kubeconfig; owner and mode of the file stay the same."""
        file = self._file.resolve()
        try:
            content = read_content(file)  # again: another process may have changed it meanwhile
            _provider_in(content, self._name)["config"].update(renewed)
            _replace(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
            self.unsaved = {}
        except (OSError, KubeConfigError) as error:
            self.unsaved = {**self.unsaved, **renewed}
            logger.warning(
                "the renewed OIDC tokens cannot be saved in %s (%s); if the issuer rotates refresh "
                "tokens, the next process has to log in again",
                *(self._file, error),
            )

    def _error(self, what: str) -> KubeConfigError:
        return KubeConfigError(f"user {self._name} of {self._file}: {what}")


def _token_request(settings: Any) -> dict[str, Any]:
    form = {"grant_type": "refresh_token", "refresh_token": settings["refresh-token"]}
    client, secret = settings["client-id"], settings.safe_get("client-secret")
    if not secret:
        return {"data": {**form, "client_id": client}}
    # Encoded twice, as in RFC 6749, section 2.3.1, and by kubectl.
    both = base64.b64encode(f"{quote_plus(client)}:{quote_plus(secret)}".encode()).decode()
    return {"data": form, "headers": {"Authorization": f"Basic {both}"}}


def _provider_in(content: dict[str, Any], user: str) -> dict[str, Any]:
    for entry in content.get("users") or ():
        if str(entry["name"]) == user:
            provider: dict[str, Any] = entry["user"]["auth-provider"]
            return provider
    raise KubeConfigError(f"user {user} is no longer in the kubeconfig; log in again")


def _replace(file: Path, text: str) -> None:
    status = file.stat()
    number, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as stream:
            os.fchown(number, status.st_uid, status.st_gid)
            os.fchmod(number, stat.S_IMODE(status.st_mode))
            stream.write(text)
            stream.flush()
            os.fsync(number)
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise


def _is_valid(token: Any) -> bool:
    """Whether an id-token is a JWT that has not expired."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return "exp" not in claims or float(claims["exp"]) - _EARLY_SECONDS > time.time()
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
