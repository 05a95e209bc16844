"""Builders for tests of `reconcile.decide`: a job that lives through observations."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.status import BackendRef
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.planner.plan import make_plan
from finetune_operator.reconcile.decide import (
    Action,
    Cancel,
    Decision,
    Rejection,
    Seen,
    Submit,
    decide,
)
from finetune_trainer.config import Phase, Progress
from support.api.builders import job

START = datetime(2026, 1, 1, tzinfo=UTC)


def running(step: int = 1, phase: Phase = Phase.TRAINING, **fields: Any) -> Observation:
    """Return what is seen of an attempt that trains."""
    said = Progress(phase=phase, step=step, total_steps=10, **fields)
    return Observation(AttemptPhase.RUNNING, nodes_ready=1, progress=said, requeue_seconds=0.5)


PENDING = Observation(AttemptPhase.PENDING, requeue_seconds=0.1)


def lives(observation: Observation) -> Observation:
    """Return the same while processes are left."""
    return replace(observation, all_gone=False)


class Life:
    """One job, its status saved after each decision, and a clock that a test moves."""

    def __init__(self, **overrides: Any) -> None:
        self.job: FineTuneJob = job(**overrides)
        self.now = START
        self.requeue: float | None = None
        self.rejection: Rejection | None = None

    @property
    def status(self) -> Any:
        """The job's status."""
        return self.job.status

    def set_url(self, url: str) -> None:
        """Let the backend have named a page of the open attempt."""
        ref = self.status.backend_ref.model_copy(update={"url": url})
        status = self.status.model_copy(update={"backend_ref": ref})
        self.job = self.job.model_copy(update={"status": status})

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    def cancel_in(self, seconds: float) -> tuple[Cancel]:
        """Return the actions that kill the attempt in so long."""
        return (Cancel(self.now + timedelta(seconds=seconds)),)

    def suspend(self, value: bool) -> None:
        """Set `spec.suspend`."""
        spec = self.job.spec.model_copy(update={"suspend": value})
        self.job = self.job.model_copy(update={"spec": spec})

    def decide(self, seen: Seen = None) -> Decision:
        """Decide without saving."""
        return decide(self.job, seen, self.now, self.rejection or make_plan(self.job))

    def see(self, seen: Seen = None) -> tuple[Action, ...]:
        """Decide, save the status, hand out a handle for what is submitted."""
        decision = self.decide(seen)
        status = decision.status
        if any(isinstance(action, Submit) for action in decision.actions):
            ref = BackendRef(kind="Fake", name=f"tiny-{status.attempt}")
            status = status.model_copy(update={"backend_ref": ref})
        self.job = self.job.model_copy(update={"status": status})
        self.requeue = decision.requeue_seconds
        return decision.actions

    def end(self, seen: Seen) -> tuple[Action, ...]:
        """Let the attempt end, and wait until an action follows or the job is finished."""
        actions = self.see(seen)
        while not actions and self.requeue is not None:
            self.wait(self.requeue)
            actions = self.see()
        return actions

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        found = self._condition(kind)
        return found.status, found.reason

    def said(self, kind: str) -> str:
        """Return the message of a condition."""
        return str(self._condition(kind).message)

    def _condition(self, kind: str) -> Any:
        return next(found for found in self.status.conditions if found.type == kind)
