"""kopf, and nothing of ours but its decorators: events of FineTuneJobs are handed on.

It runs on a thread and event loop of its own: at its end kopf cancels every task of its loop. It
writes nothing: no annotation, no finalizer, no peering, no Event.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import kopf

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object

log = logging.getLogger(__name__)

_LOGIN_SECONDS = 5.0
_LATE_SECONDS = 2.0  # ... and no longer is a server waited for that forgets to end a watch

_THREAD = "kopf"

OnEvent = Callable[[str | None, Object], None]
"""Called with the type (`ADDED`, `MODIFIED`, `DELETED`, None from a list) and the object."""


@dataclass(frozen=True)
class KopfOptions:
    """What kopf is told.

    Attributes:
        namespaces: Namespaces served; empty for all.
        backoff: Waits between two tries, without an end: kopf would end the process with them.
        request_seconds: Longest time for one request that is no watch.
        watch_seconds: Longest time for one watch; whole, as the API server refuses a fraction.
    """

    namespaces: Sequence[str]
    backoff: Backoff
    request_seconds: float
    watch_seconds: int = 240


class JobEvents(Protocol):
    """What tells of FineTuneJobs: first all there are, then each change."""

    def start(self) -> None:
        """Start to tell."""

    async def ended(self) -> None:
        """Return when it tells no more."""

    def stop(self) -> None:
        """Tell no more."""

    def overdue_seconds(self) -> float:
        """Return for how long it should have asked the API server for something, and has not."""


class KopfThread:
    """One run of `kopf.operator()`; `stop` ends it, another run needs another instance.

    Args:
        access: Cluster and credentials.
        options: What kopf is told.
        on_event: Called on the event loop that made this object.
    """

    def __init__(self, access: ClusterAccess, options: KopfOptions, on_event: OnEvent) -> None:
        self._access = access
        self._options = options
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        self._sessions: list[aiohttp.ClientSession] = []
        self._tried_token: str | None = None
        paths = (FINE_TUNE_JOBS.path(place) for place in options.namespaces or (None,))
        self._asked_at = dict.fromkeys(paths, self._loop.time())
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)

    def start(self) -> None:
        """Start to watch; events come from now on, first those of all existing objects."""
        self._thread.start()

    async def ended(self) -> None:
        """Return when kopf has ended, whether it was asked to or gave up."""
        await self._ended.wait()

    def stop(self) -> None:
        """Ask it to end; no event comes any more, though the thread may live on for seconds."""
        self._on_event = _ignore
        self._stop.set()

    def overdue_seconds(self) -> float:
        """Return for how long a watch that must have ended was not followed by another request.

        Events are no measure, as nothing may happen; but every watch ends, and a server that is
        away is asked again and again.
        """
        since = min(self._asked_at.values()) + self._watch_seconds
        return max(0.0, self._loop.time() - since)

    @property
    def _watch_seconds(self) -> float:
        return self._options.watch_seconds + _LATE_SECONDS

    def _run(self) -> None:
        try:
            asyncio.run(self._operate())
        except Exception:
            log.exception("kopf failed")
        finally:
            self._call(self._ended.set)

    async def _operate(self) -> None:
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=self._settings(),
                clusterwide=not self._options.namespaces,
                namespaces=self._options.namespaces,
                standalone=True,
                # Left to kopf it asks for the user's name, and ends where a container's has none.
                identity=_THREAD,  # type: ignore[arg-type]  # a NewType that kopf does not export
                stop_flag=self._stop,
            )
        finally:
            for session in self._sessions:
                await session.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        # A sync handler that opened the session would do so on another thread, without a loop.
        @kopf.on.login(registry=registry, backoff=_LOGIN_SECONDS)
        async def login(**_: Any) -> kopf.AiohttpSession:
            if self._sessions:
                await self._log_in_again()
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=32, ssl=self._access.ssl_context()),
                middlewares=(self._ask,),
                read_bufsize=2**21,
            )
            self._sessions.append(session)  # kopf closes those whose token was refused
            return kopf.AiohttpSession(server=self._access.host, aiohttp_session=session)

        @kopf.on.event(FINE_TUNE_JOBS.group, FINE_TUNE_JOBS.plural, registry=registry)
        async def event(event: kopf.RawEvent, **_: Any) -> None:
            self._call(self._hand_on, event["type"], dict(event["object"]))

        return registry

    async def _log_in_again(self) -> None:
        """Get a new token after a 401; kopf would try the old one again without a pause."""
        await self._access.renew()
        token = (await self._access.headers()).get("Authorization")
        if token == self._tried_token:
            await asyncio.sleep(_LOGIN_SECONDS)
        self._tried_token = token

    async def _ask(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request with the token of the moment: it is renewed on disk while kopf runs."""
        request.headers.update(await self._access.headers())
        self._call(self._note_asked, request.url.path)
        return await handler(request)

    def _note_asked(self, path: str) -> None:
        for known in self._asked_at:
            if path.endswith(known):  # the server may have a path of its own before it
                self._asked_at[known] = self._loop.time()

    def _settings(self) -> kopf.OperatorSettings:
        made = kopf.OperatorSettings()
        made.networking.error_backoffs = self._options.backoff
        made.networking.request_timeout = self._options.request_seconds
        made.watching.server_timeout = self._options.watch_seconds
        made.watching.client_timeout = self._watch_seconds
        made.watching.chunk_size = 500
        made.persistence.diffbase_storage = _NoDiffs()
        made.queueing.idle_timeout = 0.2  # a worker task and its queue live so long after an event
        made.scanning.disabled = True
        made.posting.enabled = False
        made.process.ultimate_exiting_timeout = None  # else it kills the process of the next term
        return made

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it on the operator's loop, which may have ended before kopf did."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _hand_on(self, kind: str | None, made: Object) -> None:
        self._on_event(kind, made)


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing to compare: no handler asks what changed, and kopf would copy every object for it."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        """Return that nothing of the object matters."""
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> None:
        """Return that nothing is known of an earlier state."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Write nothing into the object."""


def join_threads(seconds: float) -> None:
    """Wait until the threads that were stopped have ended, at most so long for each."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(seconds)


def _ignore(kind: str | None, made: Object) -> None:
    """Drop an event that was under way when the thread was stopped."""
