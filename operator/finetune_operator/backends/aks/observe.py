"""What is seen of an attempt: one batch Job and its pods become one Observation. Pure.

A gang is pending until every one of its pods runs, and failed as soon as one has failed.
"""

from collections.abc import Sequence

from finetune_operator.backends.aks.names import AttemptName
from finetune_operator.backends.aks.reasons import obstacle, was_cancelled
from finetune_operator.backends.aks.words import (
    PodEnd,
    condition,
    container_state,
    end_of,
    is_alive,
)
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.kube.resources import Object
from finetune_trainer.config import ExitCode


def gone(name: AttemptName, pods: Sequence[Object]) -> Observation:
    """Return what is seen where the batch Job does not exist any more."""
    alive = [pod for pod in pods if is_alive(pod)]
    text = f"Job {name} does not exist any more"
    if not alive:
        return Observation(AttemptPhase.UNKNOWN, all_gone=True, message=text)
    running = sum(container_state(pod, "running") is not None for pod in alive)
    text = f"{text}; {len(alive)} of its pods still end"
    return Observation(AttemptPhase.FAILED, nodes_ready=running, message=text)


def look(batch_job: Object, pods: Sequence[Object]) -> Observation:
    """Return what is seen of an attempt, progress apart."""
    wanted = batch_job["spec"].get("completions") or 1
    ends = _ends(pods)
    alive = [pod for pod in pods if is_alive(pod)]
    running = [pod for pod in alive if container_state(pod, "running") is not None]
    guilty = min(ends, key=_innocence, default=None)
    if _is_true(batch_job, "Complete") or _all_done(ends, wanted):
        return _succeeded(ends, alive)
    has_failed = any(end.words.exit_code != ExitCode.DONE for end in ends)
    if has_failed or _is_ending(batch_job):
        return Observation(
            AttemptPhase.FAILED,
            all_gone=not alive and _makes_no_more(batch_job, len(ends), wanted),
            nodes_ready=len(running),
            termination=guilty.words if guilty and has_failed else None,
            node=guilty.node if guilty and has_failed else "",
            message=guilty.words.message if guilty and has_failed else _why(batch_job),
        )
    if len(running) + len(ends) >= wanted:
        return Observation(AttemptPhase.RUNNING, nodes_ready=len(running))
    told = obstacle(batch_job, pods)
    return Observation(
        AttemptPhase.PENDING, nodes_ready=len(running), reason=told.reason, message=told.message
    )


def guilty_pod(pods: Sequence[Object]) -> Object | None:
    """Return the pod whose end explains the others'; None if none has ended."""
    ended = [pod for pod in pods if not is_alive(pod)]
    return min(ended, key=lambda pod: _innocence(end_of(pod)), default=None)


def _ends(pods: Sequence[Object]) -> list[PodEnd]:
    return [end_of(pod) for pod in pods if not is_alive(pod)]


def _innocence(end: PodEnd) -> tuple[int, int]:
    return (end.innocence, end.index)


def _succeeded(ends: Sequence[PodEnd], alive: Sequence[Object]) -> Observation:
    """Rank 0's words count: it exports."""
    first = min(ends, key=lambda one: one.index, default=None)
    return Observation(
        AttemptPhase.SUCCEEDED,
        all_gone=not alive,
        termination=first.words if first else None,
    )


def _all_done(ends: Sequence[PodEnd], wanted: int) -> bool:
    """The batch Job says so too, but up to seconds later."""
    done = {end.index for end in ends if end.words.exit_code == ExitCode.DONE}
    return len(done) == wanted


def _is_true(made: Object, kind: str) -> bool:
    return bool(condition(made, kind).get("status") == "True")


def _is_ending(batch_job: Object) -> bool:
    """Say whether it has failed, or is about to: also one that we stopped in its queue."""
    if was_cancelled(batch_job) or "deletionTimestamp" in batch_job["metadata"]:
        return True
    return _is_true(batch_job, "Failed") or _is_true(batch_job, "FailureTarget")


def _makes_no_more(batch_job: Object, num_ended: int, wanted: int) -> bool:
    """Say whether its controller will surely make no further pod.

    It makes none after it has decided to fail; before that it may not know yet of a pod that we
    have seen to fail, and still lack another one.
    """
    if _is_true(batch_job, "Failed") or num_ended >= wanted:
        return True
    is_idle = not batch_job.get("status", {}).get("active")
    if was_cancelled(batch_job) and batch_job["spec"].get("suspend"):
        return is_idle
    return is_idle and _is_true(batch_job, "FailureTarget")


def _why(batch_job: Object) -> str:
    """Return what the batch Job's own condition says."""
    if was_cancelled(batch_job):
        return "it was stopped before it had begun"
    for kind in ("Failed", "FailureTarget"):
        found = condition(batch_job, kind)
        if found.get("status") == "True":
            name = batch_job["metadata"]["name"]
            return f"Job {name} failed ({found.get('reason')}): {found.get('message', '')}"
    return f"Job {batch_job['metadata']['name']} is being deleted"
