"""Turn the batch Job of an attempt and the verdicts on its pods into an Observation. Pure.

A gang is pending until all of its pods run, and failed as soon as one has failed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.kubernetes.child_names import AttemptName, facts_if_readable
from finetune_operator.backends.kubernetes.finality import (
    completion_of,
    condition,
    creates_no_more_pods,
    has,
    was_cancelled,
    was_given_up,
)
from finetune_operator.backends.kubernetes.reasons import obstacle
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.resources import Object
from finetune_trainer.config import FailureClass


def gone(name: AttemptName, pods: Sequence[Verdict]) -> Observation:
    """Return the observation of an attempt whose batch Job no longer exists."""
    held = [one for one in pods if one.holds_node]
    text = f"Job {name} no longer exists"
    if held:
        text = f"{text}; {len(held)} of its pods are still ending"
        running = sum(one.runs for one in held)
        seen = Observation(AttemptPhase.FAILED, nodes_ready=running, message=text)
        return replace(seen, failure_class=FailureClass.PREEMPTED)
    cause = root_cause(pods)
    if cause is not None and cause.is_done and any(one.pod.index == 0 for one in pods):
        return _succeeded(pods, all_gone=True)
    text = f"{text}, because another client has deleted it"
    seen = Observation(AttemptPhase.UNKNOWN, all_gone=True, message=text)
    if cause is not None and not (cause.is_victim or cause.is_done):
        return _caused_by(cause, seen)
    seen = replace(seen, failure_class=FailureClass.PREEMPTED)
    if cause is None or cause.is_done or cause.termination is None:
        return seen
    text = f"{text}; {cause.message}"
    stopped = cause.termination.model_copy(update={"message": text})
    return replace(seen, termination=stopped, message=text, node=cause.pod.node)


def observation_of(batch_job: Object, pods: Sequence[Verdict]) -> Observation:
    """Return the observation of an attempt, without its progress."""
    facts = facts_if_readable(batch_job)
    size = batch_job["spec"].get("completions") or 0
    wanted = facts.nodes if facts else size or 1
    is_ending = _is_ending(batch_job)
    is_held = any(one.holds_node for one in pods)
    all_gone = not is_held and creates_no_more_pods(batch_job, pods, wanted)
    if (completed := completion_of(batch_job)) is not None:
        return Observation(AttemptPhase.SUCCEEDED, all_gone=all_gone, termination=completed)
    # The controller replaces a pod that is gone without an end of its trainer, unless it fails.
    ends = [one for one in pods if one.end and (is_ending or not one.may_be_replaced)]
    num_running = sum(one.runs for one in pods)
    # A batch Job that another client has scaled down becomes Complete without finishing its work.
    # And all pods may have ended seconds before the Job reports it.
    is_complete = has(batch_job, "Complete") and size == wanted
    done = {one.pod.index for one in ends if one.is_done}
    # If all exit codes are 0 the batch Job is Complete, whatever its trainers report
    # (with_seen_exit_code).
    contradicted = any(one.pod.index not in done for one in ends)
    if len(done) == wanted or (is_complete and not contradicted):
        return _succeeded(ends, all_gone=all_gone)
    cause = root_cause(ends)
    has_failed = cause is not None and not cause.is_done
    if has_failed or is_ending:
        seen = Observation(AttemptPhase.FAILED, all_gone=all_gone, nodes_ready=num_running)
        if cause is not None and has_failed:
            return _caused_by(cause, seen)
        suspended = FailureClass.PREEMPTED if was_given_up(batch_job) else None
        return replace(seen, failure_class=suspended, message=_why(batch_job, wanted))
    if num_running + len(ends) >= wanted:
        return Observation(AttemptPhase.RUNNING, nodes_ready=num_running)
    found = obstacle(batch_job, pods)
    return Observation(AttemptPhase.PENDING, nodes_ready=num_running, obstacle=found)


def root_cause(pods: Iterable[Verdict]) -> Verdict | None:
    """Return the pod whose failure is the root cause; None if no trainer has ended."""
    ended = (one for one in pods if one.end is not None)
    return min(ended, key=lambda one: one.order, default=None)


def _caused_by(cause: Verdict, seen: Observation) -> Observation:
    """Return the observation with the end of the pod that is the root cause."""
    decided = cause.end.failure_class if cause.end is not None and cause.end.is_decided else None
    return replace(
        seen,
        termination=cause.termination,
        failure_class=decided,
        node=cause.pod.node,
        message=cause.message,
    )


def _succeeded(ends: Sequence[Verdict], *, all_gone: bool) -> Observation:
    """Return the observation of a success, with the termination of rank 0, which exports."""
    done = [one for one in ends if one.is_done]
    first = min(done, key=lambda one: one.pod.index, default=None)
    termination = first.termination if first else None
    return Observation(AttemptPhase.SUCCEEDED, all_gone=all_gone, termination=termination)


def _is_ending(batch_job: Object) -> bool:
    """Return whether the Job has failed or is about to, even if it was stopped in its queue."""
    if was_cancelled(batch_job) or "deletionTimestamp" in batch_job["metadata"]:
        return True
    return has(batch_job, "Failed", "FailureTarget", "Complete")


def _why(batch_job: Object, wanted: int) -> str:
    """Return the reason for its end, from the batch Job's own condition."""
    name = batch_job["metadata"]["name"]
    if was_given_up(batch_job):
        return f"Job {name} was suspended by its queue or another client"
    if has(batch_job, "Complete"):
        size = batch_job["spec"].get("completions") or 0
        return (
            f"Job {name} ended without finishing its work, because its completions were changed "
            f"from {wanted} to {size}"
        )
    for kind in ("Failed", "FailureTarget"):
        found = condition(batch_job, kind)
        if found.get("status") == "True":
            return f"Job {name} failed ({found.get('reason')}): {found.get('message', '')}"
    if was_cancelled(batch_job):
        return f"Job {name} is being ended"
    return f"Job {name} is being deleted"
