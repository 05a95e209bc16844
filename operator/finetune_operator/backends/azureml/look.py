"""Poll attempts in the background, at intervals and within the budget, so that no verb waits."""

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
from finetune_operator.backends.azureml.states import Look
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptRef, Effect, Observation, Obstacle, Services
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.silence import Silences
from finetune_operator.errors import BackendError, TransientError

log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0  # after which the silence of a workspace is reported in its jobs
_END_SECONDS = 60.0  # after this time an end without an explanation is accepted
_JOB_EACH = 5  # every fifth poll of a run asks for the job; the others ask MLflow


@dataclass(eq=False)
class _Followed:
    """A polled attempt; times are of the event loop.

    Attributes:
        places: Scopes of silence: the workspace, and this attempt.
        told: Result of another request, used instead of the next poll.
        over: The end as another request saw it, whose details are still to be read.
        stop_until: Deadline of the end, if this process has stopped it.
        due: When to poll again; `changed` is set if `due` or `told` has changed.
        may_listen: MLflow is still to be asked for the tags, because a job's tags may be older.
        failed_at: When reading the details of its end first failed.
    """

    ref: AttemptRef
    places: tuple[str, str]
    told: RawJob | None
    over: Look | None = None
    look: Look | None = None
    error: BackendError | None = None
    warning: str = ""
    stop_until: datetime | None = None
    due: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    may_listen: bool = False
    num_looks: int = 0
    failed_at: float | None = None
    task: "asyncio.Task[None] | None" = None


class Looks:
    """The last poll of each attempt that the backend was asked about.

    Args:
        workspace_of: Returns the workspace of an attempt, or raises a BackendError.
        now: Returns the current time, with a time zone.
        jitter: Returns a number from 0 to 1: intervals grow by up to a tenth, so that polls spread.
    """

    def __init__(
        self,
        workspace_of: Callable[[AttemptRef], Workspace],
        now: Callable[[], datetime],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._workspace_of, self._now, self._jitter = workspace_of, now, jitter
        self._services: Services | None = None
        self._followed: dict[str, _Followed] = {}
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
        if one is not None and one.look is not None:
            return states.observation_of(one.look, self._now())
        if (error := one and one.error) and not error.retryable:
            raise BackendError(str(error)) from error
        raise TransientError(str(error or "Azure ML was not asked about the attempt yet"))

    def newest(self, ref: AttemptRef) -> Look | None:
        """Return the last poll; None until it is known whether the trainer listens."""
        one = self._follow(ref)
        return (one.over or (None if one.may_listen else one.look)) if one is not None else None

    def note(self, job: RawJob) -> None:
        """Use the result of another request as a poll."""
        key = job.id.lower()
        if (one := self._followed.get(key)) is None:
            self._told[key] = job
        else:
            one.told = job
            one.changed.set()

    def learn(self, ref: AttemptRef, look: Look) -> None:
        """Use a poll that preceded the first scheduled poll of an attempt."""
        if (one := self._follow(ref)) is not None and (one.look is None or one.may_listen):
            one.may_listen = False
            if not look.is_over:
                self._publish(one, look)
            elif one.task is not None:  # its termination messages are still to be read
                one.over = look
                one.task.cancel()  # it may be waiting for its turn to see the same
                one.task = asyncio.create_task(self._look_on(one))

    def note_stop(self, ref: AttemptRef, until: datetime) -> None:
        """Record that this process has stopped an attempt, and poll it more often."""
        if (one := self._follow(ref)) is not None:
            one.stop_until = until
            one.look = one.look and replace(one.look, stop_until=until)
            one.due = min(one.due, asyncio.get_running_loop().time() + states.STOPPING_SECONDS)
            one.changed.set()

    def forget(self, job_uid: str) -> None:
        """Drop the state of a job's attempts."""
        for key, one in list(self._followed.items()):
            if one.ref.job_uid == job_uid:
                del self._followed[key]
                if one.task is not None:
                    one.task.cancel()
        alive = (one for one in self._followed.values() if one.look is None or not one.look.is_over)
        self._silences.keep({place for one in alive for place in one.places})
        self._told = {at: job for at, job in self._told.items() if job.tags.get(UID_TAG) != job_uid}

    def _follow(self, ref: AttemptRef) -> _Followed | None:
        key = ref.handle.name.lower()  # Azure ignores case
        if key not in self._followed and self._services is not None:
            places = (key.rpartition("/jobs/")[0], key)
            one = self._followed[key] = _Followed(ref, places, self._told.pop(key, None))
            one.task = asyncio.create_task(self._look_on(one))
        return self._followed.get(key)

    async def _look_on(self, one: _Followed) -> None:
        """Poll an attempt until no part of it lives."""
        loop = asyncio.get_running_loop()
        while one.look is None or not one.look.is_over:
            wait = await self._look(one)
            one.due = loop.time() + wait * (1.0 + self._jitter() / 10.0)
            while one.told is None and (left := one.due - loop.time()) > 0:
                one.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await one.changed.wait()

    async def _look(self, one: _Followed) -> float:
        """Poll an attempt, and return the seconds until the next poll."""
        name = one.ref.handle.name.rpartition("/")[2]
        try:
            workspace = self._workspace_of(one.ref)
            if (look := one.over) is None:
                seen = await self._ask(workspace, one, name)
                look = states.look_after(one.look, seen, self._now())
                one.may_listen = one.look is None and look.is_running and look.heard is None
            if look.is_over and look.state != GONE:
                look = await self._with_end(workspace, one, name, look)
        except BackendError as error:
            return self._missed(one, error)
        except Exception as error:  # a defect of ours; without polls the job would stall
            log.exception("attempt not seen", extra={"attempt": one.ref.handle.name})
            return self._missed(one, BackendError(f"{type(error).__name__}: {error}"))
        self._answered(one)
        stop_until = one.stop_until or look.stop_until
        self._publish(one, replace(look, stop_until=stop_until, warning=one.warning))
        return 0.0 if one.may_listen else states.seconds_between_looks(look, self._now())

    async def _ask(self, workspace: Workspace, one: _Followed, name: str) -> Seen:
        """Send the request of a poll, and a second one for a run that no longer runs."""
        priority = Priority.READ if one.failed_at is None else Priority.END
        if one.told is None and one.look is not None and one.look.is_running:
            one.num_looks += 1
            # If MLflow refuses, the job is asked instead, whose tags may contain the same.
            if (one.num_looks % _JOB_EACH == 0) == bool(one.warning):
                run, one.warning = await see_run(workspace, name)
                if run is not None:
                    return run
                priority = priority if one.warning else Priority.END
        told, one.told = one.told, None
        return seen_of(told) if told is not None else await see_job(workspace, name, priority)

    async def _with_end(self, workspace: Workspace, one: _Followed, name: str, look: Look) -> Look:
        now = asyncio.get_running_loop().time()
        is_last = now - (one.failed_at or now) >= _END_SECONDS
        try:
            return states.with_end(look, *await read_end(workspace, name, is_last_try=is_last))
        except BackendError:
            one.failed_at = one.failed_at or now
            raise

    def _missed(self, one: _Followed, error: BackendError) -> float:
        """Record a failed poll, and return how long to wait."""
        one.error = error
        if not error.retryable:
            text = f"what becomes of the job cannot be seen: {error}"
            self._tell(one.places[1], Obstacle("NotSeen", text, Effect.STALLED))
            return states.RUNNING_SECONDS
        pause = error.retry_after or 0.0
        for place in one.places:
            if (first := self._silences.note(place, str(error), pause)) is not None:
                text = f"{first}; the job goes on, and is seen again when Azure ML answers"
                self._tell(place, Obstacle("ServiceSilent", text))
        return max(states.seconds_between_looks(one.look, self._now()), pause)

    def _answered(self, one: _Followed) -> None:
        one.error = None
        for place in one.places:
            if self._silences.end(place):
                self._tell(place, None)

    def _tell(self, place: str, trouble: Obstacle | None) -> None:
        """Report the obstacle to all attempts of a scope, unless they have one of their own."""
        for one in self._followed.values():
            if one.look is None or one.look.is_over or place not in one.places:
                continue
            old = one.look.trouble
            if place == one.places[1] or old is None or old.reason != "NotSeen":
                self._publish(one, replace(one.look, trouble=trouble))

    def _publish(self, one: _Followed, look: Look) -> None:
        is_news, one.look = look != one.look, look
        if is_news and self._services is not None:
            self._services.wake(one.ref.job)
