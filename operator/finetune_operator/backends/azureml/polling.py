"""Poll attempts in the background, so that no verb of the backend waits for Azure ML."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from finetune_operator.backends.azureml import states
from finetune_operator.backends.azureml.names import UID_TAG
from finetune_operator.backends.azureml.run_logs import read_end
from finetune_operator.backends.azureml.runs import GONE, Seen, see_job, see_run, seen_of
from finetune_operator.backends.azureml.states import AttemptView, AzureMLReason
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptRef, Effect, Observation, Obstacle, Services
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.silence import Silences
from finetune_operator.errors import BackendError, TransientError

log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0  # without a response, after which the jobs of a workspace report that
_END_SECONDS = 60.0  # after which an end is accepted without its details
_JOB_EACH = 5  # every fifth poll of a run reads the job; the others read MLflow's run


@dataclass(eq=False)
class _Polled:
    """A polled attempt; times are of the event loop.

    Attributes:
        places: Scopes in `Silences`: the workspace, and this attempt.
        injected: Result of another request, used instead of the next poll.
        pending_end: The end that another request reported, whose details are still to be read.
        stop_until: Time by which it must have ended, if this process has stopped it.
        due: Time of the next poll. `changed` is set when `due` or `injected` changes.
        may_listen: Whether MLflow is still to be asked for the tags, because the job's tags may be
            older.
        failed_at: Time of the first failure to read the details of its end.
    """

    ref: AttemptRef
    places: tuple[str, str]
    injected: RawJob | None
    pending_end: AttemptView | None = None
    view: AttemptView | None = None
    error: BackendError | None = None
    warning: str = ""
    stop_until: datetime | None = None
    due: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    may_listen: bool = False
    num_polls: int = 0
    failed_at: float | None = None
    task: "asyncio.Task[None] | None" = None


class Poller:
    """The last poll of each attempt that the backend was asked about.

    Args:
        workspace_of: Returns the workspace of an attempt, or raises a BackendError.
        now: Returns the current time, with a time zone.
        jitter: Returns a number from 0 to 1, which lengthens an interval by up to a tenth, so that
            polls do not coincide.
    """

    def __init__(
        self,
        workspace_of: Callable[[AttemptRef], Workspace],
        now: Callable[[], datetime],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._workspace_of, self._now, self._jitter = workspace_of, now, jitter
        self._services: Services | None = None
        self._followed: dict[str, _Polled] = {}
        self._told: dict[str, RawJob] = {}
        self._silences = Silences(SILENCE_SECONDS)

    def start(self, services: Services) -> None:
        """Start polling each attempt that is asked about."""
        self._services = services

    async def close(self) -> None:
        """Stop polling."""
        self._services = None
        tasks = [one.task for one in self._followed.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._followed.clear()

    def observe(self, ref: AttemptRef) -> Observation:
        """Return the last poll of an attempt.

        Raises:
            TransientError: No poll has succeeded yet.
            BackendError: No poll can succeed until a person changes something.
        """
        one = self._follow(ref)
        if one is not None and one.view is not None:
            return states.observation_of(one.view, self._now())
        if (error := one and one.error) and not error.retryable:
            raise BackendError(str(error)) from error
        raise TransientError(str(error or "the attempt was not observed in Azure ML yet"))

    def newest(self, ref: AttemptRef) -> AttemptView | None:
        """Return the last poll; None before it is known whether the trainer checks the stop tag."""
        one = self._follow(ref)
        return (
            (one.pending_end or (None if one.may_listen else one.view)) if one is not None else None
        )

    def note(self, job: RawJob) -> None:
        """Use the result of another request as a poll."""
        key = job.id.lower()
        if (one := self._followed.get(key)) is None:
            self._told[key] = job
        else:
            one.injected = job
            one.changed.set()

    def use_early_view(self, ref: AttemptRef, view: AttemptView) -> None:
        """Use a poll that preceded the first scheduled poll of an attempt."""
        if (one := self._follow(ref)) is not None and (one.view is None or one.may_listen):
            one.may_listen = False
            if not view.is_finished:
                self._publish(one, view)
            elif one.task is not None:  # its termination messages are still to be read
                one.pending_end = view
                one.task.cancel()  # it may be waiting for its turn to read the same state
                one.task = asyncio.create_task(self._poll_until_over(one))

    def note_stop(self, ref: AttemptRef, until: datetime) -> None:
        """Record that this process has stopped an attempt, and poll it more often."""
        if (one := self._follow(ref)) is not None:
            one.stop_until = until
            one.view = one.view and replace(one.view, stop_until=until)
            one.due = min(one.due, asyncio.get_running_loop().time() + states.STOPPING_SECONDS)
            one.changed.set()

    def forget(self, job_uid: str) -> None:
        """Drop the state of a job's attempts."""
        for key, one in list(self._followed.items()):
            if one.ref.job_uid == job_uid:
                del self._followed[key]
                if one.task is not None:
                    one.task.cancel()
        alive = (
            one for one in self._followed.values() if one.view is None or not one.view.is_finished
        )
        self._silences.keep({place for one in alive for place in one.places})
        self._told = {at: job for at, job in self._told.items() if job.tags.get(UID_TAG) != job_uid}

    def _follow(self, ref: AttemptRef) -> _Polled | None:
        key = ref.handle.name.lower()  # Azure ignores case
        if key not in self._followed and self._services is not None:
            places = (key.rpartition("/jobs/")[0], key)
            one = self._followed[key] = _Polled(ref, places, self._told.pop(key, None))
            one.task = asyncio.create_task(self._poll_until_over(one))
        return self._followed.get(key)

    async def _poll_until_over(self, one: _Polled) -> None:
        """Poll an attempt until no part of it lives."""
        loop = asyncio.get_running_loop()
        while one.view is None or not one.view.is_finished:
            wait = await self._poll(one)
            one.due = loop.time() + wait * (1.0 + self._jitter() / 10.0)
            while one.injected is None and (left := one.due - loop.time()) > 0:
                one.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await one.changed.wait()

    async def _poll(self, one: _Polled) -> float:
        """Poll an attempt, and return the seconds until the next poll."""
        name = one.ref.handle.name.rpartition("/")[2]
        try:
            workspace = self._workspace_of(one.ref)
            if (view := one.pending_end) is None:
                seen = await self._ask(workspace, one, name)
                view = states.updated_view(one.view, seen, self._now())
                one.may_listen = one.view is None and view.is_running and view.heard is None
            if view.is_finished and view.state != GONE:
                view = await self._with_end(workspace, one, name, view)
        except BackendError as error:
            return self._record_failure(one, error)
        except Exception as error:  # a bug; without polls the job would stall
            log.exception("attempt not polled", extra={"attempt": one.ref.handle.name})
            return self._record_failure(one, BackendError(f"{type(error).__name__}: {error}"))
        self._clear_silence(one)
        stop_until = one.stop_until or view.stop_until
        self._publish(one, replace(view, stop_until=stop_until, warning=one.warning))
        return 0.0 if one.may_listen else states.poll_interval_seconds(view, self._now())

    async def _ask(self, workspace: Workspace, one: _Polled, name: str) -> Seen:
        """Send the request of a poll, and a second request if the run no longer runs."""
        priority = Priority.READ if one.failed_at is None else Priority.END
        if one.injected is None and one.view is not None and one.view.is_running:
            one.num_polls += 1
            # If MLflow refuses the request, the job is read instead, whose tags may contain the
            # same.
            if (one.num_polls % _JOB_EACH == 0) == bool(one.warning):
                run, one.warning = await see_run(workspace, name)
                if run is not None:
                    return run
                priority = priority if one.warning else Priority.END
        injected, one.injected = one.injected, None
        return (
            seen_of(injected) if injected is not None else await see_job(workspace, name, priority)
        )

    async def _with_end(
        self, workspace: Workspace, one: _Polled, name: str, view: AttemptView
    ) -> AttemptView:
        now = asyncio.get_running_loop().time()
        is_last = now - (one.failed_at or now) >= _END_SECONDS
        try:
            return states.with_end(view, *await read_end(workspace, name, is_last_try=is_last))
        except BackendError:
            one.failed_at = one.failed_at or now
            raise

    def _record_failure(self, one: _Polled, error: BackendError) -> float:
        """Record a failed poll, and return how long to wait."""
        one.error = error
        if not error.retryable:
            text = f"the job cannot be observed: {error}"
            self._report(one.places[1], Obstacle(AzureMLReason.NOT_SEEN, text, Effect.STALLED))
            return states.RUNNING_SECONDS
        pause = error.retry_after or 0.0
        for place in one.places:
            if (first := self._silences.note(place, str(error), pause)) is not None:
                text = f"{first}; the job is observed again when Azure ML responds"
                self._report(place, Obstacle(AzureMLReason.SERVICE_SILENT, text))
        return max(states.poll_interval_seconds(one.view, self._now()), pause)

    def _clear_silence(self, one: _Polled) -> None:
        one.error = None
        for place in one.places:
            if self._silences.end(place):
                self._report(place, None)

    def _report(self, place: str, trouble: Obstacle | None) -> None:
        """Report the obstacle to all attempts of a scope that have no other obstacle."""
        for one in self._followed.values():
            if one.view is None or one.view.is_finished or place not in one.places:
                continue
            old = one.view.trouble
            if place == one.places[1] or old is None or old.reason != AzureMLReason.NOT_SEEN:
                self._publish(one, replace(one.view, trouble=trouble))

    def _publish(self, one: _Polled, view: AttemptView) -> None:
        is_news, one.view = view != one.view, view
        if is_news and self._services is not None:
            self._services.wake(one.ref.job)
