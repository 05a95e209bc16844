"""Whether a batch Job can ever make a pod again, whoever resumes or edits it. Pure.

`observe` calls an attempt over, and `predecessors` lets the next one start, only when it cannot.
What makes it so is the controller's own word: `Complete` and `Failed` cannot be taken back, and the
API server refuses to remove `FailureTarget`. What merely keeps a Job from running can be undone:
`suspend`, `parallelism`, and `activeDeadlineSeconds`, which does not run while it is suspended and
begins anew when it is resumed, so that pods would train for a second.
"""

from collections.abc import Sequence

from finetune_operator.backends.aks.names import CANCELLED_ANNOTATION
from finetune_operator.backends.aks.pod_termination import condition, is_alive
from finetune_operator.kube.resources import Object

GIVEN_UP = "GivenUp"
"""Reason of the condition FailureTarget where it is ours."""

PASSED_DEADLINE_SECONDS = 1


def has(batch_job: Object, *kinds: str) -> bool:
    """Say whether one of these conditions is True."""
    return any(condition(batch_job, kind).get("status") == "True" for kind in kinds)


def is_final(batch_job: Object) -> bool:
    """Say whether it has ended, which its controller says once every pod of it has."""
    return has(batch_job, "Complete", "Failed")


def has_decided(batch_job: Object) -> bool:
    """Say whether its controller has decided that no further pod comes, and counts none that lives.

    Where we have set FailureTarget it may be making pods just then, so only its own word counts.
    """
    if is_final(batch_job):
        return True
    is_its_own = has(batch_job, "FailureTarget") and not was_given_up(batch_job)
    return is_its_own and not batch_job.get("status", {}).get("active")


def is_ending(batch_job: Object) -> bool:
    """Say whether it ends without anybody's doing: nothing is left to be told to it."""
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
    """Say whether its controller will surely make no further pod, where no pod of it lives.

    `Failed` and `Complete` alone come up to a second later than what they follow from: the
    controller's own decision to fail it, or pods that all ended by themselves, each of which it has
    to count. Those that were told to leave it may have let go uncounted, as it does when somebody
    suspends a Job, and would make anew.
    """
    if has_decided(batch_job):
        return True
    ended = [pod for pod in pods if not is_alive(pod)]
    counted = [pod for pod in ended if "deletionTimestamp" not in pod["metadata"]]
    if len(ended) >= wanted:
        failed = any(pod["status"]["phase"] == "Failed" for pod in counted)
        # Who raises the limit of an attempt lets its controller replace what has failed.
        if failed and not batch_job["spec"].get("backoffLimit"):
            return True
        return not failed and len(counted) >= wanted
    return False
