"""Let the younger of two gangs give way if both hold a part of their nodes.

Called by `live_attempts` with each observation of a pending gang. Without a queue the scheduler
places pods one by one, so two gangs can wait indefinitely for the nodes that the other one holds.
All state is in memory: after a restart the time counts again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from finetune_operator.backends.kubernetes.child_names import QUEUE_LABEL, AttemptName, owner_of
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.kube.resources import Object
from finetune_trainer.config import FailureClass, Termination

PATIENCE_SECONDS = 120.0
_AGAIN_SECONDS = 10.0


@dataclass(frozen=True)
class _Gang:
    """A gang that holds a part of its nodes.

    Attributes:
        age: Sort key by creation, with the uid of the batch Job; the oldest gang comes first.
        num_placed: Number of its pods that have a node.
        since: When that number was first observed.
        end: Its termination, once it gives way.
    """

    name: AttemptName
    job_uid: str
    age: tuple[str, str]
    num_placed: int
    since: datetime
    end: Termination | None = None


class PartialGangs:
    """Gangs without a queue that hold a part of their nodes, by the uid of the batch Job.

    Args:
        now: Returns the current time, with a time zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._gangs: dict[str, _Gang] = {}
        # By job and older gang: how many nodes the older gang held when the job gave way to it.
        # If it holds no more, the two need different nodes, and the job does not do so again.
        self._yielded: dict[tuple[str, str], int] = {}

    def observe(
        self, name: AttemptName, batch_job: Object, pods: Sequence[Verdict]
    ) -> tuple[Termination | None, float | None]:
        """Record a pending gang; return its termination if it gives way, and when to ask again.

        Only the youngest gang gives way, so that its nodes may complete another gang.
        """
        uid, now = batch_job["metadata"]["uid"], self._now()
        gang, num_placed = self._gangs.get(uid), _num_placed(batch_job, pods)
        if gang is not None and gang.end is not None:
            return gang.end, None
        if num_placed is None:
            self.forget(uid)
            return None, None
        if gang is None or gang.num_placed != num_placed:
            age = (batch_job["metadata"]["creationTimestamp"], uid)
            gang = _Gang(name, owner_of(batch_job).get("uid", ""), age, num_placed, now)
            self._gangs[uid] = gang
        older = self._gives_way_to(gang)
        younger = [one for one in self._gangs.values() if one.age > gang.age]
        if older is None or any(self._gives_way_to(one) for one in younger):
            return None, max(_AGAIN_SECONDS, self._left(gang))
        self._yielded[gang.job_uid, older.age[1]] = older.num_placed
        self._gangs = {key: replace(one, since=now) for key, one in self._gangs.items()}
        self._gangs[uid] = replace(gang, end=_gave_way(gang, older))
        return self._gangs[uid].end, None

    def forget(self, uid: str) -> None:
        """Drop the state of a gang that runs, ends or holds no node."""
        self._gangs.pop(uid, None)

    def forget_job(self, job_uid: str) -> None:
        """Drop the state of a finished or deleted job."""
        self._yielded = {key: one for key, one in self._yielded.items() if key[0] != job_uid}

    def _left(self, gang: _Gang) -> float:
        return PATIENCE_SECONDS - (self._now() - gang.since).total_seconds()

    def _gives_way_to(self, gang: _Gang) -> _Gang | None:
        """Return the oldest gang to which this one must give way; None if there is none."""
        waiting = [one for one in self._gangs.values() if one.end is None and self._left(one) <= 0]
        older = [
            one
            for one in waiting
            if one.age < gang.age
            and self._yielded.get((gang.job_uid, one.age[1])) != one.num_placed
        ]
        return min(older, key=lambda one: one.age, default=None) if gang in waiting else None


def _num_placed(batch_job: Object, pods: Sequence[Verdict]) -> int | None:
    """Return how many pods have a node while others find none; None if the gang is not partial."""
    if QUEUE_LABEL in (batch_job["metadata"].get("labels") or {}):
        return None
    present = [one.pod for one in pods if not one.pod.deleted]
    waits = any(pod.scheduled.status == "False" for pod in present)
    num_placed = sum(bool(pod.node) for pod in present)
    return num_placed if waits and num_placed else None


def _gave_way(gang: _Gang, older: _Gang) -> Termination:
    """Return the termination; a job of another namespace is not named, because it is private."""
    is_near = older.name.namespace == gang.name.namespace
    other = f"job {older.name.job}" if is_near else "an older job of another namespace"
    message = (
        f"gave way to {other}, because for {PATIENCE_SECONDS:.0f} s both held a part of their "
        "nodes; with spec.queue, Kueue admits a job only with all of its nodes"
    )
    return Termination(
        failure_class=FailureClass.PREEMPTED, exit_code=NO_EXIT_CODE, message=message
    )
