"""What was decided about an attempt, carried out by its backend.

What fails for longer than a moment is reported in the status, and tried again.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.base import (
    Attempt,
    Effect,
    Handle,
    Observation,
    Obstacle,
)
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import BackendError, FineTuneError
from finetune_operator.kernel.failing import Failing
from finetune_operator.kernel.jobs import JobIndex, JobView
from finetune_operator.kernel.status_writer import StatusWriter
from finetune_operator.kube.cache import Key
from finetune_operator.reconcile.conditions import Reason
from finetune_operator.reconcile.decide import Cancel, Collect, Decision, Rejection, decide

T = TypeVar("T")

_MAX_ARTIFACTS = 16


class Actions:
    """Acts on attempts.

    Args:
        backends: Who carries it out.
        index: Who plans jobs.
        writer: For what fails.
        now: The time, with a zone.
    """

    def __init__(
        self,
        backends: Backends,
        index: JobIndex,
        writer: StatusWriter,
        now: Callable[[], datetime],
    ) -> None:
        self._backends = backends
        self._index = index
        self._writer = writer
        self._now = now
        self._failing = Failing(now)
        self._obstacles: dict[Key, Obstacle] = {}

    async def create(self, view: JobView, number: int) -> Handle:
        """Create the attempt of that number."""
        plan = self._index.plan(view.job)
        if isinstance(plan, Rejection):
            raise BackendError(plan.message)
        backend = self._backends.of(view.job)
        return await backend.submit(backend.render(replace(plan, job=view.job), Attempt(number)))

    def obstruct(self, key: Key, what: str, error: FineTuneError) -> bool:
        """Note what fails for a job; return whether to report that by now."""
        is_due = bool(self._failing.note(key)) or not error.retryable
        if is_due:
            message = f"{what}: {error}"
            self._obstacles[key] = Obstacle(Reason.BACKEND_FAILED, message, Effect.STALLED)
        return is_due

    def hinder(self, view: JobView, seen: Observation | None) -> Observation | None:
        """Add what fails for a job to what is seen of its attempt."""
        obstacle = self._obstacles.get(view.key)
        if obstacle is None or seen is None or seen.all_gone:
            return seen
        return replace(seen, obstacle=obstacle)

    async def collect(
        self, view: JobView, decision: Decision, seen: Observation | None
    ) -> FineTuneJobStatus:
        """Return the status that was decided, with what was exported where that is to be asked."""
        ref, status = view.ref, decision.status
        if ref is None or seen is None or decision.action(Collect) is None:
            return status
        asked = self._backends.of(view.job).collect(ref)
        found = await self._reported(view, seen, "what it exported cannot be collected", asked)
        return status.model_copy(update={"artifacts": list(found)[:_MAX_ARTIFACTS]})

    async def cancel(self, view: JobView, decision: Decision, seen: Observation | None) -> bool:
        """Cancel the attempt where that was decided; return whether nothing of it is left by now.

        No event would say so: what a backend's own answers have put into its cache is not new any
        more when the watch brings it.
        """
        ref, order = view.ref, decision.action(Cancel)
        if ref is None or seen is None or order is None:
            return False
        backend = self._backends.of(view.job)
        what = f"attempt {ref.number} cannot be told to stop, and runs on"
        await self._reported(view, seen, what, backend.cancel(ref, order.until))
        return (await backend.observe(ref)).all_gone

    def forget(self, key: Key) -> None:
        """Drop what is known of a job."""
        self._failing.forget(key)
        self._obstacles.pop(key, None)

    async def _reported(
        self, view: JobView, seen: Observation, what: str, asked: Awaitable[T]
    ) -> T:
        """Return the answer; where there is none for a while, the status says so.

        Raises:
            FineTuneError: there is no answer.
        """
        try:
            answer = await asked
        except FineTuneError as error:
            if self.obstruct(view.key, what, error):
                stuck = self.hinder(view, replace(seen, all_gone=False))
                decided = decide(view.job, stuck, self._now(), self._index.plan(view.job))
                await self._writer.report(view, decided.status)
            raise
        self.forget(view.key)
        return answer
