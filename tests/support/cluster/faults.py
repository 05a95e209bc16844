"""An embedded API server that fails on demand: what a test injects, from any thread."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from finetune_operator.embedded.api_requests import ApiRequest
from finetune_operator.embedded.server import EmbeddedApi
from finetune_operator.embedded.status_errors import StatusError

_REASONS = {429: "TooManyRequests", 503: "ServiceUnavailable"}


@dataclass
class Fault:
    """How the requests that it matches fail.

    Attributes:
        status: HTTP status of the answer; 0 serves the request, late.
        seconds: How long the answer takes.
        retry_after: Seconds that the client is asked to wait.
        times: For how many requests; None until it is removed.
        verbs: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`; empty matches all.
        resources: Plural names; empty matches all.
    """

    status: int = 0
    seconds: float = 0.0
    retry_after: int | None = None
    times: int | None = None
    verbs: Collection[str] = ()
    resources: Collection[str] = ()

    async def inject(self) -> None:
        """Wait, and raise the answer if the request is to fail."""
        await asyncio.sleep(self.seconds)
        if self.status:
            reason = _REASONS.get(self.status, "InternalError")
            message = f"a fault was asked for: {self.status} {reason}"
            details = {"retryAfterSeconds": self.retry_after} if self.retry_after else None
            raise StatusError(self.status, reason, message, details)


class FaultyApi(EmbeddedApi):
    """An embedded API server whose requests and watches fail as a test wants it; none at first."""

    _faults: tuple[Fault, ...] = ()
    _loop: asyncio.AbstractEventLoop
    _watches: dict[asyncio.Future[web.StreamResponse], web.Request]

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watches = {}
        return await super().__aenter__()

    def add(self, fault: Fault) -> None:
        """Let matching requests fail from now on."""
        self._faults = (*self._faults, fault)

    def clear(self) -> None:
        """Let all further requests be served."""
        self._faults = ()

    def drop_watches(self) -> None:
        """Break the connection of every open watch."""
        self._on_loop(self._drop)

    def silence_watches(self) -> None:
        """Keep every open watch open without a further event, not even a bookmark."""
        self._on_loop(self._silence)

    def expire_versions(self) -> None:
        """Make every resourceVersion so far too old to watch from."""
        self._on_loop(self._store.forget)

    async def _serve(
        self, verb: str, request: web.Request, parsed: ApiRequest
    ) -> web.StreamResponse:
        await self._inject(verb, parsed.kind.resource.plural)
        return await super()._serve(verb, request, parsed)

    async def _watch(self, request: web.Request, parsed: ApiRequest) -> web.StreamResponse:
        serving = asyncio.ensure_future(super()._watch(request, parsed))
        self._watches[serving] = request
        try:
            return await serving
        except asyncio.CancelledError:
            if serving in self._watches:
                raise
            await asyncio.Event().wait()  # until the client goes
            raise AssertionError from None
        finally:
            self._watches.pop(serving, None)

    async def _inject(self, verb: str, plural: str) -> None:
        """Inject the first fault that matches the request."""
        for fault in self._faults:
            is_meant = verb in (fault.verbs or (verb,)) and plural in (fault.resources or (plural,))
            if is_meant and fault.times != 0:
                if fault.times is not None:
                    fault.times -= 1
                await fault.inject()
                return

    def _on_loop(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    def _drop(self) -> None:
        for request in self._watches.values():
            if request.transport is not None:
                request.transport.abort()

    def _silence(self) -> None:
        while self._watches:
            serving, _ = self._watches.popitem()
            serving.cancel()
