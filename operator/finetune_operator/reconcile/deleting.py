"""Decide the next actions for a job that is being deleted: stop its attempt, describe the deletion.

Pure. Called instead of `decide`, because no further attempt follows.
"""

from collections.abc import Sequence
from datetime import datetime

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.backends.base import Observation
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.reconcile import attempts, failures
from finetune_operator.reconcile.conditions import Reason, Situation, Stage, describe
from finetune_operator.reconcile.decide import Cancel, Decision
from finetune_operator.reconcile.watching import describe_stop

ORPHAN = "orphan"
"""Finalizer of `--cascade=orphan`: the dependents of the job are retained."""

FOREGROUND = "foregroundDeletion"
"""Finalizer of `--cascade=foreground`: the job remains until its dependents are removed."""

UNREADABLE_GRACE_SECONDS = 30.0
_REQUEUE_SECONDS = 1.0


def decide_deletion(
    status: FineTuneJobStatus,
    observation: Observation | None,
    finalizers: Sequence[str],
    spec: FineTuneJobSpec | None,
    *,
    now: datetime,
    generation: int,
) -> Decision:
    """Return the next actions for a job with a deletionTimestamp.

    Args:
        status: The current status.
        observation: Observation of the open attempt; None without an open attempt.
        finalizers: Finalizers of the job; without ours once the attempt has no processes.
        spec: Spec of the job; None if it cannot be read.
        now: Time with a zone.
        generation: Generation of the job.
    """
    attempt = attempts.current(status)
    grace = float(spec.deadlines.termination_grace_seconds) if spec else UNREADABLE_GRACE_SECONDS
    actions: tuple[Cancel, ...] = ()
    requeue: float | None = None
    stage, activity = Stage.DELETED, "no attempt runs"
    if attempt is not None and observation is not None:
        report = observation.progress
        if observation.all_gone:
            termination = failures.verdict(observation)
            report = termination.progress or report
            status = attempts.close(status, termination, observation.node, now)
        else:
            saves = spec is None or spec.checkpoint.enabled is not False
            activity = describe_stop(status, attempt, observation, grace, saves=saves)
            activity = "; ".join(filter(None, (activity, observation.warning)))
            stage = Stage.DELETING
            status, until = attempts.stop(status, grace, now)
            actions = (Cancel(until),)
            requeue = observation.requeue_seconds or _REQUEUE_SECONDS
        due = attempts.progress_due_at(status, spec) if spec and actions else None
        if report is not None and (due is None or due <= now):
            status = attempts.with_progress(status, report, observation.checkpoints, now)
    ready = observation.nodes_ready if observation is not None and actions else 0
    status = status.model_copy(update={"nodes": status.nodes.model_copy(update={"ready": ready})})
    remaining = [name for name in finalizers if name != FINALIZER or actions]
    text = "; ".join([f"the job is being deleted: {activity}", *_blockers(remaining)])
    obstacle = observation.obstacle if observation is not None else None
    situation = Situation(stage, Reason.DELETING, text, obstacle=obstacle)
    return Decision(actions, describe(status, situation, now, generation), requeue)


def _blockers(finalizers: Sequence[str]) -> list[str]:
    """Return a clause for each cause that delays the deletion."""
    clauses = []
    if FINALIZER in finalizers:
        clauses.append("it remains until the attempt has ended")
    if FOREGROUND in finalizers:
        clauses.append("it remains until its dependents are removed (--cascade=foreground)")
    foreign = [name for name in finalizers if name not in (FINALIZER, FOREGROUND)]
    if foreign:
        names = ", ".join(foreign)
        subject = f"finalizer {names} is" if len(foreign) == 1 else f"finalizers {names} are"
        clauses.append(f"it remains until {subject} removed")
    return clauses
