"""Whether a batch Job can ever create a pod again, even if somebody resumes or edits it. Pure.

Only when it cannot is an attempt over for `observe`, and does `predecessors` let the next one
start. Conditions of its controller are final: `Complete` and `Failed` cannot be reverted, and the
API server refuses to remove `FailureTarget`. Fields that only keep a Job from running are not:
`suspend`, `parallelism`, and `activeDeadlineSeconds`, which does not run while the Job is suspended
and starts again when it is resumed, so that pods would train for a second.
"""

from collections.abc import Sequence

from finetune_operator.backends.aks.child_names import CANCELLED_ANNOTATION
from finetune_operator.backends.aks.pod_termination import condition, is_alive
from finetune_operator.kube.resources import Object

GIVEN_UP = "GivenUp"
"""Reason of the condition FailureTarget where it is ours."""

PASSED_DEADLINE_SECONDS = 1


def has(batch_job: Object, *kinds: str) -> bool:
    """Say whether one of these conditions is True."""
    return any(condition(batch_job, kind).get("status") == "True" for kind in kinds)


def is_final(batch_job: Object) -> bool:
    """Say whether it has ended; its controller sets these conditions once every pod has ended."""
    return has(batch_job, "Complete", "Failed")


def has_decided(batch_job: Object) -> bool:
    """Say whether its controller has decided to create no more pods, and counts no active one.

    A FailureTarget of ours does not count, as the controller may be creating pods at that moment.
    """
    if is_final(batch_job):
        return True
    is_its_own = has(batch_job, "FailureTarget") and not was_given_up(batch_job)
    return is_its_own and not batch_job.get("status", {}).get("active")


def is_ending(batch_job: Object) -> bool:
    """Say whether it is ending already, so that no further write is needed."""
    if "deletionTimestamp" in batch_job["metadata"]:
        return True
    if is_final(batch_job) or has(batch_job, "FailureTarget", "SuccessCriteriaMet"):
        return True
    spec = batch_job["spec"]
    deadline = spec.get("activeDeadlineSeconds")
    return deadline == PASSED_DEADLINE_SECONDS and not spec.get("suspend")


def was_given_up(batch_job: Object) -> bool:
    """Say whether we ended it while it was suspended."""
    found = condition(batch_job, "FailureTarget")
    return bool(found.get("status") == "True" and found.get("reason") == GIVEN_UP)


def was_cancelled(batch_job: Object) -> bool:
    """Say whether we ended it."""
    annotations = batch_job["metadata"].get("annotations") or {}
    return CANCELLED_ANNOTATION in annotations or was_given_up(batch_job)


def makes_no_more(batch_job: Object, pods: Sequence[Object], wanted: int) -> bool:
    """Say whether its controller will certainly create no further pod, where none is alive.

    This is up to a second earlier than `Failed` or `Complete`: once the controller has decided to
    fail the Job, or all its pods have ended by themselves, which it must count. It may not have
    counted pods that were deleted, as when somebody suspends the Job, and may replace those.
    """
    if has_decided(batch_job):
        return True
    ended = [pod for pod in pods if not is_alive(pod)]
    counted = [pod for pod in ended if "deletionTimestamp" not in pod["metadata"]]
    if len(ended) >= wanted:
        failed = any(pod["status"]["phase"] == "Failed" for pod in counted)
        # With a higher limit, which somebody has set, the controller replaces failed pods.
        if failed and not batch_job["spec"].get("backoffLimit"):
            return True
        return not failed and len(counted) >= wanted
    return False
