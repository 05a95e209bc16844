"""The work queue: each key at most once, and never in two hands.

Handlers and informers add keys, workers get them. What comes while a key is worked on makes it come
again afterwards; what comes right after a reconcile waits a moment for more of its kind, as one
change of a gang is many events. An urgent key overtakes those that came up to HEAD_START_SECONDS
before it, so that either kind's wait has a bound. Keys of one group, such as the jobs of a backend,
have at most their share of the workers; others overtake those that wait for it. A key that is
deferred comes once no other of its group waits or is worked on, one at a time. Lives on one event
loop; its time is the loop's. The verbs are named as those of client-go's work queue.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.cache import Key

HEAD_START_SECONDS = 5.0

SHORTEST_WAIT_SECONDS = 0.1
"""Until a job is reconciled again, whatever its backend asks for."""


@dataclass(frozen=True)
class Result:
    """What came of reconciling a job.

    Attributes:
        requeue_seconds: When to reconcile again though nothing happens; None for never.
        when_idle: Reconcile before that if no other job waits.
    """

    requeue_seconds: float | None = None
    when_idle: bool = False


NEVER = Result()
AT_ONCE = Result(0.0)


@dataclass(eq=False)
class _Group:
    """Keys of one group.

    Attributes:
        urgent: Since when they wait; in the order they are taken.
        ready: ... those that are not urgent.
        taken: Since when they are worked on.
        deferred: Until no other of the group waits; in the order they are taken.
        open_since: When it last had its share of the workers, and had to wait for it.
    """

    urgent: dict[Key, float] = field(default_factory=dict)
    ready: dict[Key, float] = field(default_factory=dict)
    taken: dict[Key, float] = field(default_factory=dict)
    deferred: dict[Key, None] = field(default_factory=dict)
    open_since: float = -math.inf

    def __len__(self) -> int:
        """Count the keys that wait or are worked on."""
        return len(self.urgent) + len(self.ready) + len(self.taken)

    def first(self) -> Iterator[tuple[float, Key]]:
        """Yield the first urgent and the first other key; the lesser number goes first."""
        for waits, head_start in ((self.urgent, HEAD_START_SECONDS), (self.ready, 0.0)):
            if waits:
                key, since = next(iter(waits.items()))
                yield since - head_start, key


def _never(key: Key) -> bool:
    return False


class WorkQueue:
    """Keys of jobs that wait to be reconciled.

    Args:
        backoff: How long a key waits after failures.
        settle_seconds: How long events do not bring a key back that was just reconciled.
        is_urgent: Whether a key is to be taken before others; asked when it begins to wait.
        group_of: Returns the group of a key; there are few.
        share: Returns how many workers one group may have.
    """

    def __init__(
        self,
        backoff: Backoff,
        settle_seconds: float = 0.0,
        *,
        is_urgent: Callable[[Key], bool] = _never,
        group_of: Callable[[Key], str] = lambda key: "",
        share: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._backoff = backoff
        self._settle_seconds = settle_seconds
        self._is_urgent = is_urgent
        self._group_of = group_of
        self._share = share
        self._loop = asyncio.get_running_loop()
        self._idle: deque[asyncio.Future[None]] = deque()  # workers that wait for a key
        self._groups: dict[str, _Group] = {}
        self._waiting: dict[Key, _Group] = {}
        self._taken: dict[Key, _Group] = {}
        self._deferred: dict[Key, _Group] = {}
        self._again: set[Key] = set()
        self._settling: dict[Key, asyncio.TimerHandle] = {}
        self._woken: set[Key] = set()  # of those that settle
        self._echoing: set[Key] = set()  # ... that were deferred: their own status wakes them
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}

    def __len__(self) -> int:
        """Count the keys that wait for a worker or are in its hands, not those that sleep."""
        return len(self._waiting) + len(self._taken) + len(self._woken)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest of them has waited, or been worked on; 0 where there is none.

        Time that a key waits while its group has all of its share does not count.
        """
        now = self._loop.time()
        since = [now]
        for group in self._groups.values():
            since += group.taken.values()
            if not self._is_full(group):
                waits = (*group.urgent.values(), *group.ready.values())
                since.append(max(min(waits, default=now), group.open_since))
        return now - min(since)

    def is_busy(self, key: Key) -> bool:
        """Say whether another key of its group waits or is worked on; asked by who works on it."""
        return self._num_busy(self._group(key)) > 1

    def _num_busy(self, group: _Group) -> int:
        # What was woken by the report that was just written about it is not counted.
        woken = (one for one in self._woken - self._echoing if self._group(one) is group)
        return len(group) + sum(1 for _ in woken)

    @property
    def num_deferred(self) -> int:
        """How many keys are deferred until no other waits or is worked on."""
        return len(self._deferred)

    def add(self, key: Key) -> None:
        """Have the key reconciled, now or after the reconcile or the wait that is under way."""
        if key in self._taken:
            self._again.add(key)
        elif self._not_before.get(key, 0.0) > self._loop.time():
            return  # its timer runs
        elif key in self._settling:
            self._woken.add(key)
        else:
            self._put(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key reconciled in so long; the earliest of several wins."""
        if seconds <= 0:
            self._put(key)
            return
        there = self._timers.get(key)
        if there is not None:
            if there.when() <= self._loop.time() + seconds:
                return
            there.cancel()
        self._timers[key] = self._loop.call_later(seconds, self._ring, key)

    async def get(self) -> Key:
        """Return the key whose turn it is; the caller must say `done` or `failed`."""
        while (found := self._next()) is None:
            turn = self._loop.create_future()
            self._idle.append(turn)
            await turn
        key, group = found
        if (waits := self._waiting.pop(key, None)) is not None:  # the group may have changed since
            waits.urgent.pop(key, None)
            waits.ready.pop(key, None)
            self._echoing.discard(key)
        else:
            self._echoing.add(key)
        if (other := self._deferred.pop(key, None)) is not None:
            del other.deferred[key]
        self._taken[key] = group
        group.taken[key] = self._loop.time()
        self._stop_timer(key)
        self._woken.discard(key)
        if (rest := self._settling.pop(key, None)) is not None:
            rest.cancel()
        return key

    def done(
        self, key: Key, requeue_seconds: float | None = None, *, when_idle: bool = False
    ) -> None:
        """Give a key back after a reconcile that succeeded; only now may it be taken again.

        Args:
            key: What was taken.
            requeue_seconds: When it comes again by itself.
            when_idle: It comes before that if no other of its group waits or is worked on.
        """
        self._failures.pop(key, None)
        if when_idle:
            group = self._deferred[key] = self._taken[key]
            group.deferred[key] = None
        self._give_back(key)
        if requeue_seconds is not None:
            self.add_after(key, requeue_seconds)

    def add_rate_limited(self, key: Key, at_least_seconds: float = 0.0) -> float:
        """Give a key back after a failure; return how long it sleeps.

        Events that came meanwhile wait with it: they may be the failure's own echo. Those that come
        later wake it, but not in the time that the API server has asked for.

        Args:
            key: What was taken.
            at_least_seconds: Time that the API server has asked for.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._again.discard(key)
        self._give_back(key)
        seconds = max(self._backoff.seconds(failures), at_least_seconds)
        if at_least_seconds > 0:
            self._not_before[key] = self._loop.time() + at_least_seconds
        self.add_after(key, seconds)
        return seconds

    def close(self) -> None:
        """Stop every timer; nothing wakes any more."""
        for timer in (*self._timers.values(), *self._settling.values()):
            timer.cancel()
        self._timers.clear()
        self._settling.clear()

    def _put(self, key: Key) -> None:
        if key not in self._waiting and key not in self._taken:
            group = self._waiting[key] = self._group(key)
            waits = group.urgent if self._is_urgent(key) else group.ready
            waits[key] = self._loop.time()
            if not self._is_full(group):
                self._call_worker()

    def _group(self, key: Key) -> _Group:
        return self._groups.setdefault(self._group_of(key), _Group())

    def _is_full(self, group: _Group) -> bool:
        return len(group.taken) >= self._share()

    def _next(self) -> tuple[Key, _Group] | None:
        """Return the key whose turn it is; None where none may be taken now."""
        groups = [one for one in self._groups.values() if not self._is_full(one)]
        waiting = [(turn, key, group) for group in groups for turn, key in group.first()]
        if waiting:
            _, key, group = min(waiting, key=lambda one: one[0])
            return key, group
        idle = (one for one in groups if one.deferred and not self._num_busy(one))
        return next(((next(iter(one.deferred)), one) for one in idle), None)

    def _call_worker(self) -> None:
        """Wake one worker; a turn that nobody waits for any more was cancelled."""
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
        if group.urgent or group.ready or group.deferred:
            self._call_worker()
        if self._settle_seconds:
            self._settling[key] = self._loop.call_later(
                self._settle_seconds, self._end_settling, key
            )
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _end_settling(self, key: Key) -> None:
        del self._settling[key]
        if key in self._woken:
            self._woken.discard(key)
            self.add(key)
        self._echoing.discard(key)
        if self._deferred:
            self._call_worker()

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key)

    def _stop_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
