"""Decide what to do about a job that is being deleted: its attempt is stopped, its status says so.

Pure, as `decide` is, and called in its place: nothing follows on this attempt.
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
from finetune_operator.reconcile.during import on_its_way

ORPHAN = "orphan"
"""Kubernetes' own finalizer of `--cascade=orphan`: what was made for the job shall stay."""

FOREGROUND = "foregroundDeletion"
"""... and of `--cascade=foreground`: the job stays until what was made for it is gone."""

UNREADABLE_GRACE_SECONDS = 30.0
_LOOK_AGAIN_SECONDS = 1.0


def decide_deletion(
    status: FineTuneJobStatus,
    observation: Observation | None,
    finalizers: Sequence[str],
    spec: FineTuneJobSpec | None,
    *,
    now: datetime,
    generation: int,
) -> Decision:
    """Return what to do about a job that has a deletionTimestamp.

    Args:
        status: What is known of it.
        observation: Of its open attempt; None where there is none.
        finalizers: What keeps it; without ours once nothing of the attempt is left.
        spec: Its spec; None where that cannot be read.
        now: Time with a zone.
        generation: Of the job.
    """
    attempt = attempts.current(status)
    grace = float(spec.deadlines.termination_grace_seconds) if spec else UNREADABLE_GRACE_SECONDS
    actions: tuple[Cancel, ...] = ()
    again: float | None = None
    stage, does = Stage.DELETED, "nothing of it runs"
    if attempt is not None and observation is not None:
        said = observation.progress
        if observation.all_gone:
            termination = failures.verdict(observation)
            said = termination.progress or said
            status = attempts.close(status, termination, observation.node, now)
        else:
            saves = spec is None or spec.checkpoint.enabled is not False
            does = on_its_way(status, attempt, observation, grace, saves=saves)
            stage = Stage.DELETING
            status, until = attempts.stop(status, grace, now)
            actions = (Cancel(until),)
            again = observation.requeue_seconds or _LOOK_AGAIN_SECONDS
        due = attempts.progress_due_at(status, spec) if spec and actions else None
        if said is not None and (due is None or due <= now):
            status = attempts.with_progress(status, said, observation.checkpoints, now)
    ready = observation.nodes_ready if observation is not None and actions else 0
    status = status.model_copy(update={"nodes": status.nodes.model_copy(update={"ready": ready})})
    kept = [one for one in finalizers if one != FINALIZER or actions]
    text = "; ".join([f"the job is being deleted: {does}", *_keeps(kept)])
    obstacle = observation.obstacle if observation is not None else None
    situation = Situation(stage, Reason.DELETING, text, obstacle=obstacle)
    return Decision(actions, describe(status, situation, now, generation), again)


def _keeps(finalizers: Sequence[str]) -> list[str]:
    """Return what keeps the job, whoever it is."""
    said = []
    if FINALIZER in finalizers:
        said.append("it stays until that has ended")
    if FOREGROUND in finalizers:
        said.append("it stays until what was made for it is gone (--cascade=foreground)")
    foreign = [one for one in finalizers if one not in (FINALIZER, FOREGROUND)]
    if foreign:
        names = ", ".join(foreign)
        whose = "that finalizer" if len(foreign) == 1 else "these finalizers"
        said.append(f"{names} keeps it until whoever set {whose} takes it away")
    return said
