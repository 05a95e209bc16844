"""Looks at attempts beside the work, at intervals and in the budget, so that no verb waits."""

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

SILENCE_SECONDS = 60.0  # of a workspace; it is told to its jobs
_END_SECONDS = 60.0  # after these an end that nobody can explain is one all the same
_JOB_EACH = 5  # of the looks at a run; the others ask MLflow


@dataclass(eq=False)
class _Followed:
    """An attempt that is looked at; times are the loop's.

    Attributes:
        places: Where silence counts: in the workspace, and of this one alone.
        told: What another request was told, instead of the next one.
        over: What another request saw of the end, which is still to be read.
        stop_until: When it ends at the latest, where this process has stopped it.
        due: When to look again; `changed` is set where that, or `told`, has changed.
        may_listen: MLflow is still to be asked for the tags, as those of a job may be older.
        failed_at: When more of its end could not be read first.
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
    """What was seen last of each attempt that the backend was asked about.

    Args:
        workspace_of: Returns the workspace of an attempt, or raises a BackendError.
        now: The time, with a zone.
        jitter: Returns a number from 0 to 1: up to a tenth longer, so that looks spread.
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
        """Look from now on at each attempt that is asked about."""
        self._services = services

    async def close(self) -> None:
        """Look no more."""
        self._services = None
        tasks = [one.task for one in self._followed.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._followed.clear()

    def observe(self, ref: AttemptRef) -> Observation:
        """Return what was seen last of an attempt.

        Raises:
            TransientError: nothing was seen of it yet.
            BackendError: nothing can be, until somebody changes something.
        """
        one = self._follow(ref)
        if one is not None and one.look is not None:
            return states.observation_of(one.look, self._now())
        if (error := one and one.error) and not error.retryable:
            raise BackendError(str(error)) from error
        raise TransientError(str(error or "Azure ML was not asked about the attempt yet"))

    def newest(self, ref: AttemptRef) -> Look | None:
        """Return what was seen last; None until it is known whether the trainer listens."""
        one = self._follow(ref)
        return (one.over or (None if one.may_listen else one.look)) if one is not None else None

    def note(self, job: RawJob) -> None:
        """Take what another request was told for a look."""
        key = job.id.lower()
        if (one := self._followed.get(key)) is None:
            self._told[key] = job
        else:
            one.told = job
            one.changed.set()

    def learn(self, ref: AttemptRef, look: Look) -> None:
        """Take a look that was made before the first one of an attempt had its turn."""
        if (one := self._follow(ref)) is not None and (one.look is None or one.may_listen):
            one.may_listen = False
            if not look.is_over:
                self._publish(one, look)
            elif one.task is not None:  # its last words are to be read first
                one.over = look
                one.task.cancel()  # it may wait for its turn to see as much
                one.task = asyncio.create_task(self._look_on(one))

    def note_stop(self, ref: AttemptRef, until: datetime) -> None:
        """Know that this process has stopped an attempt, and look at it more often."""
        if (one := self._follow(ref)) is not None:
            one.stop_until = until
            one.look = one.look and replace(one.look, stop_until=until)
            one.due = min(one.due, asyncio.get_running_loop().time() + states.STOPPING_SECONDS)
            one.changed.set()

    def forget(self, job_uid: str) -> None:
        """Drop what is known of the attempts of a job."""
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
        """Look at an attempt until nothing of it lives."""
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
        """Look at an attempt, and return after how many seconds to do so again."""
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
        except Exception as error:  # a fault of ours; without looks the job would not go on
            log.exception("attempt not seen", extra={"attempt": one.ref.handle.name})
            return self._missed(one, BackendError(f"{type(error).__name__}: {error}"))
        self._answered(one)
        stop_until = one.stop_until or look.stop_until
        self._publish(one, replace(look, stop_until=stop_until, warning=one.warning))
        return 0.0 if one.may_listen else states.seconds_between_looks(look, self._now())

    async def _ask(self, workspace: Workspace, one: _Followed, name: str) -> Seen:
        """Send the one request of a look, and a second one where a run does not run any more."""
        priority = Priority.READ if one.failed_at is None else Priority.END
        if one.told is None and one.look is not None and one.look.is_running:
            one.num_looks += 1
            # Where MLflow refuses, the job is asked instead, whose tags may say as much.
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
        """Take note of a look that has seen nothing, and return how long to wait."""
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
        """Tell all of a place what is in the way of seeing them; its own refusal goes before."""
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
