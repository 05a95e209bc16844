"""Runs kopf, which forwards events of FineTuneJobs.

kopf runs on its own thread and event loop, because at its end it cancels every task of its loop. It
only reads: it writes no annotations, finalizers, peerings or Events.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import aiohttp
import kopf
import orjson

from finetune_operator.kernel.job_events import ListenOptions, OnEvent
from finetune_operator.kernel.kopf_responses import BriefResponse
from finetune_operator.kube.config import ClusterAccess
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object

log = logging.getLogger(__name__)

_LOGIN_SECONDS = 5.0
_LATE_SECONDS = 2.0  # grace after server_timeout before we close the watch
_NEXT_REQUEST_GRACE_SECONDS = 5.0  # between a response and the request that must follow it
_CHECK_SECONDS = 0.5

_METADATA_ONLY = (
    "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io, application/json"
)

_THREAD = "kopf"


class KopfThread:
    """A run of `kopf.operator()`, ended by `stop`; each run needs its own instance.

    Args:
        access: Cluster and credentials.
        options: Options for kopf.
        on_event: Called on the event loop that created this object.
    """

    def __init__(self, access: ClusterAccess, options: ListenOptions, on_event: OnEvent) -> None:
        self._access = access
        self._options = options
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        self._sessions: list[aiohttp.ClientSession] = []
        self._tried_token: str | None = None
        places = options.namespaces or (None,)
        self._asked_at: dict[str, float | None] = dict.fromkeys(map(FINE_TUNE_JOBS.path, places))
        self._due_at = math.inf  # deadline of kopf's next request
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)

    def start(self) -> None:
        """Start to watch; the first event reports a list."""
        self._expect(self._longest_pause)
        self._thread.start()

    async def ended(self) -> None:
        """Wait until kopf has ended or given up, hangs, or has not found the kind.

        kopf searches for the kind only when it starts.
        """
        while not self._ended.is_set():
            if self._is_lost():
                log.warning("kopf no longer watches FineTuneJobs")
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _CHECK_SECONDS)

    def stop(self) -> None:
        """Stop delivering events and end kopf; its thread may live for some more seconds."""
        self._on_event = _ignore
        self._stop.set()

    def asked_at(self) -> float | None:
        """Return the time when the oldest running watch was started.

        Events cannot show that kopf is alive, because there may be none. But each watch ends after
        a minute and is followed by another request, even if the server does not respond.
        """
        asked = [time for time in self._asked_at.values() if time is not None]
        return min(asked) if len(asked) == len(self._asked_at) else None

    def _is_lost(self) -> bool:
        now, asked = self._loop.time(), self.asked_at()
        if asked is not None and now - asked > self._watch_seconds + self._longest_pause:
            return True
        return now > self._due_at

    @property
    def _watch_seconds(self) -> float:
        return self._options.watch_seconds + _LATE_SECONDS

    @property
    def _longest_pause(self) -> float:
        """Longest time between a failed request and the next."""
        waits = max(self._options.backoff.max_seconds, _LOGIN_SECONDS)
        return self._options.request_seconds + waits + _NEXT_REQUEST_GRACE_SECONDS

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
                # kopf's default is the name of the user, which a container's may lack.
                identity=_THREAD,  # type: ignore[arg-type]  # a NewType that kopf does not export
                stop_flag=self._stop,
            )
        finally:
            # One of kopf's threads waits for this flag, and the process waits for that thread.
            self._stop.set()
            for session in self._sessions:
                await session.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        # A synchronous handler would open the session on a thread without an event loop.
        @kopf.on.login(registry=registry, backoff=_LOGIN_SECONDS)
        async def login(**_: Any) -> kopf.AiohttpSession:
            if self._sessions:
                await self._log_in_again()
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=32, ssl=self._access.ssl_context()),
                middlewares=(self._send,),
                read_bufsize=2**21,
                response_class=BriefResponse,
            )
            self._sessions.append(session)  # kopf closes sessions whose token was refused
            return kopf.AiohttpSession(server=self._access.host, aiohttp_session=session)

        @kopf.on.event(FINE_TUNE_JOBS.group, FINE_TUNE_JOBS.plural, registry=registry)
        async def event(event: kopf.RawEvent, **_: Any) -> None:
            # kopf's objects refer to each other and to the event, and are collected much later.
            text = event["object"].pop("text")  # type: ignore[typeddict-item]
            self._call(self._forward, event["type"], text)

        return registry

    async def _log_in_again(self) -> None:
        """Get a new token after a 401; kopf would retry the old token without a delay."""
        await self._access.renew()
        token = (await self._access.headers()).get("Authorization")
        if token == self._tried_token:
            await asyncio.sleep(_LOGIN_SECONDS)
        self._tried_token = token

    async def _send(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request with the current token, which is renewed on disk while kopf runs."""
        request.headers.update(await self._access.headers())
        self._call(self._note_request, request.url.path)
        is_list = self._known(request.url.path) and "watch" not in request.url.query
        if is_list:
            request.headers["Accept"] = _METADATA_ONLY
        status = 0
        try:
            response = await handler(request)
            status = response.status
            if is_list and status < 400:
                self._call(self._forward, None, None)
            return response
        finally:
            self._call(self._note_response, request.url.path, status)

    def _note_request(self, path: str) -> None:
        if known := self._known(path):
            self._asked_at[known] = self._loop.time()
            self._due_at = math.inf
        else:
            self._expect(self._longest_pause)

    def _note_response(self, path: str, status: int) -> None:
        """Set the deadline of the next request after a response."""
        if self._known(path):
            if status == 404:  # which ends kopf, after a while
                self._due_at = self._loop.time()
            return
        if status in (0, 429) or status >= 500:
            self._asked_at = dict.fromkeys(self._asked_at, self._loop.time())
        is_final = 0 < status < 400 or status == 404
        self._expect(_NEXT_REQUEST_GRACE_SECONDS if is_final else self._longest_pause)

    def _known(self, path: str) -> str:
        """Return the path of FineTuneJobs, which may follow a prefix of the server; else empty."""
        return next((known for known in self._asked_at if path.endswith(known)), "")

    def _expect(self, seconds: float) -> None:
        """Set the deadline of the next request."""
        self._due_at = self._loop.time() + seconds

    def _settings(self) -> kopf.OperatorSettings:
        obj = kopf.OperatorSettings()
        obj.networking.error_backoffs = self._options.backoff
        obj.networking.request_timeout = self._options.request_seconds
        obj.watching.server_timeout = self._options.watch_seconds
        obj.watching.client_timeout = self._watch_seconds
        obj.watching.chunk_size = 1  # objects of lists are dropped
        obj.persistence.diffbase_storage = _NoDiffs()
        obj.queueing.idle_timeout = 0.2  # lifetime of a worker task after its last event
        obj.scanning.disabled = True
        obj.posting.enabled = False
        obj.process.ultimate_exiting_timeout = None  # the default kills the next term
        return obj

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the operator's loop, unless that has ended before kopf."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _forward(self, kind: str | None, text: str | None) -> None:
        self._on_event(kind, None if text is None else orjson.loads(text))


class _NoDiffs(kopf.DiffBaseStorage):
    """Disables diffs: no handler uses them, and kopf would copy every object to compute them."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        """Return an empty essence."""
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> None:
        """Return None: no earlier state is stored."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Leave the object unchanged."""


def join_threads(seconds: float) -> None:
    """Wait for the end of stopped threads, for at most this time each."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(seconds)


def _ignore(kind: str | None, obj: Object | None) -> None:
    """Drop an event that was in flight when the thread was stopped."""
