"""Turn the batch Job of an attempt and its pods into an Observation. Pure.

A gang is pending until all of its pods run, and failed as soon as one has failed.
"""

from collections.abc import Sequence

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.kubernetes.child_names import AttemptName, facts_if_readable
from finetune_operator.backends.kubernetes.finality import (
    creates_no_more_pods,
    has,
    was_cancelled,
    was_given_up,
)
from finetune_operator.backends.kubernetes.pod_termination import (
    PodTermination,
    condition,
    container_state,
    is_alive,
    termination_of,
)
from finetune_operator.backends.kubernetes.reasons import obstacle
from finetune_operator.kube.resources import Object
from finetune_trainer.config import ExitCode, FailureClass, Termination


def gone(name: AttemptName, pods: Sequence[Object]) -> Observation:
    """Return the observation of an attempt whose batch Job no longer exists."""
    alive = [pod for pod in pods if is_alive(pod)]
    text = f"Job {name} no longer exists"
    if not alive:
        return Observation(AttemptPhase.UNKNOWN, all_gone=True, message=text)
    running = sum(container_state(pod, "running") is not None for pod in alive)
    text = f"{text}; {len(alive)} of its pods are still ending"
    return Observation(AttemptPhase.FAILED, nodes_ready=running, message=text)


def observation_of(batch_job: Object, pods: Sequence[Object]) -> Observation:
    """Return the observation of an attempt, without its progress."""
    facts = facts_if_readable(batch_job)
    size = batch_job["spec"].get("completions") or 0
    wanted = facts.nodes if facts else size or 1
    ends = [termination_of(pod) for pod in pods if not is_alive(pod)]
    alive = [pod for pod in pods if is_alive(pod)]
    running = [pod for pod in alive if container_state(pod, "running") is not None]
    all_gone = not alive and creates_no_more_pods(batch_job, pods, wanted)
    # A batch Job that another client has scaled down becomes Complete without finishing its work.
    # And all pods may have ended seconds before the Job reports it.
    is_complete = has(batch_job, "Complete") and size == wanted
    done = {end.index for end in ends if end.termination.exit_code == ExitCode.DONE}
    # If all exit codes are 0 the batch Job is Complete, whatever its trainers report
    # (with_seen_exit_code).
    contradicted = any(end.index not in done for end in ends)
    if len(done) == wanted or (is_complete and not contradicted):
        return _succeeded(ends, all_gone=all_gone)
    has_failed = any(end.termination.exit_code != ExitCode.DONE for end in ends)
    if has_failed or _is_ending(batch_job):
        cause = min(ends, key=_order) if has_failed else None
        termination = cause.termination if cause else _suspended(batch_job)
        return Observation(
            AttemptPhase.FAILED,
            all_gone=all_gone,
            nodes_ready=len(running),
            termination=termination,
            node=cause.node if cause else "",
            message=termination.message if termination else _why(batch_job, wanted),
        )
    if len(running) + len(ends) >= wanted:
        return Observation(AttemptPhase.RUNNING, nodes_ready=len(running))
    found = obstacle(batch_job, pods)
    return Observation(AttemptPhase.PENDING, nodes_ready=len(running), obstacle=found)


def root_cause_pod(pods: Sequence[Object]) -> Object | None:
    """Return the pod whose failure is the root cause; None if none has ended."""
    ended = [pod for pod in pods if not is_alive(pod)]
    return min(ended, key=lambda pod: _order(termination_of(pod)), default=None)


def _order(end: PodTermination) -> tuple[int, int]:
    return (end.order, end.index)


def _succeeded(ends: Sequence[PodTermination], *, all_gone: bool) -> Observation:
    """Return the observation of a success, with the termination of rank 0, which exports."""
    done = [end for end in ends if end.termination.exit_code == ExitCode.DONE]
    first = min(done, key=lambda one: one.index, default=None)
    termination = first.termination if first else None
    return Observation(AttemptPhase.SUCCEEDED, all_gone=all_gone, termination=termination)


def _is_ending(batch_job: Object) -> bool:
    """Return whether the Job has failed or is about to, even if it was stopped in its queue."""
    if was_cancelled(batch_job) or "deletionTimestamp" in batch_job["metadata"]:
        return True
    return has(batch_job, "Failed", "FailureTarget", "Complete")


def _suspended(batch_job: Object) -> Termination | None:
    """Return the termination of pods that a suspension deleted, which left no message.

    None if it is unknown whether a suspension ended them.
    """
    if not was_given_up(batch_job):
        return None
    text = f"Job {batch_job['metadata']['name']} was suspended by its queue or another client"
    return Termination(
        failure_class=FailureClass.PREEMPTED, exit_code=ExitCode.PREEMPTED, message=text
    )


def _why(batch_job: Object, wanted: int) -> str:
    """Return the reason for its end, from the batch Job's own condition."""
    name = batch_job["metadata"]["name"]
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
