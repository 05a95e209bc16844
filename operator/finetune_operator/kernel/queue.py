"""The work queue: each key is queued at most once and processed by at most one worker.

Handlers and informers add keys, workers get them. A key that is added while a worker processes it
is queued again afterwards; a key that is added right after its reconcile is queued after a short
delay, because one change of a gang causes many events. An urgent key overtakes keys that were added
up to HEAD_START_SECONDS before it, so neither kind waits without a bound. Keys of one group, such
as the jobs of a backend, get at most their share of the workers; meanwhile keys of other groups
overtake them. Inside a group the namespaces take turns, so the backlog of one namespace delays a
key of another by at most one key for each namespace that waits. The queue belongs to one event loop
and uses its clock. Its methods have the names of client-go's work queue.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.cache import Key

HEAD_START_SECONDS = 5.0

SHORTEST_WAIT_SECONDS = 0.1
"""Minimum delay before a job is reconciled again, whatever its backend requests."""


@dataclass(frozen=True)
class Result:
    """Result of reconciling a job.

    Attributes:
        requeue_seconds: Delay before the next reconcile if no event comes; None for never.
    """

    requeue_seconds: float | None = None


NEVER = Result()
AT_ONCE = Result(0.0)


@dataclass(eq=False)
class _Waits:
    """Queued keys of one namespace.

    Attributes:
        urgent: Urgent keys and when each was queued, in the order of processing.
        ready: All other queued keys, likewise.
    """

    urgent: dict[Key, float] = field(default_factory=dict)
    ready: dict[Key, float] = field(default_factory=dict)

    def first(self) -> tuple[float, Key]:
        """Return the next key and the time that orders it among keys of other groups."""
        kinds = ((self.urgent, HEAD_START_SECONDS), (self.ready, 0.0))
        heads = [(next(iter(waits.items())), head_start) for waits, head_start in kinds if waits]
        return min(
            ((since - head_start, key) for (key, since), head_start in heads),
            key=lambda head: head[0],
        )

    def oldest(self) -> float:
        """Return the time when the oldest key was queued."""
        return min(next(iter(waits.values())) for waits in (self.urgent, self.ready) if waits)


@dataclass(eq=False)
class _Group:
    """Keys of one group.

    Attributes:
        waits: Queued keys by namespace; the first namespace has the next turn.
        taken: Keys that workers process, and since when.
        open_since: Time when the group last used its whole share of the workers.
    """

    waits: dict[str, _Waits] = field(default_factory=dict)
    taken: dict[Key, float] = field(default_factory=dict)
    open_since: float = -math.inf

    def put(self, key: Key, now: float, *, is_urgent: bool) -> None:
        """Queue a key."""
        waits = self.waits.setdefault(key.namespace, _Waits())
        (waits.urgent if is_urgent else waits.ready)[key] = now

    def take(self, key: Key, now: float) -> None:
        """Give a queued key to a worker; the next turn of its namespace is after all others."""
        waits = self.waits.pop(key.namespace)
        waits.urgent.pop(key, None)
        waits.ready.pop(key, None)
        if waits.urgent or waits.ready:
            self.waits[key.namespace] = waits
        self.taken[key] = now

    def first(self) -> tuple[float, Key] | None:
        """Return the next key and the time that orders it among groups; None without a key."""
        return next(iter(self.waits.values())).first() if self.waits else None


class WorkQueue:
    """Keys of jobs to reconcile.

    Args:
        backoff: Delays after failures.
        coalesce_seconds: Time after a reconcile in which events of the key are coalesced.
        is_urgent: Whether a key goes before others; evaluated when it is queued.
        group_of: Returns the group of a key; there are few groups.
        share: Maximum number of workers for one group.
    """

    def __init__(
        self,
        backoff: Backoff,
        coalesce_seconds: float = 0.0,
        *,
        is_urgent: Callable[[Key], bool] = lambda key: False,
        group_of: Callable[[Key], str] = lambda key: "",
        share: float = math.inf,
    ) -> None:
        self._backoff = backoff
        self._coalesce_seconds = coalesce_seconds
        self._is_urgent = is_urgent
        self._group_of = group_of
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._idle: deque[asyncio.Future[None]] = deque()  # workers without a key
        self._groups: dict[str, _Group] = {}
        self._waiting: set[Key] = set()
        self._taken: dict[Key, _Group] = {}
        self._again: set[Key] = set()
        self._coalescing: dict[Key, asyncio.TimerHandle] = {}
        self._woken: set[Key] = set()  # coalescing keys with an event
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}

    def __len__(self) -> int:
        """Count the queued and processed keys, without keys that wait for their timer."""
        return len(self._waiting) + len(self._taken) + len(self._woken)

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest queued or processed key; 0 if the queue is empty.

        Time that a key waits while its group uses its whole share does not count.
        """
        now = self._loop.time()
        since = [now]
        for group in self._groups.values():
            since += group.taken.values()
            if not self._is_full(group):
                oldest = min((waits.oldest() for waits in group.waits.values()), default=now)
                since.append(max(oldest, group.open_since))
        return now - min(since)

    def add(self, key: Key) -> None:
        """Queue the key, at once or after its current reconcile or delay."""
        if key in self._taken:
            self._again.add(key)
        elif self._not_before.get(key, 0.0) > self._loop.time():
            return  # its timer runs
        elif key in self._coalescing:
            self._woken.add(key)
        else:
            self._put(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue the key after a delay; the earliest of several wins."""
        if seconds <= 0:
            self._put(key)
            return
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= self._loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = self._loop.call_later(seconds, self._ring, key)

    async def get(self) -> Key:
        """Return the next key; the caller must call `done` or `add_rate_limited` with it."""
        while (item := self._next()) is None:
            turn = self._loop.create_future()
            self._idle.append(turn)
            await turn
        key, group = item
        self._waiting.discard(key)
        self._taken[key] = group
        group.take(key, self._loop.time())
        self._stop_timer(key)
        self._woken.discard(key)
        if (timer := self._coalescing.pop(key, None)) is not None:
            timer.cancel()
        return key

    def done(self, key: Key, requeue_seconds: float | None = None) -> None:
        """Return a key after a successful reconcile; only now may another worker get it.

        Args:
            key: The processed key.
            requeue_seconds: Delay before it is queued again by itself.
        """
        self._failures.pop(key, None)
        self._give_back(key)
        if requeue_seconds is not None:
            self.add_after(key, requeue_seconds)

    def add_rate_limited(
        self, key: Key, at_least_seconds: float = 0.0, *, is_requested: bool = True
    ) -> float:
        """Return a key after a failure; return the delay before its retry.

        Events during the failed reconcile do not shorten the delay, because it may have caused
        them. A later event queues the key at once, unless the API server has requested the delay.

        Args:
            key: The processed key.
            at_least_seconds: Shortest delay.
            is_requested: Whether the API server requested it.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._again.discard(key)
        self._give_back(key)
        seconds = max(self._backoff.seconds(failures), at_least_seconds)
        if at_least_seconds > 0 and is_requested:
            self._not_before[key] = self._loop.time() + at_least_seconds
        self.add_after(key, seconds)
        return seconds

    def close(self) -> None:
        """Cancel all timers."""
        for timer in (*self._timers.values(), *self._coalescing.values()):
            timer.cancel()
        self._timers.clear()
        self._coalescing.clear()

    def _put(self, key: Key) -> None:
        if key not in self._waiting and key not in self._taken:
            group = self._groups.setdefault(self._group_of(key), _Group())
            self._waiting.add(key)
            group.put(key, self._loop.time(), is_urgent=self._is_urgent(key))
            if not self._is_full(group):
                self._call_worker()

    def _is_full(self, group: _Group) -> bool:
        return len(group.taken) >= self._share

    def _next(self) -> tuple[Key, _Group] | None:
        """Return the next key and its group; None if no key may be processed now."""
        groups = (group for group in self._groups.values() if not self._is_full(group))
        waiting = [(*first, group) for group in groups if (first := group.first()) is not None]
        if not waiting:
            return None
        _, key, group = min(waiting, key=lambda candidate: candidate[0])
        return key, group

    def _call_worker(self) -> None:
        """Wake one worker; skip futures that are done, which belong to cancelled workers."""
        while self._idle:
            turn = self._idle.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _give_back(self, key: Key) -> None:
        group = self._taken.pop(key)
        if self._is_full(group):
            group.open_since = self._loop.time()
        del group.taken[key]
        if group.waits:
            self._call_worker()
        if self._coalesce_seconds:
            self._coalescing[key] = self._loop.call_later(
                self._coalesce_seconds, self._end_coalescing, key
            )
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _end_coalescing(self, key: Key) -> None:
        del self._coalescing[key]
        if key in self._woken:
            self._woken.discard(key)
            self.add(key)

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key)

    def _stop_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
