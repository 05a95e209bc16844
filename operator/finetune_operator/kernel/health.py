"""Serves /healthz (the process is alive), /readyz (it is a working replica) and /metrics.

The process counts as alive if the oldest key and every watch have progressed within
`stuck_seconds`. An outage of the API server does not count, because a restart of this process would
not end it.
"""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from finetune_operator.kernel.settings import PREFIX, SettingsError
from finetune_operator.metrics.page import Snapshot, render

if TYPE_CHECKING:
    from aiohttp import web

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Health:
    """State of the operator's process.

    Attributes:
        is_leading: Whether it holds the Lease; a standby has no queue and no watches.
        is_ready: Whether it is able to work, and is a standby or a leader with filled caches.
        unable: Why it is not able to work, each a sentence with the command that fixes it.
        queue: Number of keys that are queued or processed.
        oldest_seconds: Time since the oldest key has progressed.
        backlog: Jobs that existed when it began to lead and have not been reconciled since.
        silent_seconds: Time since the last event or request of each watch.
        refused: Kinds and namespaces that the API server refuses to show, with its message. Their
            jobs are left alone, unless the kind is optional for their backend.
        absent: Kinds that the API server does not serve, with its message; each is requested every
            two seconds.
        calls: Requests to the API server so far, by `VERB RESOURCE STATUS`.
    """

    is_leading: bool = False
    is_ready: bool = False
    unable: tuple[str, ...] = ()
    queue: int = 0
    oldest_seconds: float = 0.0
    backlog: int = 0
    silent_seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def complaints(self, stuck_seconds: float) -> list[str]:
        """Return a sentence for each stuck part; empty if the process is alive."""
        found = []
        if self.oldest_seconds > stuck_seconds:
            found.append(f"a job has not progressed for {self.oldest_seconds:.0f} s")
        found += [
            f"the watch of {name} has not progressed for {seconds:.0f} s"
            for name, seconds in self.silent_seconds.items()
            if seconds > stuck_seconds
        ]
        return found


class HealthServer:
    """Serves the pages; an async context manager.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        stuck_seconds: Time after which a key or watch counts as stuck.
        read: Returns the current state.
        measure: Returns the current content of `/metrics`.

    Attributes:
        port: Port on which it listens.
    """

    def __init__(
        self,
        host: str,
        port: int,
        stuck_seconds: float,
        read: Callable[[], Health],
        measure: Callable[[], Snapshot],
    ) -> None:
        self.port = port
        self._host = host
        self._stuck_seconds = stuck_seconds
        self._read = read
        self._measure = measure
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        """Start to serve.

        Raises:
            SettingsError: The address is in use, or this process may not listen on it.
        """
        from aiohttp import web

        app = web.Application()
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        app.add_routes([web.get(path, page) for path, page in pages.items()])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self.port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SettingsError(self._not_served(error)) from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _not_served(self, error: OSError) -> str:
        number = error.errno or 0  # less where a name is not known
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        remedy = f"set {PREFIX}HEALTH_HOST to an address of this machine, such as 0.0.0.0"
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = f"set {PREFIX}HEALTH_PORT to 1024 or more, such as 8080"
        elif error.errno == errno.EADDRINUSE:
            remedy = f"set {PREFIX}HEALTH_PORT to a port that is free"
        return (
            f"/healthz cannot be served at {self._host}, port {self.port}: {why.lower()}; {remedy}"
        )

    async def _healthz(self, request: "web.Request") -> "web.Response":
        health = self._read()
        complaints = health.complaints(self._stuck_seconds)
        return _respond(health, complaints, is_good=not complaints)

    async def _readyz(self, request: "web.Request") -> "web.Response":
        health = self._read()
        return _respond(health, [], is_good=health.is_ready)

    async def _metrics(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        text = await asyncio.to_thread(render, self._measure())
        return web.Response(body=text, headers={"Content-Type": _CONTENT_TYPE})


def _respond(health: Health, complaints: list[str], *, is_good: bool) -> "web.Response":
    from aiohttp import web

    body = {
        "leading": health.is_leading,
        "ready": health.is_ready,
        "unable": list(health.unable),
        "queue": health.queue,
        "backlog": health.backlog,
        "oldestSeconds": round(health.oldest_seconds, 3),
        "silentSeconds": {key: round(value, 3) for key, value in health.silent_seconds.items()},
        "refused": health.refused,
        "absent": health.absent,
        "complaints": complaints,
        "calls": health.calls,
    }
    return web.json_response(body, status=200 if is_good else 503)
