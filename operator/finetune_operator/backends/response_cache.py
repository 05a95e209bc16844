"""Caches responses of a service, so that a submit need not wait. For one event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from finetune_operator.errors import BackendError

log = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_SECONDS = 300.0
"""Age up to which a response is fresh; an older response is used while it is refreshed."""

STALE_SECONDS = 3600.0
"""Age beyond which a response is discarded."""

MISSING_SECONDS = 20.0
"""Delay before a missing or refused object is requested again; a person may have fixed it."""

MAX_RESPONSES = 1000
"""Cached responses; the least recently used response is discarded first. Jobs choose the keys."""


@dataclass(frozen=True)
class _Response:
    value: Any
    refusal: BackendError | None
    came_at: float


class ResponseCache:
    """The last responses, by request."""

    def __init__(self) -> None:
        self._responses: dict[Hashable, _Response] = {}
        self._asking = WeakValueDictionary[Hashable, asyncio.Lock]()
        self._renewals: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop refreshing."""
        for task in self._renewals:
            task.cancel()
        await asyncio.gather(*self._renewals, return_exceptions=True)

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the response to a request, which is sent once for all callers.

        Args:
            key: Identifies the request.
            ask: Sends the request; None means that the object does not exist.

        Raises:
            BackendError: The request is refused, which is cached as well, or has no response now.
        """
        response = self._responses.get(key)
        age = self._age(response)
        if response is None or response.value is None or age > STALE_SECONDS:
            response = await self._ask(key, ask)
        elif age > KEPT_SECONDS and key not in self._asking:
            task = asyncio.create_task(self._renew(key, ask))
            self._renewals.add(task)
            task.add_done_callback(self._renewals.discard)
        self._store(key, response)
        if response.refusal is not None:
            raise response.refusal.with_traceback(
                None
            )  # otherwise the traceback would grow with each raise
        value: T | None = response.value
        return value

    async def _renew(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._ask(key, ask)
        except BackendError as error:  # the next caller sends the request again, and gets the error
            log.info("response not refreshed", extra={"asked": str(key), "error": str(error)})

    async def _ask(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> _Response:
        """Send the request, unless another caller has just received the response; return it."""
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            response = self._responses.get(key)
            is_missing = response is None or response.value is None
            longest = MISSING_SECONDS if is_missing else KEPT_SECONDS
            if response is None or self._age(response) > longest:
                value, refusal = None, None
                try:
                    value = await ask()
                except BackendError as error:
                    if error.retryable:
                        raise
                    refusal = error
                response = _Response(value, refusal, asyncio.get_running_loop().time())
                self._store(key, response)
            return response

    def _store(self, key: Hashable, response: _Response) -> None:
        """Store a response as the most recently used one."""
        self._responses.pop(key, None)
        self._responses[key] = response
        if len(self._responses) > MAX_RESPONSES:
            del self._responses[next(iter(self._responses))]

    def _age(self, response: _Response | None) -> float:
        """Return the age of a response in seconds; infinite without one."""
        if response is None:
            return float("inf")
        return asyncio.get_running_loop().time() - response.came_at
