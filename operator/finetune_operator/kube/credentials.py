"""Ways to log in that change with time: a token on disk, and a program that gets one.

`kubeconfig.py` and `config.py` make them. Headers are asked for on several event loops.
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

_READ_AGAIN_SECONDS = 60.0  # the kubelet renews a token long before the old one ends
_EARLY = timedelta(seconds=60)  # before its end a token is renewed, as clocks differ
_SECONDS = 60.0
_SECONDS_OF_A_USER = 600.0  # who may have to log in with a browser


class TokenFile:
    """A token that somebody else renews on disk, such as that of a service account.

    Args:
        file: Read again at most once a minute.
        certificate: Shown besides.
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
        self._read_at = -_READ_AGAIN_SECONDS

    async def log_in(self) -> None:
        """Do nothing: it is read before each request."""

    async def header(self) -> str | None:
        """Return the token as a header.

        Raises:
            OSError: it cannot be read.
        """
        if not self._token or self._clock() - self._read_at >= _READ_AGAIN_SECONDS:
            await self.renew()
        return f"Bearer {self._token}"

    async def renew(self) -> None:
        """Read it now.

        Raises:
            OSError: it cannot be read.
            KubeConfigError: the file is empty.
        """
        token = self._file.read_text(encoding="utf-8").strip()
        if not token:
            raise KubeConfigError(f"{self._file} is empty; it must hold a token")
        self._token, self._read_at = token, self._clock()


@dataclass(frozen=True)
class ExecCommand:
    """A client-go credential plugin, as the kubeconfig describes it.

    Attributes:
        environ: What the plugin has in its environment besides this process's.
        hint: How to install it.
        folder: Of the kubeconfig, which a relative path to the program starts from.
        cluster: What it is told of the cluster; None for nothing.
        interactive: `Never`, `IfAvailable` or `Always`: whether it may ask a person.
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
class _Got:
    """What the plugin answered."""

    header: str | None
    certificate: Certificate | None
    ends: datetime | None
    number: int


@dataclass
class ExecPlugin:
    """Runs a plugin, and again shortly before what it got has ended, or when that is refused.

    A new certificate counts for clients that are opened later, a new token at once.

    Attributes:
        other: The certificate shown where the plugin gets none.
    """

    command: ExecCommand
    other: Certificate | None = None
    _got: _Got | None = None
    _locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = field(default_factory=dict)

    @property
    def certificate(self) -> Certificate | None:
        """The certificate it got, else the other."""
        return (self._got.certificate if self._got else None) or self.other

    async def log_in(self) -> None:
        """Run it for the first time.

        Raises:
            KubeConfigError: it fails, or gets nothing.
        """
        await self._current()

    async def header(self) -> str | None:
        """Return the token as a header; None where it gets certificates.

        Raises:
            KubeConfigError: it fails, or gets nothing.
        """
        return (await self._current()).header

    async def renew(self) -> None:
        """Run it, unless another request of this loop has just done so.

        Raises:
            KubeConfigError: it fails, or gets nothing.
        """
        await self._run(self._got)

    async def _current(self) -> _Got:
        got = self._got
        if got is None or (got.ends is not None and got.ends - _EARLY <= datetime.now(UTC)):
            return await self._run(got)
        return got

    async def _run(self, refused: _Got | None) -> _Got:
        lock = self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if self._got is None or self._got is refused:
                number = 1 if refused is None else refused.number + 1
                self._got = _read(self.command, await _output(self.command), number)
            return self._got


async def _output(command: ExecCommand) -> bytes:
    is_watched = sys.stdin is not None and sys.stdin.isatty() and command.interactive != "Never"
    if command.interactive == "Always" and not is_watched:
        raise _failed(command, "wants to ask a person, and there is no terminal")
    spec: dict[str, Any] = {"interactive": is_watched}
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
            stdin=None if is_watched else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_watched else asyncio.subprocess.PIPE,
        )
    except OSError as error:
        hint = f"; {command.hint.strip()}" if command.hint else "; install it"
        raise _failed(command, f"cannot be started ({error.strerror}){hint}") from error
    seconds = _SECONDS_OF_A_USER if is_watched else _SECONDS
    try:
        said, wrong = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError as error:
        raise _failed(command, f"did not end within {seconds:g} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        last = (wrong or b"").decode(errors="replace").strip().rpartition("\n")[2]
        why = f": {last}" if last else ""
        raise _failed(command, f"ended with {process.returncode}{why}")
    return said


def _read(command: ExecCommand, said: bytes, number: int) -> _Got:
    try:
        made = json.loads(said)
        status = made["status"]
        token, certificate = status.get("token"), status.get("clientCertificateData")
        key, ends = status.get("clientKeyData"), status.get("expirationTimestamp")
        until = datetime.fromisoformat(ends) if ends else None
        if not token and not (certificate and key):
            raise KeyError("token")
        if until is not None and until.tzinfo is None:
            raise ValueError("expirationTimestamp")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _failed(command, "answered with no ExecCredential that holds a token") from error
    pair = Certificate(certificate, key) if certificate and key else None
    return _Got(f"Bearer {token}" if token else None, pair, until, number)


def _failed(command: ExecCommand, what: str) -> KubeConfigError:
    return KubeConfigError(f"{command.program}, by which the kubeconfig logs in, {what}")
