"""End what must not run beside an attempt: other attempts, and orphaned pods.

Called before an attempt is created or reported absent, and with each observation of one, because a
client may resume an earlier attempt. The operator does not delete an orphaned pod, because the pod
may be saving and a user has orphaned it on purpose. The job waits, with a message that names the
pods to delete.
"""

from collections.abc import Sequence
from contextlib import suppress

from finetune_operator.backends.kubernetes.cancel import end
from finetune_operator.backends.kubernetes.child_names import QUEUE_LABEL, AttemptName, owner_of
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.finality import has_decided, is_final
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import PodFacts
from finetune_operator.backends.kubernetes.silent_nodes import warning_about
from finetune_operator.backends.kubernetes.verdict import PodState
from finetune_operator.errors import AlreadyOwnedError, NotCreatedError
from finetune_operator.kube.api_errors import ConflictError, NotFoundError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import JOBS, Object

_MOST_NAMED = 3
_EVERY_KIND = "jobs,pods,services,endpointslices,networkpolicies"


async def end_earlier(children: Children, name: AttemptName, job_uid: str) -> None:
    """End the job's earlier attempts that are in the cache.

    Raises:
        ApiError: The API server refuses or does not respond.
    """
    if not children.cluster.cache(JOBS).is_synced:
        return
    for one in await children.other_batch_jobs(name, job_uid):
        earlier = AttemptName.parse(f"{name.namespace}/{one['metadata']['name']}")
        if earlier.number < name.number:
            await end(children, one)
            await _release_quota(children, earlier, one)


async def _release_quota(children: Children, name: AttemptName, batch_job: Object) -> None:
    """Delete a queued batch Job with a lost pod.

    Kueue releases its quota when the Job is Failed or deleted, and the Job becomes Failed only when
    the pod is gone.
    """
    metadata = batch_job["metadata"]
    if QUEUE_LABEL not in (metadata.get("labels") or {}) or "deletionTimestamp" in metadata:
        return
    pods = map(judge, await children.pods(name, metadata["uid"]))
    if is_final(batch_job) or not any(one.state is PodState.LOST for one in pods):
        return
    with suppress(ConflictError, NotFoundError):  # deleted in the meantime
        await children.cluster.client.delete(
            JOBS, name.batch_job, name.namespace, uid=metadata["uid"]
        )


async def _end_others(children: Children, name: AttemptName, job_uid: str) -> Object | None:
    """End the job's other attempts; return an attempt that may still create a pod, or None."""
    others = await children.other_batch_jobs(name, job_uid)
    living = [one for one in others if not has_decided(one)]
    for one in living:
        await end(children, one)
    return living[0] if living else None


async def make_way(children: Children, name: AttemptName, job_uid: str) -> None:
    """End the job's other attempts, and raise while another attempt or a pod may still run.

    Pods of a batch Job that was deleted in the meantime still write the checkpoint.

    Raises:
        AlreadyOwnedError: There are orphaned pods, which no controller ends.
        NotCreatedError: An object is in the way that ends by itself.
        ApiError: The API server refuses or does not respond.
    """
    living = await _end_others(children, name, job_uid)
    pods = [one for one in map(judge, children.cached_pods(name.key)) if one.may_write]
    if orphans := [one.pod for one in pods if _is_orphan(children, one.pod)]:
        raise AlreadyOwnedError(_about_orphans(name, job_uid, orphans))
    if pods:
        text = (
            f"pod {pods[0].pod.name} still exists, and two attempts must not write one "
            "checkpoint; waiting until it has ended"
        )
        warning = warning_about(pods)
        raise NotCreatedError(f"{text}; {warning}" if warning else text)
    if living is not None:
        raise NotCreatedError(
            f"Job {name.namespace}/{living['metadata']['name']} has not ended yet, and two "
            "attempts must not write one checkpoint; waiting until it has"
        )


def _is_orphan(children: Children, pod: PodFacts) -> bool:
    """Return whether no controller ends the pod: it has no owner, or a Job without an owner.

    A deleted Job is no proof: its pods are garbage-collected, and a cache may be late.
    """
    if pod.deleted:
        return False
    if not pod.owner_uid:
        return True
    batch_job = children.cluster.cache(JOBS).get(Key(pod.namespace, pod.owner_name))
    if batch_job is None or batch_job["metadata"]["uid"] != pod.owner_uid:
        return False
    return not owner_of(batch_job) and "deletionTimestamp" not in batch_job["metadata"]


def _about_orphans(name: AttemptName, job_uid: str, pods: Sequence[PodFacts]) -> str:
    """Return the sentence about orphaned pods, with the command that deletes them."""
    names = [f"pod/{pod.name}" for pod in pods]
    uids = {pod.job_uid or job_uid for pod in pods}
    what = " ".join(names)
    if job_uid not in uids:  # all objects left of the earlier job of this name
        what = f"{_EVERY_KIND} -l '{JOB_UID_LABEL} in ({', '.join(sorted(uids))})'"
    shown = ", ".join(names[:_MOST_NAMED])
    if (rest := len(names) - _MOST_NAMED) > 0:
        shown += f" and {rest} more"
    state = "runs and belongs" if len(names) == 1 else "run and belong"
    return (
        f"{shown} still {state} to no FineTuneJob (an owner was deleted with "
        "--cascade=orphan), and two attempts must not write one checkpoint; to continue, kubectl "
        f"delete -n {name.namespace} {what}"
    )
