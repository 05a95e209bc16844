"""A job with its time ledger, and rank 0's own account of its time, for tests; time is virtual."""

from dataclasses import replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_operator.reconcile.categories import Category
from finetune_operator.reconcile.ledger import accrue_until, apply_report, apply_status
from finetune_operator.reconcile.saved_ledger import restored, saved
from finetune_trainer.config import FailureClass, Phase, Progress
from finetune_trainer.telemetry.spent import SpentTime
from support.kernel.fake_backend import ended
from support.reconcile.decisions import PENDING, START, Life

GPUS = 8
QUEUED = replace(PENDING, obstacle=Obstacle("Queued", "the queue is full", Effect.QUEUED))
BETWEEN = Observation(AttemptPhase.RUNNING, nodes_ready=1)


class Rank:
    """Rank 0 of an attempt, whose clock is `skew` seconds ahead of the operator's."""

    def __init__(self, now: datetime, *, skew: float = 0.0, resumed: int = 0, starts: int = 0):
        self._skew = skew
        self._spent = SpentTime(self._clock(now))
        self.progress = Progress(restarts_in_place=starts, resumed_step=resumed, step=resumed)

    def enter(self, phase: Phase, now: datetime) -> None:
        self._spent.turn(phase, self._clock(now))
        self.progress = self.progress.model_copy(update={"phase": phase})

    def make(self, steps: int) -> None:
        self.progress = self.progress.model_copy(update={"step": self.progress.step + steps})

    def report(self, now: datetime) -> Progress:
        time = self._clock(now)
        told = {"time": time, "spent": self._spent.at(time)}
        self.progress = self.progress.model_copy(update=told)
        return self.progress

    def _clock(self, now: datetime) -> float:
        return now.timestamp() + self._skew


class LedgerLife(Life):
    """A job of one node, and its ledger as an operator keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = restored(self.status, START, 0, START)
        self.written: FineTuneJobStatus = self.status

    def look(self, seen: Observation | None = None) -> None:
        """Observe, decide, and write."""
        gpus = GPUS * (seen.nodes_ready if seen is not None else 0)
        said = seen and ((seen.termination and seen.termination.progress) or seen.progress)
        if said:
            self.ledger = apply_report(self.ledger, self.status.attempt, said, gpus, self.now)
        self.see(seen)
        self.ledger = apply_status(
            self.ledger, self.status, GPUS * self.status.nodes.ready, self.now
        )

    def write(self) -> None:
        """Save what is known where the next leader finds it."""
        status = self.status.model_copy(update={"ledger": saved(self.ledger)})
        text = status.model_dump_json(by_alias=True, exclude_none=True)
        self.written = FineTuneJobStatus.model_validate_json(text)

    def change_leader(self) -> None:
        """Go on with what was written last."""
        self.job = self.job.model_copy(update={"status": self.written})
        gpus = GPUS * self.written.nodes.ready
        self.ledger = restored(self.written, START, gpus, self.now)

    def times(self) -> dict[Category, int]:
        """Return the milliseconds of each category now, without those that have none."""
        return {
            one: spent for one, spent in accrue_until(self.ledger, self.now).time.items() if spent
        }

    def seconds(self) -> dict[str, float]:
        """Return the same in seconds, by name."""
        return {one.value: spent / 1000 for one, spent in self.times().items()}

    @property
    def age(self) -> int:
        """The job's age in milliseconds."""
        return (self.now - START) // timedelta(milliseconds=1)


def killed() -> Observation:
    """Return what is seen of an attempt that was killed without a last word."""
    return ended(137, FailureClass.WORKER_LOST, "killed")


def training(said: Progress) -> Observation:
    """Return what is seen of an attempt whose rank 0 has reported."""
    return Observation(AttemptPhase.RUNNING, nodes_ready=1, progress=said)
