"""Decides which changes of a job's status are written and when, and writes them with their Events.

A job may cost two status patches until it is Running: one when its attempt is opened, before any
child is created, and one when it trains. A change that no user waits for, such as progress before
the first step, is therefore written with the next change that matters. The writer delays two of
them, the attempt's handle and the number of running nodes, for a limited time, so that one patch
reports them together with the first step. An obstacle whose message changes often is reported at
intervals.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from finetune_operator.api.schema import ApiModel
from finetune_operator.api.v1alpha1.status import Condition, FineTuneJobStatus, JobPhase
from finetune_operator.backends.instances import Backends
from finetune_operator.kernel.events import EventPoster, events_between
from finetune_operator.kernel.job_memory import Reasons
from finetune_operator.kernel.jobs import JobIndex, JobView
from finetune_operator.kernel.ledgers import LedgerBook
from finetune_operator.kube.api_errors import ConflictError, NotFoundError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.client import KubeClient, merge_patch
from finetune_operator.kube.packed_jobs import pack
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, Reason, find, parse_rfc3339
from finetune_trainer.config import redact

log = logging.getLogger(__name__)

PASSING = frozenset({Reason.PROVISIONING, Reason.STARTING})
"""Reasons of an attempt that starts without an obstacle."""

_COMPARED_SEPARATELY = frozenset(
    {"attempts", "backend_ref", "conditions", "ledger", "nodes", "progress"}
)
_WITH_PROGRESS = {"digest": None, "last_step": None, "saved_step": None}
"""Fields of an attempt that are written with the next other change."""
# Most attempts train within this time of their opening, so one patch reports both.
_NODES_SECONDS = 15.0
# Longest delay of the Event AttemptCreated, and longest time without the digest in the status.
_HANDLE_SECONDS = 30.0
_WORDS_SECONDS = 15.0
_MAX_REASONS = 4
_Model = TypeVar("_Model", bound=ApiModel)


class StaleError(Exception):
    """The object has changed since it was read."""


class StatusWriter:
    """Writes to FineTuneJobs, each time to exactly the object that was read.

    Args:
        client: Sends the requests.
        cache: The FineTuneJobs; responses to writes are put into it.
        index: Parses the jobs of the cache.
        backends: Backends of the jobs.
        events: Posts Events.
        ledgers: Time ledgers, written with each status.
        now: The time, with a zone.
    """

    def __init__(
        self,
        client: KubeClient,
        cache: ObjectCache,
        index: JobIndex,
        backends: Backends,
        events: EventPoster,
        ledgers: LedgerBook,
        *,
        now: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._cache = cache
        self._index = index
        self._backends = backends
        self._events = events
        self._ledgers = ledgers
        self._now = now

    async def report(self, view: JobView, status: FineTuneJobStatus) -> tuple[JobView, float]:
        """Write the status if it is worth a write that cannot wait.

        Returns:
            The job with that status, and the seconds that its write may wait; 0 if none is due.

        Raises:
            StaleError: The job has changed.
        """
        status = without_credentials(status)
        self._ledgers.apply_status(view, status)
        with_handle = (
            view.parsed is not None and self._backends.finds_from_cache(view.backend) is False
        )
        if is_worth_writing(view.written, status, with_handle=with_handle):
            delay_seconds = self._words_left(view, status)
            if not with_handle:
                delay_seconds = delay_seconds or nodes_left(view.written, status, self._now())
        elif view.written.backend_ref is None and status.backend_ref is not None:
            delay_seconds = _seconds_left(status, _HANDLE_SECONDS, self._now())
        else:
            return view.with_status(status), 0.0
        if delay_seconds > 0:
            return view.with_status(status), delay_seconds
        return await self.write(view, status), 0.0

    async def write(self, view: JobView, status: FineTuneJobStatus) -> JobView:
        """Write the status, and post the Events for its changes.

        Raises:
            StaleError: The job has changed.
        """
        status = self._ledgers.with_ledger(view, without_credentials(status))
        change = status_patch(view.written, status)
        written = await self.patch(view, {"status": change}, is_status=True)
        phase, attempt = status.phase.value, status.attempt
        log.info("status written", extra={"job": str(view.key), "phase": phase, "attempt": attempt})
        self._ledgers.note_written(written, view.written, status)
        self._note_reasons(view, status)
        for event in events_between(view.written, status):
            await self._events.post(view.metadata, event)
        return written.with_status(status)

    async def patch(self, view: JobView, change: Object, *, is_status: bool = False) -> JobView:
        """Patch exactly the object that was read; another reconcile follows if it has changed.

        Raises:
            StaleError: The job has changed.
        """
        metadata = view.raw["metadata"]
        exactly = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        patch = {**change, "metadata": {**change.get("metadata", {}), **exactly}}
        try:
            patched = await self._client.patch(
                FINE_TUNE_JOBS,
                view.key.name,
                view.key.namespace,
                patch,
                subresource="status" if is_status else None,
            )
        except (ConflictError, NotFoundError) as error:
            raise StaleError from error
        self._cache.put(pack(patched))
        return self._index.get(view.key) or view

    async def delete(self, view: JobView) -> None:
        """Delete exactly the job that was read.

        Raises:
            StaleError: The job is gone.
        """
        name, namespace = view.key.name, view.key.namespace
        try:
            await self._client.delete(FINE_TUNE_JOBS, name, namespace, uid=view.uid)
        except (ConflictError, NotFoundError) as error:
            raise StaleError from error

    async def read_again(self, key: Key) -> None:
        """Read the job into the cache: a conflict has shown that the watch is behind."""
        try:
            obj = await self._client.get(FINE_TUNE_JOBS, key.name, key.namespace)
        except NotFoundError:
            if (cached := self._cache.get(key)) is not None:
                self._cache.remove(cached)
        else:
            self._cache.put(pack(obj))

    def _note_reasons(self, view: JobView, written: FineTuneJobStatus) -> None:
        """Remember when these reasons were written; forget those written longest ago."""
        times = view.memory.reported_at
        times.pop(_reasons(written), None)
        times[_reasons(written)] = self._now()
        for reasons in list(times)[:-_MAX_REASONS]:
            del times[reasons]

    def _words_left(self, view: JobView, new: FineTuneJobStatus) -> float:
        """Return the longest delay of a status whose reasons were written recently.

        The messages may differ: a scheduler changes its message with each node that joins, and two
        stuck pods may be reported in turn.
        """
        written_at = view.memory.reported_at.get(_reasons(new))
        if written_at is None or _has_no_obstacle(new):
            return 0.0
        if _facts(view.written, with_handle=True) != _facts(new, with_handle=True):
            return 0.0
        return max(0.0, _WORDS_SECONDS - (self._now() - written_at).total_seconds())


def nodes_left(saved: FineTuneJobStatus, new: FineTuneJobStatus, now: datetime) -> float:
    """Return the longest delay of a status that only reports how many nodes run.

    Args:
        saved: The status that the API server has.
        new: The status that was decided.
        now: The time, with a zone.

    Returns:
        Seconds until `_NODES_SECONDS` after the attempt was opened; 0 if the statuses differ in
        more than `nodes.ready` and the condition ResourcesReady, or if an obstacle begins or ends.
    """
    if not (_has_no_obstacle(saved) and _has_no_obstacle(new)):
        return 0.0
    if is_worth_writing(_without_resources(saved), _without_resources(new), with_handle=False):
        return 0.0
    return _seconds_left(new, _NODES_SECONDS, now)


def is_worth_writing(
    saved: FineTuneJobStatus, new: FineTuneJobStatus, *, with_handle: bool
) -> bool:
    """Whether `new` differs from `saved` in more than can wait for the next write.

    Args:
        saved: The status that the API server has.
        new: The status that was decided.
        with_handle: Whether a new handle is worth a write, because it cannot be found by the
            attempt's name.
    """
    return _essence(saved, with_handle) != _essence(new, with_handle)


def _essence(status: FineTuneJobStatus, with_handle: bool) -> tuple[object, ...]:
    return (
        *_facts(status, with_handle=with_handle),
        *(_gist(condition) for condition in status.conditions),
    )


def _facts(status: FineTuneJobStatus, *, with_handle: bool) -> tuple[object, ...]:
    """Return the facts of a status, without reasons and messages."""
    starts = status.phase in (JobPhase.QUEUED, JobPhase.STARTING, JobPhase.RESTARTING)
    return (
        {name: value for name, value in status if name not in _COMPARED_SEPARATELY},
        [{**dict(attempt), **_WITH_PROGRESS} for attempt in status.attempts],
        {name: value for name, value in status.nodes if name != "ready"},
        None if starts else status.progress,
        status.backend_ref if with_handle else None,
        *(
            (condition.type, condition.status, condition.observed_generation)
            for condition in status.conditions
        ),
    )


def _gist(condition: Condition) -> tuple[object, ...]:
    reason, message = condition.reason, condition.message
    if reason in PASSING:
        reason = message = ""
    return (reason, message)


def _seconds_left(status: FineTuneJobStatus, seconds: float, now: datetime) -> float:
    """Return the time left of a period that began with the open attempt; 0 without an attempt."""
    opened = attempts.current(status)
    if opened is None or opened.start_time is None:
        return 0.0
    until = parse_rfc3339(opened.start_time) + timedelta(seconds=seconds)
    return max(0.0, (until - now).total_seconds())


def _without_resources(status: FineTuneJobStatus) -> FineTuneJobStatus:
    others = [
        condition
        for condition in status.conditions
        if condition.type != ConditionType.RESOURCES_READY
    ]
    return status.model_copy(update={"conditions": others})


def without_credentials(status: FineTuneJobStatus) -> FineTuneJobStatus:
    """Return the status with redacted messages and addresses; the same object if none changes.

    Folders and checkpoints keep their URIs, by which jobs and attempts are compared.
    """
    found = {
        "conditions": [_redacted(one, "message") for one in status.conditions],
        "attempts": [_redacted(one, "message", "url") for one in status.attempts],
        "suspects": [_redacted(one, "message") for one in status.suspects],
        "trackers": status.trackers and [_redacted(one, "url") for one in status.trackers],
        "artifacts": [redact(one) for one in status.artifacts],
        "backend_ref": status.backend_ref and _redacted(status.backend_ref, "url"),
    }
    changed = {name: value for name, value in found.items() if value != getattr(status, name)}
    return status.model_copy(update=changed) if changed else status


def _redacted(model: _Model, *fields: str) -> _Model:
    changed = {}
    for name in fields:
        text = getattr(model, name)
        if text and (cleaned := redact(text)) != text:
            changed[name] = cleaned
    return model.model_copy(update=changed) if changed else model


def status_patch(old: FineTuneJobStatus, new: FineTuneJobStatus) -> dict[str, Any]:
    """Return the JSON merge patch that turns one status into another."""
    before, after = (
        status.model_dump(by_alias=True, exclude_none=True, mode="json") for status in (old, new)
    )
    return merge_patch(before, after)


def _has_no_obstacle(status: FineTuneJobStatus) -> bool:
    ready = find(status, ConditionType.RESOURCES_READY)
    return ready is not None and ready.reason in PASSING


def _reasons(status: FineTuneJobStatus) -> Reasons:
    return tuple((condition.type, condition.reason) for condition in status.conditions)
