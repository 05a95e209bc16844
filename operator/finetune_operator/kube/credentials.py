"""Logins whose token changes over time: a token file, and a credential plugin.

`kubeconfig.py` and `config.py` create them. Several event loops may request headers.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from finetune_operator.kube.api_errors import KubeConfigError
from finetune_operator.kube.login import Certificate

_REREAD_SECONDS = 60.0  # the kubelet renews a token long before the old token expires
_EXPIRY_MARGIN = timedelta(seconds=60)  # tokens are renewed this early, because clocks differ
_PLUGIN_SECONDS = 60.0
_INTERACTIVE_PLUGIN_SECONDS = 600.0  # a user may have to log in with a browser


class TokenFile:
    """A token file that another process renews, such as the token of a service account.

    Args:
        file: File with the token, read at most once a minute.
        certificate: Client certificate that connections use in addition.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        file: Path,
        certificate: Certificate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.certificate = certificate
        self._file = file
        self._clock = clock
        self._token = ""
        self._read_at = -_REREAD_SECONDS

    async def log_in(self) -> None:
        """Do nothing: the first request reads the file."""

    async def header(self) -> str | None:
        """Return the token as a header.

        Raises:
            OSError: the file cannot be read.
        """
        if not self._token or self._clock() - self._read_at >= _REREAD_SECONDS:
            await self.renew()
        return f"Bearer {self._token}"

    async def renew(self) -> None:
        """Read the file now.

        Raises:
            OSError: the file cannot be read.
            KubeConfigError: the file is empty.
        """
        token = self._file.read_text(encoding="utf-8").strip()
        if not token:
            raise KubeConfigError(f"{self._file} is empty; it must hold a token")
        self._token, self._read_at = token, self._clock()


@dataclass(frozen=True)
class ExecCommand:
    """A client-go credential plugin of a kubeconfig.

    Attributes:
        environ: Variables that the plugin gets in addition to the environment of this process.
        hint: How to install the plugin.
        folder: Folder of the kubeconfig, to which a path to the program may be relative.
        cluster: Description of the cluster that the plugin receives; None to pass no description.
        interactive: `Never`, `IfAvailable` or `Always`: whether the plugin may prompt a user.
    """

    api_version: str
    program: str
    arguments: tuple[str, ...]
    environ: Mapping[str, str]
    hint: str
    folder: Path
    cluster: Mapping[str, Any] | None
    interactive: str


@dataclass(frozen=True)
class _PluginCredential:
    """A credential that the plugin returned in its run with this number."""

    header: str | None
    certificate: Certificate | None
    expires: datetime | None
    number: int


@dataclass
class ExecPlugin:
    """Runs a plugin, again shortly before its credential expires and after a 401.

    A new token applies at once; a new certificate applies to clients that are opened later.

    Attributes:
        other: Client certificate to use if the plugin returns none.
    """

    command: ExecCommand
    other: Certificate | None = None
    _credential: _PluginCredential | None = None
    _locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = field(default_factory=dict)

    @property
    def certificate(self) -> Certificate | None:
        """The certificate that the plugin returned, else the other certificate."""
        return (self._credential.certificate if self._credential else None) or self.other

    async def log_in(self) -> None:
        """Run the plugin for the first time.

        Raises:
            KubeConfigError: the plugin fails or returns no credential.
        """
        await self._current()

    async def header(self) -> str | None:
        """Return the token as a header; None if the plugin returns certificates.

        Raises:
            KubeConfigError: the plugin fails or returns no credential.
        """
        return (await self._current()).header

    async def renew(self) -> None:
        """Run the plugin again, unless another request on this event loop has just done so.

        Raises:
            KubeConfigError: the plugin fails or returns no credential.
        """
        await self._run(self._credential)

    async def _current(self) -> _PluginCredential:
        current = self._credential
        if current is None or (
            current.expires is not None and current.expires - _EXPIRY_MARGIN <= datetime.now(UTC)
        ):
            return await self._run(current)
        return current

    async def _run(self, refused: _PluginCredential | None) -> _PluginCredential:
        lock = self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._credential is None or self._credential is refused:
                number = 1 if refused is None else refused.number + 1
                self._credential = _parse(self.command, await _output(self.command), number)
            return self._credential


async def _output(command: ExecCommand) -> bytes:
    has_terminal = sys.stdin is not None and sys.stdin.isatty() and command.interactive != "Never"
    if command.interactive == "Always" and not has_terminal:
        raise _failed(command, "has to prompt the user, and there is no terminal")
    spec: dict[str, Any] = {"interactive": has_terminal}
    if command.cluster is not None:
        spec["cluster"] = command.cluster
    info = {"apiVersion": command.api_version, "kind": "ExecCredential", "spec": spec}
    is_path = os.sep in command.program
    program = str(command.folder / command.program) if is_path else command.program
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *command.arguments,
            env={**os.environ, **command.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=None if has_terminal else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if has_terminal else asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {command.hint.strip()}" if command.hint else "; install it"
        raise _failed(command, f"cannot be started ({error.strerror}){hint}") from error
    seconds = _INTERACTIVE_PLUGIN_SECONDS if has_terminal else _PLUGIN_SECONDS
    try:
        output, errors = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError as error:
        raise _failed(command, f"did not exit within {seconds:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        last = (errors or b"").decode(errors="replace").strip().rpartition("\n")[2]
        why = f": {last}" if last else ""
        raise _failed(command, f"exited with {process.returncode}{why}")
    return output


def _parse(command: ExecCommand, output: bytes, number: int) -> _PluginCredential:
    try:
        credential = json.loads(output)
        status = credential["status"]
        token, certificate = status.get("token"), status.get("clientCertificateData")
        key, timestamp = status.get("clientKeyData"), status.get("expirationTimestamp")
        expires = datetime.fromisoformat(timestamp) if timestamp else None
        if not token and not (certificate and key):
            raise KeyError("token")
        if expires is not None and expires.tzinfo is None:
            raise ValueError("expirationTimestamp")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _failed(command, "printed no ExecCredential with a token or certificate") from error
    pair = Certificate(certificate, key) if certificate and key else None
    return _PluginCredential(f"Bearer {token}" if token else None, pair, expires, number)


def _failed(command: ExecCommand, what: str) -> KubeConfigError:
    return KubeConfigError(f"{command.program}, the credential plugin of the kubeconfig, {what}")
