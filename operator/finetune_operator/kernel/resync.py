"""Resync: lists all FineTuneJobs at the start, after missed events, and at an interval.

Lists correct the cache that kopf's events fill. If the API server refuses the list of one
namespace, for example because its Role is gone, the others are listed, the refused list is retried,
and its jobs stay cached.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kernel.informer import ABSENT_SECONDS
from finetune_operator.kernel.informers import Place, name_in
from finetune_operator.kube.api_errors import ApiError, ForbiddenError, NotFoundError
from finetune_operator.kube.cache import Key, ObjectCache, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.packed_jobs import pack
from finetune_operator.kube.resources import FINE_TUNE_JOBS

log = logging.getLogger(__name__)

_COALESCE_SECONDS = 1.0  # one LIST for all events lost in one outage
_FORBIDDEN_SECONDS = 10.0


class Resync:
    """Lists FineTuneJobs.

    Args:
        client: Sends the requests.
        cache: The cache to correct.
        namespaces: Namespaces served; empty for all.
        resync_seconds: Longest time between two resyncs.
        backoff: Waits between two tries.
        wake: Called with each job that was listed or is gone.
        on_served: Called when the API server begins to serve the kind.
        on_refused: Called when the API server begins to refuse a list, or does not know the kind.

    Attributes:
        missed_events: Set it if events may have been lost.
        listed_at: Time of the last list request, on the loop's clock.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        *,
        namespaces: Sequence[str],
        resync_seconds: float,
        backoff: Backoff,
        wake: Callable[[Key], None],
        on_served: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self.missed_events = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.listed_at = self._loop.time()
        self._client = client
        self._cache = cache
        self._places: Sequence[Place] = namespaces or (None,)
        self._resync_seconds = resync_seconds
        self._backoff = backoff
        self._wake = wake
        self._on_served = on_served
        self._on_refused = on_refused
        self._forbidden: dict[Place, str] = {}
        self._absent = ""
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_blind(self) -> bool:
        """Whether every list was refused, or the kind is not served."""
        return bool(self._absent) or len(self._forbidden) == len(self._places)

    @property
    def late_seconds(self) -> float:
        """Time since the next resync was due; 0 before that."""
        return max(0.0, self._loop.time() - self.listed_at - self._resync_seconds)

    def forbidden(self) -> dict[str, str]:
        """Return the API server's message for each namespace that is not listed."""
        return {
            name_in(FINE_TUNE_JOBS, place): message for place, message in self._forbidden.items()
        }

    def absent(self) -> dict[str, str]:
        """Return the API server's message by kind, while it does not serve FineTuneJobs."""
        return {str(FINE_TUNE_JOBS): self._absent} if self._absent else {}

    async def list_again(self) -> None:
        """Wait until `run` has listed all jobs again."""
        done = self._loop.create_future()
        self._waiting.append(done)
        self.missed_events.set()
        await done

    async def list_all(self) -> None:
        """Wait until each namespace has been listed, or refused."""
        await self._list_until_done(self._places)
        self.listed_at = self._loop.time()

    async def run(self) -> None:
        """Repeat the lists until cancelled."""
        due = self._next()
        while True:
            soon = self._loop.time() + _FORBIDDEN_SECONDS
            try:
                async with asyncio.timeout_at(min(due, soon) if self._forbidden else due):
                    await self.missed_events.wait()
            except TimeoutError:
                if self._loop.time() < due:
                    await self._list_until_done(tuple(self._forbidden))
                    continue
            await asyncio.sleep(_COALESCE_SECONDS)
            self.missed_events.clear()
            waiting, self._waiting = self._waiting, []
            await self.list_all()
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
            due = self._next()

    def _next(self) -> float:
        return self._loop.time() + self._resync_seconds * random.uniform(0.8, 1.0)

    async def _list_until_done(self, places: Iterable[Place]) -> None:
        failures, was_absent = 0, False
        while True:
            try:
                for place in places:
                    await self._list(place)
            except NotFoundError as error:
                was_absent = True
                await self._wait_to_retry(ABSENT_SECONDS, error)
            except ApiError as error:
                failures += 1
                await self._wait_to_retry(self._backoff.seconds(failures), error)
            else:
                break
        if was_absent:
            log.info("FineTuneJobs are served")
            self._absent = ""
            self._on_served()

    async def _wait_to_retry(self, seconds: float, error: ApiError) -> None:
        is_absent = isinstance(error, NotFoundError)
        if is_absent and not self._absent:
            self._on_refused()
        if not (is_absent and self._absent):
            log.warning("FineTuneJobs cannot be listed", extra={"error": str(error)})
        self._absent = str(error) if is_absent else self._absent
        self.listed_at = self._loop.time()
        await asyncio.sleep(seconds)

    async def _list(self, place: Place) -> None:
        try:
            listing = await self._client.list(FINE_TUNE_JOBS, place, trim=pack)
        except ForbiddenError as error:
            if place not in self._forbidden:
                log.warning("list forbidden", extra=_about(place, error=str(error)))
                self._on_refused()
            self._forbidden[place] = str(error)
            return
        if self._forbidden.pop(place, None) is not None:
            log.info("list allowed again", extra=_about(place))
        gone = self._cache.replace(listing.items, listing.resource_version, place)
        for job in (*gone, *listing.items):
            self._wake(key_of(job))


def _about(place: Place, **fields: str) -> dict[str, str]:
    shown = {"namespace": place} if place else {}
    return {"resource": str(FINE_TUNE_JOBS), **shown, **fields}
