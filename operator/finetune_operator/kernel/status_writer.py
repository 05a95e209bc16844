"""Writes the status of a job: what of it is worth a write, when, and the Events that go with it.

A job that starts says much that nobody waits for, and the write budget leaves two patches until it
is Running: one when all of its nodes run, one when it trains. So what only passes by (the handle
that can be found again, progress before the first step) is written with the next change that
matters. That the first attempt was opened waits some seconds for the first of the two; words that
change often are written seldom; and what reports a start in which nothing is in the way waits until
no other job waits to be reconciled. Nothing waits without a bound.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.backends.instances import Backends
from finetune_operator.kernel.events import EventPoster, events_between
from finetune_operator.kernel.jobs import JobIndex, JobView, PendingStatuses
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kube.api_errors import ConflictError, NotFoundError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.client import KubeClient, merge_patch
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from finetune_operator.kube.watch import trim_metadata
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    is_true,
    parse_rfc3339,
    rfc3339,
)

log = logging.getLogger(__name__)

PASSING = frozenset({Reason.PROVISIONING, Reason.STARTING})
"""Reasons of an attempt that starts with nothing in its way."""

_APART = frozenset({"attempts", "backend_ref", "conditions", "ledger", "nodes", "progress"})
_OPENING_SECONDS = 3.0
_NODES_SECONDS = 10.0
# As long as a burst of some hundred jobs takes, so that its reports come after its openings.
_QUIET_SECONDS = 20.0
_WORDS_SECONDS = 15.0
_REASONS_KEPT = 4
_Reasons = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Delay:
    """How long a new status may wait.

    Attributes:
        seconds: At most; 0 for a status that is to be written now.
        until_idle: It may be written as soon as no other job waits to be reconciled.
    """

    seconds: float = 0.0
    until_idle: bool = False

    def __bool__(self) -> bool:
        """Say whether it may wait at all."""
        return self.seconds > 0


NO_DELAY = Delay()


class StaleError(Exception):
    """The object has changed since it was read."""


class StatusWriter:
    """Writes to FineTuneJobs, each time to exactly the object that was read.

    Args:
        client: Who writes.
        cache: The FineTuneJobs; answers to writes are put into it.
        index: Who reads them.
        pending: What no status holds yet.
        backends: Who knows where attempts live.
        events: Posts Events.
        ledgers: Whose ledger goes with each write.
        now: The time, with a zone.
        is_busy: Whether others than this job wait to be reconciled, which comes before reporting.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        index: JobIndex,
        pending: PendingStatuses,
        backends: Backends,
        events: EventPoster,
        ledgers: LedgerBook,
        *,
        now: Callable[[], datetime],
        is_busy: Callable[[Key], bool],
    ) -> None:
        self._client = client
        self._cache = cache
        self._index = index
        self._pending = pending
        self._backends = backends
        self._events = events
        self._ledgers = ledgers
        self._now = now
        self._is_busy = is_busy
        self._delays = WriteDelays()

    async def report(self, view: JobView, status: FineTuneJobStatus) -> tuple[JobView, Delay]:
        """Write the status if that is worth a write, unless that can wait.

        Returns:
            The job with that status, and how long its write may wait.

        Raises:
            StaleError: the job has changed.
        """
        self._ledgers.follow(view, status)
        with_handle = (
            view.parsed is not None and self._backends.finds_from_cache(view.backend) is False
        )
        if not is_worth_writing(view.written, status, with_handle=with_handle):
            return view.with_status(status), NO_DELAY
        delay = self._delays.delay(
            view.key,
            view.written,
            status,
            self._now(),
            created=parse_rfc3339(view.raw["metadata"]["creationTimestamp"]),
            with_handle=with_handle,
            is_busy=self._is_busy(view.key),
        )
        if not delay:
            return await self.write(view, status), NO_DELAY
        if status.attempt and not view.written.attempt:
            self._pending.note_opened(view, status)
        return view.with_status(status), delay

    async def write(self, view: JobView, status: FineTuneJobStatus) -> JobView:
        """Write the status, and post Events of what has become true by it.

        Raises:
            StaleError: the job has changed.
        """
        status = self._ledgers.stamped(view, status)
        change = status_patch(view.written, status)
        written = await self.patch(view, {"status": change}, is_status=True)
        phase, attempt = status.phase.value, status.attempt
        log.info("status written", extra={"job": str(view.key), "phase": phase, "attempt": attempt})
        self._pending.note_written(view.key)
        self._ledgers.note_written(written, view.written, status)
        self._delays.note(view.key, status, self._now())
        for event in events_between(view.written, status):
            await self._events.post(view.metadata, event)
        return written.with_status(status)

    async def patch(self, view: JobView, change: Object, *, is_status: bool = False) -> JobView:
        """Patch exactly the object that was read; another reconcile follows if it has changed.

        Raises:
            StaleError: it has changed.
        """
        metadata = view.raw["metadata"]
        exactly = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        patch = {**change, "metadata": {**change.get("metadata", {}), **exactly}}
        try:
            made = await self._client.patch(
                FINE_TUNE_JOBS,
                view.key.name,
                view.key.namespace,
                patch,
                subresource="status" if is_status else None,
            )
        except (ConflictError, NotFoundError) as error:
            raise StaleError from error
        self._cache.put(trim_metadata(made))
        return self._index.get(view.key) or view

    async def delete(self, view: JobView) -> None:
        """Delete exactly the job that was read.

        Raises:
            StaleError: it is gone.
        """
        name, namespace = view.key.name, view.key.namespace
        try:
            await self._client.delete(FINE_TUNE_JOBS, name, namespace, uid=view.uid)
        except (ConflictError, NotFoundError) as error:
            raise StaleError from error

    async def read_again(self, key: Key) -> None:
        """Bring the cache up to date: the watch is behind the answer we just got."""
        try:
            made = await self._client.get(FINE_TUNE_JOBS, key.name, key.namespace)
        except NotFoundError:
            if (there := self._cache.get(key)) is not None:
                self._cache.remove(there)
        else:
            self._cache.put(trim_metadata(made))

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._delays.forget(key)


class WriteDelays:
    """What this process wrote about each job and when, and what waits to be written."""

    def __init__(self) -> None:
        self._written: dict[Key, dict[_Reasons, datetime]] = {}
        self._held: dict[Key, datetime] = {}  # since when a report waits until it is quiet

    def delay(
        self,
        key: Key,
        saved: FineTuneJobStatus,
        new: FineTuneJobStatus,
        now: datetime,
        *,
        created: datetime,
        with_handle: bool,
        is_busy: bool,
    ) -> Delay:
        """Return how long `new` need not be written yet.

        Args:
            key: The job's.
            saved: What the API server has.
            new: What was decided, and is worth a write.
            now: Time with a zone.
            created: When the job was.
            with_handle: Whether the attempt cannot be found again by its name alone, so that it
                is reported at once.
            is_busy: Whether other jobs wait to be reconciled.
        """
        if left := self._words_left(key, saved, new, now):
            return Delay(left)
        if with_handle or not _is_smooth_start(saved, new):
            return NO_DELAY
        if not saved.attempt and (left := _opening_left(new, now, created)):
            return Delay(left)
        if not is_busy:
            return NO_DELAY
        until = self._held.setdefault(key, now) + timedelta(seconds=_QUIET_SECONDS)
        return Delay(max(0.0, (until - now).total_seconds()), until_idle=True)

    def note(self, key: Key, written: FineTuneJobStatus, now: datetime) -> None:
        """Remember that it was written; what was written longest ago is forgotten."""
        self._held.pop(key, None)
        times = self._written.setdefault(key, {})
        times.pop(_reasons(written), None)
        times[_reasons(written)] = now
        for reasons in list(times)[:-_REASONS_KEPT]:
            del times[reasons]

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._written.pop(key, None)
        self._held.pop(key, None)

    def _words_left(
        self, key: Key, saved: FineTuneJobStatus, new: FineTuneJobStatus, now: datetime
    ) -> float:
        """Return how long `new` may wait, as it repeats in other words what was just written.

        A scheduler words anew what it lacks with each node that joins, and of two stuck pods now
        this one is heard, now that one.
        """
        written_at = self._written.get(key, {}).get(_reasons(new))
        if written_at is None or _has_no_obstacle(new):
            return 0.0
        if facts(saved, with_handle=True) != facts(new, with_handle=True):
            return 0.0
        return max(0.0, _WORDS_SECONDS - (now - written_at).total_seconds())


def is_worth_writing(
    saved: FineTuneJobStatus, new: FineTuneJobStatus, *, with_handle: bool
) -> bool:
    """Say whether `new` says more than `saved` that people should see now.

    Args:
        saved: What the API server has.
        new: What was decided.
        with_handle: Whether the handle counts, as it cannot be found again by its name alone.
    """
    return _essence(saved, with_handle) != _essence(new, with_handle)


def _essence(status: FineTuneJobStatus, with_handle: bool) -> tuple[object, ...]:
    return (*facts(status, with_handle=with_handle), *(_gist(one) for one in status.conditions))


def facts(status: FineTuneJobStatus, *, with_handle: bool) -> tuple[object, ...]:
    """Return the facts of a status, without reasons and messages."""
    starts = status.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RESTARTING)
    return (
        {name: value for name, value in status if name not in _APART},
        [{**dict(one), "digest": None} for one in status.attempts],
        {name: value for name, value in status.nodes if name != "ready"},
        None if starts else status.progress,
        status.backend_ref if with_handle else None,
        *((one.type, one.status, one.observed_generation) for one in status.conditions),
    )


def _gist(condition: Condition) -> tuple[object, ...]:
    reason, message = condition.reason, condition.message
    if reason in PASSING:
        reason = message = ""
    return (reason, message)


def status_patch(old: FineTuneJobStatus, new: FineTuneJobStatus) -> dict[str, Any]:
    """Return the JSON merge patch that turns one status into another."""
    before, after = (
        one.model_dump(by_alias=True, exclude_none=True, mode="json") for one in (old, new)
    )
    return merge_patch(before, after)


def _is_smooth_start(saved: FineTuneJobStatus, new: FineTuneJobStatus) -> bool:
    """Say whether `new` only says how the first attempt starts, with nothing in its way."""
    opened = attempts.current(new)
    if opened is None or opened.number > 1:
        return False
    if is_true(saved, ConditionType.STALLED) or is_true(new, ConditionType.STALLED):
        return False
    if new.phase is not JobPhase.STARTING or not _has_no_obstacle(new):
        return False
    if not saved.attempt:
        return find(saved, ConditionType.ACCEPTED) is None
    return saved.phase is JobPhase.STARTING and _has_no_obstacle(saved)


def _has_no_obstacle(status: FineTuneJobStatus) -> bool:
    ready = find(status, ConditionType.RESOURCES_READY)
    return ready is not None and ready.reason in PASSING


def _opening_left(status: FineTuneJobStatus, now: datetime, created: datetime) -> float:
    """Return how long a status may wait that only opens the first attempt.

    Nodes that are there at all run within seconds, and then one write says both. Whoever reads the
    resource meanwhile sees the status that the CRD gives a new job. An operator that dies before it
    has written finds the attempt by its name.
    """
    opened_at = parse_rfc3339(status.attempts[-1].start_time or rfc3339(now))
    until = opened_at + timedelta(seconds=_OPENING_SECONDS)
    if not is_true(status, ConditionType.RESOURCES_READY):
        # Not of when it was opened: after an outage that may be late.
        until = max(until, created + timedelta(seconds=_NODES_SECONDS))
    return max(0.0, (until - now).total_seconds())


def _reasons(status: FineTuneJobStatus) -> _Reasons:
    return tuple((one.type, one.reason) for one in status.conditions)
