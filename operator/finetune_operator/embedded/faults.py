"""Faults that a test or a demo injects, from any thread."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from finetune_operator.embedded.status_errors import StatusError
from finetune_operator.embedded.store import Store

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


class Faults:
    """The faults injected now; none at first.

    Args:
        store: Whose watches fail.

    Attributes:
        dropped: Number of the last watch that was ended.
        silenced: Number of the last watch that sends nothing more.
    """

    def __init__(self, store: Store) -> None:
        self.dropped = 0
        self.silenced = 0
        self._watches = 0
        self._faults: list[Fault] = []
        self._store = store
        self._loop = asyncio.get_running_loop()

    def add(self, fault: Fault) -> None:
        """Let matching requests fail from now on."""
        self._faults = [*self._faults, fault]

    def clear(self) -> None:
        """Let all further requests be served."""
        self._faults = []

    def drop_watches(self) -> None:
        """Break the connection of every watch there is."""
        self.dropped = self._watches
        self._loop.call_soon_threadsafe(self._store.wake)

    def silence_watches(self) -> None:
        """Keep every watch there is open without a further event, not even a bookmark."""
        self.silenced = self._watches

    def expire_versions(self) -> None:
        """Make every resourceVersion so far too old to watch from."""
        self._loop.call_soon_threadsafe(self._store.forget)

    def new_watch(self) -> int:
        """Return the number of a watch that begins; for the API server."""
        self._watches += 1
        return self._watches

    def take(self, verb: str, plural: str) -> Fault | None:
        """Return the fault of one request, and count it; for the API server."""
        for fault in self._faults:
            is_meant = verb in (fault.verbs or (verb,)) and plural in (fault.resources or (plural,))
            if is_meant and fault.times != 0:
                if fault.times is not None:
                    fault.times -= 1
                return fault
        return None
