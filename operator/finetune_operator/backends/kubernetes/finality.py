"""Whether a batch Job can ever create a pod again, even if a client resumes or edits it. Pure.

Only when it cannot, `observe` reports the attempt as ended and `predecessors` admits the next
attempt. Conditions of its controller are final: `Complete` and `Failed` cannot be reverted, and the
API server refuses to remove `FailureTarget`. Fields that merely pause a Job are not final:
`suspend`, `parallelism`, and `activeDeadlineSeconds`, which does not run while the Job is suspended
and starts again when it is resumed, so that pods would train for a second.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from finetune_operator.backends.kubernetes.child_names import (
    CANCELLED_ANNOTATION,
    COMPLETED_ANNOTATION,
)
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.resources import Object
from finetune_trainer.config import Termination

GIVEN_UP = "GivenUp"
"""Reason of the condition FailureTarget that the operator sets."""

PASSED_DEADLINE_SECONDS = 1


def condition(batch_job: Object, kind: str) -> Any:
    """Return the condition of that type, or an empty mapping if it is absent."""
    found = batch_job.get("status", {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})


def has(batch_job: Object, *kinds: str) -> bool:
    """Return whether any of these conditions is True."""
    return any(condition(batch_job, kind).get("status") == "True" for kind in kinds)


def is_final(batch_job: Object) -> bool:
    """Return whether the Job, and with it each of its pods, has ended."""
    return has(batch_job, "Complete", "Failed")


def has_decided(batch_job: Object) -> bool:
    """Return whether its controller will create no more pods and counts no active pod.

    The operator's own FailureTarget does not count, because the controller may be creating pods at
    that
    moment.
    """
    if is_final(batch_job):
        return True
    is_its_own = has(batch_job, "FailureTarget") and not was_given_up(batch_job)
    return is_its_own and not batch_job.get("status", {}).get("active")


def is_ending(batch_job: Object) -> bool:
    """Return whether the Job is already ending, so that no further write is needed."""
    if "deletionTimestamp" in batch_job["metadata"]:
        return True
    if is_final(batch_job) or has(batch_job, "FailureTarget", "SuccessCriteriaMet"):
        return True
    spec = batch_job["spec"]
    deadline = spec.get("activeDeadlineSeconds")
    return deadline == PASSED_DEADLINE_SECONDS and not spec.get("suspend")


def was_given_up(batch_job: Object) -> bool:
    """Return whether the operator ended the Job while it was suspended."""
    found = condition(batch_job, "FailureTarget")
    return bool(found.get("status") == "True" and found.get("reason") == GIVEN_UP)


def was_cancelled(batch_job: Object) -> bool:
    """Return whether the operator ended the Job."""
    annotations = batch_job["metadata"].get("annotations") or {}
    return CANCELLED_ANNOTATION in annotations or was_given_up(batch_job)


def completion_of(batch_job: Object) -> Termination | None:
    """Return the termination of a success that the operator has recorded; None without a record.

    The record counts more than the batch Job's conditions: before Kubernetes 1.31 such a Job fails.
    """
    text = (batch_job["metadata"].get("annotations") or {}).get(COMPLETED_ANNOTATION, "")
    try:
        return Termination.model_validate_json(text)
    except ValidationError:
        return None


def creates_no_more_pods(batch_job: Object, pods: Sequence[Verdict], wanted: int) -> bool:
    """Return whether its controller will certainly create no pod, given that none holds a node.

    This is up to a second earlier than `Failed` or `Complete`: once the controller has decided to
    fail the Job, or all its pods have ended by themselves and must be counted. Pods that were
    deleted,
    for instance because a client suspended the Job, may be uncounted and replaced.
    """
    if has_decided(batch_job):
        return True
    ended = [one for one in pods if not one.holds_node]
    counted = [one for one in ended if not one.pod.deleted]
    if len(ended) >= wanted:
        failed = any(one.counts_as_failed for one in counted)
        # With a higher limit, set by another client, the controller replaces failed pods.
        if failed and not batch_job["spec"].get("backoffLimit"):
            return True
        return not failed and len(counted) >= wanted
    return False
