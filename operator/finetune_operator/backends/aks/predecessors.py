"""What was before an attempt and must not run beside it: other attempts, and pods that are left.

Called before an attempt is created, or told to be absent; and with each look at one, as somebody
may have resumed the one before it. A pod that nothing ends is not ours to delete: it may be saving,
and somebody has cut it loose on purpose. So its job waits, and says what is to be deleted.
"""

from collections.abc import Sequence

from finetune_operator.backends.aks.cancel import end
from finetune_operator.backends.aks.children import Children
from finetune_operator.backends.aks.finality import has_decided
from finetune_operator.backends.aks.names import AttemptName, owner_of
from finetune_operator.backends.aks.pod_termination import is_alive
from finetune_operator.errors import AlreadyOwnedError, NotCreatedError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import JOBS, PODS, Object

_MOST_NAMED = 3
_EVERY_KIND = "jobs,pods,services,endpointslices,networkpolicies"


async def end_earlier(children: Children, name: AttemptName, job_uid: str) -> None:
    """Bring the job's earlier attempts into their end, as far as a cache tells of any.

    Raises:
        ApiError: the API server refuses, or does not answer.
    """
    if not children.cluster.cache(JOBS).is_synced:
        return
    for one in await children.other_batch_jobs(name, job_uid):
        place = f"{name.namespace}/{one['metadata']['name']}"
        if AttemptName.parse(place).number < name.number:
            await end(children, one)


async def _end_others(children: Children, name: AttemptName, job_uid: str) -> Object | None:
    """Bring the job's other attempts into their end; return one that may yet make a pod."""
    others = await children.other_batch_jobs(name, job_uid)
    living = [one for one in others if not has_decided(one)]
    for one in living:
        await end(children, one)
    return living[0] if living else None


async def make_way(children: Children, name: AttemptName, job_uid: str) -> None:
    """Refuse to go on beside another attempt that may run, or beside pods that do.

    Their batch Job may have been deleted while nobody looked; they still write the checkpoint.

    Raises:
        AlreadyOwnedError: there are pods that nothing ends.
        NotCreatedError: something is there that ends by itself.
        ApiError: the API server refuses, or does not answer.
    """
    living = await _end_others(children, name, job_uid)
    pods = [pod for pod in children.cluster.cache(PODS).of_job(name.key) if is_alive(pod)]
    if loose := [pod for pod in pods if _is_loose(children, pod)]:
        raise AlreadyOwnedError(_loose(name, job_uid, loose))
    if pods:
        raise NotCreatedError(
            f"pod {pods[0]['metadata']['name']} is still there, and two attempts must not write "
            "one checkpoint; waiting until it is gone"
        )
    if living is not None:
        raise NotCreatedError(
            f"Job {name.namespace}/{living['metadata']['name']} has not ended yet, and two "
            "attempts must not write one checkpoint; waiting until it has"
        )


def _is_loose(children: Children, pod: Object) -> bool:
    """Say whether nothing ends the pod: it belongs to nothing, or to a Job that belongs to nothing.

    A Job that is not there is no sign of that: its pods are collected, and a cache may be late.
    """
    if "deletionTimestamp" in pod["metadata"]:
        return False
    owner = owner_of(pod)
    if not owner:
        return True
    batch_job = _named(children, pod, owner.get("name", ""))
    if batch_job is None or batch_job["metadata"]["uid"] != owner["uid"]:
        return False
    return not owner_of(batch_job) and "deletionTimestamp" not in batch_job["metadata"]


def _loose(name: AttemptName, job_uid: str, pods: Sequence[Object]) -> str:
    """Return the sentence about pods that nothing ends, with what is to be deleted."""
    names = [f"pod/{pod['metadata']['name']}" for pod in pods]
    uids = {(pod["metadata"].get("labels") or {}).get(JOB_UID_LABEL, job_uid) for pod in pods}
    what = " ".join(names)
    if job_uid not in uids:  # everything that the job of this name before has left
        what = f"{_EVERY_KIND} -l '{JOB_UID_LABEL} in ({', '.join(sorted(uids))})'"
    told = ", ".join(names[:_MOST_NAMED])
    if (rest := len(names) - _MOST_NAMED) > 0:
        told += f" and {rest} more"
    is_one = len(names) == 1
    return (
        f"{told} still {'runs' if is_one else 'run'} and {'belongs' if is_one else 'belong'} to no "
        "FineTuneJob any more (an owner was deleted with --cascade=orphan), and two attempts must "
        f"not write one checkpoint; to go on, kubectl delete -n {name.namespace} {what}"
    )


def _named(children: Children, pod: Object, name: str) -> Object | None:
    return children.cluster.cache(JOBS).get(Key(pod["metadata"]["namespace"], name))
