"""Sources of FineTuneJob events, and the source that lists and then watches without kopf.

In a cluster the events come from kopf (`kopf_events.py`). `FollowedJobs` uses the operator's own
client and needs no thread, no second loop and no import of kopf; `ftctl run` uses it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.api_errors import ApiError, GoneError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object

OnEvent = Callable[[str | None, Object | None], None]
"""Called with the type (`ADDED`, `MODIFIED`, `DELETED`, or None from a list) and the object.

The object is None after a list whose objects are not delivered: the receiver has to list them.
"""


@dataclass(frozen=True)
class ListenOptions:
    """Options of the requests for FineTuneJobs.

    Attributes:
        namespaces: Namespaces served; empty for all.
        backoff: Waits between two tries; endless, because kopf ends the process after the last.
        request_seconds: Timeout of a request that is not a watch.
        watch_seconds: Timeout of a watch; an integer, because the API server refuses a fraction.
    """

    namespaces: Sequence[str]
    backoff: Backoff
    request_seconds: float
    watch_seconds: int = 60


class JobEvents(Protocol):
    """Events of FineTuneJobs: of each list, then of each change."""

    def start(self) -> None:
        """Start to send events."""

    async def ended(self) -> None:
        """Wait until the source has ended, or delivers no more events."""

    def stop(self) -> None:
        """Stop delivering events."""

    def asked_at(self) -> float | None:
        """Return the time of the last request for FineTuneJobs; None before the first.

        With several namespaces it is the oldest of their last requests. The time is of the loop's
        clock, and a request without a response counts, too.
        """


class FollowedJobs:
    """Delivers events of FineTuneJobs as kopf does: after a gap it lists and omits deletions.

    Args:
        client: Sends the requests.
        options: Options of the requests.
        on_event: Called on the event loop.
    """

    def __init__(self, client: KubeClient, options: ListenOptions, on_event: OnEvent) -> None:
        self._client = client
        self._options = options
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._asked_at: dict[str | None, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to list and watch."""
        places = self._options.namespaces or (None,)
        self._tasks = [asyncio.create_task(self._follow(place)) for place in places]

    async def ended(self) -> None:
        """Wait until it is stopped; raise any unexpected error."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    def stop(self) -> None:
        """Stop listing and watching."""
        for task in self._tasks:
            task.cancel()

    def asked_at(self) -> float | None:
        """Return the time of the oldest last request of all namespaces."""
        is_whole = len(self._asked_at) == len(self._tasks)
        return min(self._asked_at.values(), default=None) if is_whole else None

    async def _follow(self, place: str | None) -> None:
        version: str | None = None
        failures = 0
        while True:
            self._asked_at[place] = self._loop.time()
            try:
                if version is None:
                    listing = await self._client.list(FINE_TUNE_JOBS, place)
                    version = listing.resource_version
                    for obj in listing.items:
                        self._on_event(None, obj)
                    del listing  # not retained during the watch
                watch = self._client.watch(
                    FINE_TUNE_JOBS,
                    place,
                    resource_version=version,
                    timeout_seconds=self._options.watch_seconds,
                )
                async for event in watch:
                    version = event.resource_version
                    if event.type != "BOOKMARK":
                        self._on_event(event.type, event.object)
                failures = 0
            except GoneError:
                version = None
            except ApiError:
                failures += 1
                await asyncio.sleep(self._options.backoff.seconds(failures))
