"""The work queue: each key at most once, and never in two hands.

Handlers and watches add keys, workers take them. What comes while a key is worked on makes it come
again afterwards; what comes right after a look waits a moment for more of its kind, as one change
of a gang is many events. An urgent key overtakes those that came up to HEAD_START_SECONDS before
it, so that either kind's wait has a bound. A key that is held comes once no other waits or is
worked on, one at a time. Lives on one event loop; its time is the loop's.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from finetune_operator.kernel.backoff import Backoff
from finetune_operator.kube.cache import Key

HEAD_START_SECONDS = 5.0

SHORTEST_WAIT_SECONDS = 0.1
"""Until a job is looked at again, whatever its backend asks for."""


@dataclass(frozen=True)
class Look:
    """What came of one look at a job.

    Attributes:
        again_in_seconds: When to look again though nothing happens; None for never.
        when_quiet: Look again before that if no other job is to be looked at.
    """

    again_in_seconds: float | None = None
    when_quiet: bool = False


NEVER = Look()
AT_ONCE = Look(0.0)


def _never(key: Key) -> bool:
    return False


class WorkQueue:
    """Keys that want to be looked at.

    Args:
        backoff: How long a key waits after failures.
        rest_seconds: How long events do not bring a key back that was just looked at.
        is_urgent: Whether a key is to be taken before others; asked when it begins to wait.
    """

    def __init__(
        self,
        backoff: Backoff,
        rest_seconds: float = 0.0,
        *,
        is_urgent: Callable[[Key], bool] = _never,
    ) -> None:
        self._backoff = backoff
        self._rest_seconds = rest_seconds
        self._is_urgent = is_urgent
        self._loop = asyncio.get_running_loop()
        self._idle: deque[asyncio.Future[None]] = deque()  # workers that wait for a key
        self._urgent: dict[Key, float] = {}  # since when; in the order they are taken
        self._ready: dict[Key, float] = {}  # ... those that are not urgent
        self._held: dict[Key, None] = {}  # until it is quiet; in the order they are taken
        self._taken: dict[Key, float] = {}
        self._again: set[Key] = set()
        self._rests: dict[Key, asyncio.TimerHandle] = {}
        self._woken: set[Key] = set()  # of those that rest
        self._echoing: set[Key] = set()  # ... that were held: what wakes them is their report
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}

    def __len__(self) -> int:
        """Count the keys that wait for a worker or are in its hands, not those that sleep."""
        return len(self._urgent) + len(self._ready) + len(self._taken) + len(self._woken)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest of them has waited, or been worked on; 0 where there is none."""
        since = [*self._urgent.values(), *self._ready.values(), *self._taken.values()]
        return self._loop.time() - min(since) if since else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether another key waits or is worked on than one that a worker asks about."""
        return self._num_busy > 1

    @property
    def _num_busy(self) -> int:
        # What was woken by the report that was just written about it is not counted.
        return len(self) - len(self._woken & self._echoing)

    @property
    def num_held(self) -> int:
        """How many keys are held until no other waits or is worked on."""
        return len(self._held)

    def add(self, key: Key) -> None:
        """Have the key looked at, now or after the look or the wait that is under way."""
        if key in self._taken:
            self._again.add(key)
        elif self._not_before.get(key, 0.0) > self._loop.time():
            return  # its timer runs
        elif key in self._rests:
            self._woken.add(key)
        else:
            self._put(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key looked at in so long; the earliest of several wins."""
        if seconds <= 0:
            self._put(key)
            return
        there = self._timers.get(key)
        if there is not None:
            if there.when() <= self._loop.time() + seconds:
                return
            there.cancel()
        self._timers[key] = self._loop.call_later(seconds, self._ring, key)

    async def take(self) -> Key:
        """Return the key whose turn it is; the caller must say `done` or `failed`."""
        while (key := self._next()) is None:
            turn = self._loop.create_future()
            self._idle.append(turn)
            await turn
        if key in self._urgent or key in self._ready:
            self._echoing.discard(key)
        else:
            self._echoing.add(key)
        self._urgent.pop(key, None)
        self._ready.pop(key, None)
        self._held.pop(key, None)
        self._taken[key] = self._loop.time()
        self._stop_timer(key)
        self._woken.discard(key)
        if (rest := self._rests.pop(key, None)) is not None:
            rest.cancel()
        return key

    def done(
        self, key: Key, again_in_seconds: float | None = None, *, when_quiet: bool = False
    ) -> None:
        """Give a key back after a look that succeeded; only now may it be taken again.

        Args:
            key: What was taken.
            again_in_seconds: When it comes again by itself.
            when_quiet: It comes before that if no other key waits or is worked on.
        """
        self._failures.pop(key, None)
        if when_quiet:
            self._held[key] = None
        self._give_back(key)
        if again_in_seconds is not None:
            self.add_after(key, again_in_seconds)

    def failed(self, key: Key, at_least_seconds: float = 0.0) -> float:
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

    def failures(self, key: Key) -> int:
        """Return how often in a row the key has failed."""
        return self._failures.get(key, 0)

    def close(self) -> None:
        """Stop every timer; nothing wakes any more."""
        for timer in (*self._timers.values(), *self._rests.values()):
            timer.cancel()
        self._timers.clear()
        self._rests.clear()

    def _put(self, key: Key) -> None:
        if key not in self._urgent and key not in self._ready and key not in self._taken:
            waits = self._urgent if self._is_urgent(key) else self._ready
            waits[key] = self._loop.time()
            self._call_worker()

    def _next(self) -> Key | None:
        """Return the key whose turn it is, and None where none may be taken now."""
        if self._urgent or self._ready:
            is_urgent = _oldest(self._urgent) - HEAD_START_SECONDS <= _oldest(self._ready)
            return next(iter(self._urgent if is_urgent else self._ready))
        return next(iter(self._held), None) if not self._num_busy else None

    def _call_worker(self) -> None:
        """Wake one worker; a turn that nobody waits for any more was cancelled."""
        while self._idle:
            turn = self._idle.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _give_back(self, key: Key) -> None:
        del self._taken[key]
        if self._held:
            self._call_worker()
        if self._rest_seconds:
            self._rests[key] = self._loop.call_later(self._rest_seconds, self._end_rest, key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _end_rest(self, key: Key) -> None:
        del self._rests[key]
        if key in self._woken:
            self._woken.discard(key)
            self.add(key)
        self._echoing.discard(key)
        if self._held:
            self._call_worker()

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._not_before.pop(key, None)
        self.add(key)

    def _stop_timer(self, key: Key) -> None:
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()


def _oldest(waits: dict[Key, float]) -> float:
    return next(iter(waits.values()), math.inf)
