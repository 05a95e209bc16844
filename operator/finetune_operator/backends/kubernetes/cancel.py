"""Stop an attempt permanently, and leave its batch Job as the record.

The batch Job gets a deadline in the past: its controller ends all pods with their grace period and
creates no more. The name remains taken, so the same attempt is not started again. The deadline of a
suspended Job does not run, so it gets the condition FailureTarget instead. Its controller treats
that as its own decision to fail the Job, even if a queue or a user resumes it. A batch Job whose
trainers have all completed gets the condition SuccessCriteriaMet, and becomes Complete.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from finetune_operator.backends.kubernetes.child_names import (
    CANCELLED_ANNOTATION,
    COMPLETED_ANNOTATION,
    AttemptName,
)
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.finality import (
    GIVEN_UP,
    PASSED_DEADLINE_SECONDS,
    completion_of,
    is_ending,
)
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import PodFacts
from finetune_operator.kube.api_errors import ConflictError, InvalidError, NotFoundError
from finetune_operator.kube.resources import JOBS, PODS, Object
from finetune_trainer.config import Termination

MIN_GRACE_SECONDS = 1.0
"""With 0 the API server would delete the pod object while its processes may still write."""

_TOLERANCE = timedelta(seconds=2)  # smaller differences are not worth a request per pod


class Canceller:
    """Cancels attempts of one cluster; remembers the pods that it has deleted.

    Args:
        now: Returns the current time, with a time zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._ends: dict[str, dict[str, datetime]] = {}  # by attempt uid, then by pod uid

    async def cancel(
        self,
        children: Children,
        name: AttemptName,
        uid: str,
        until: datetime,
        completed: Termination | None = None,
    ) -> None:
        """Stop the attempt at this time; a later call can only set an earlier time.

        `completed` is the termination of an attempt whose trainers have all completed.

        Raises:
            ApiError: The API server refuses or does not respond.
        """
        batch_job = await children.batch_job(name)
        if batch_job is not None and batch_job["metadata"]["uid"] == uid:
            await end(children, batch_job, completed)
        pods = [pod for pod in await children.pods(name, uid) if judge(pod).holds_node]
        await self._hurry(children, pods, until, self._ends.setdefault(uid, {}))

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        self._ends.pop(uid, None)

    async def _hurry(
        self,
        children: Children,
        pods: Iterable[PodFacts],
        until: datetime,
        ends: dict[str, datetime],
    ) -> None:
        """Delete pods that would end later; the API server accepts only an earlier end."""
        now = self._now()
        for pod in pods:
            if ends.get(pod.uid, _own_end(pod, now)) <= until + _TOLERANCE:
                continue
            grace = max(MIN_GRACE_SECONDS, (until - now).total_seconds())
            try:
                await children.cluster.client.delete(
                    PODS, pod.name, pod.namespace, uid=pod.uid, grace_seconds=grace
                )
            except (ConflictError, NotFoundError):
                continue  # deleted in the meantime
            ends[pod.uid] = until


async def end(children: Children, batch_job: Object, completed: Termination | None = None) -> None:
    """End a batch Job; repeat if another client undid that before it took effect.

    Raises:
        ApiError: The API server refuses or does not respond.
    """
    is_recorded = completed is None or completion_of(batch_job) is not None
    if is_ending(batch_job) and is_recorded:
        return
    metadata = batch_job["metadata"]
    name = AttemptName.parse(f"{metadata['namespace']}/{metadata['name']}")
    uid, record = metadata["uid"], {}
    if completed is not None:
        record = {COMPLETED_ANNOTATION: completed.to_json()}
    try:
        if is_ending(batch_job):
            await _annotate(children, name, uid, record)
        elif batch_job["spec"].get("suspend") or completed is not None:
            await _end_by_condition(children, name, uid, record)
        else:
            await _set_passed_deadline(children, name, uid, record)
    except (ConflictError, InvalidError, NotFoundError):
        # Deleted, perhaps recreated by another client: the new object is not the attempt.
        there = await children.ask(name)
        if there is not None and there["metadata"]["uid"] == metadata["uid"]:
            raise


async def _end_by_condition(
    children: Children, name: AttemptName, uid: str, record: Object
) -> None:
    """End a completed or suspended batch Job, unless it has changed: a client may resume it."""
    there = await children.ask(name)
    if there is None or there["metadata"]["uid"] != uid or is_ending(there):
        return
    try:
        if record:
            await _set_condition(children, name, there, _SUCCESS, record)
            return
    except InvalidError:
        pass  # Kubernetes before 1.31 accepts this condition only with a success policy
    if there["spec"].get("suspend"):
        await _set_condition(children, name, there, _FAILURE, record)
    else:
        await _set_passed_deadline(children, name, uid, record)


_SUCCESS = {
    "type": "SuccessCriteriaMet",
    "status": "True",
    "reason": "TrainersCompleted",
    "message": "all trainers have completed; the finetune-operator ends the other containers",
}
_FAILURE = {
    "type": "FailureTarget",
    "status": "True",
    "reason": GIVEN_UP,
    "message": "the finetune-operator has ended this attempt; it never runs again",
}


async def _set_condition(
    children: Children, name: AttemptName, there: Object, wanted: Object, record: Object
) -> None:
    metadata, status = there["metadata"], there.get("status", {})
    kept = [one for one in status.get("conditions") or () if one["type"] != wanted["type"]]
    change: Object = {
        "metadata": {
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "annotations": record,
        },
        "status": {
            # The API server refuses the end of a Job that was never started.
            "startTime": status.get("startTime", metadata["creationTimestamp"]),
            "conditions": [*kept, wanted],
        },
    }
    client, place = children.cluster.client, (name.batch_job, name.namespace)
    children.note_response(await client.patch(JOBS, *place, change, subresource="status"))


async def _set_passed_deadline(
    children: Children, name: AttemptName, uid: str, record: Object
) -> None:
    annotations = {CANCELLED_ANNOTATION: "true", **record}
    deadline: Object = {"activeDeadlineSeconds": PASSED_DEADLINE_SECONDS}
    await _annotate(children, name, uid, annotations, spec=deadline)


async def _annotate(
    children: Children, name: AttemptName, uid: str, annotations: Object, **more: Object
) -> None:
    change: Object = {"metadata": {"uid": uid, "annotations": annotations}, **more}
    client = children.cluster.client
    children.note_response(await client.patch(JOBS, name.batch_job, name.namespace, change))


def _own_end(pod: PodFacts, now: datetime) -> datetime:
    """Return when the pod is killed, given that its controller has deleted it or deletes it now."""
    if pod.deleted:
        return datetime.fromisoformat(pod.deleted)
    if pod.grace_seconds is None:
        return datetime.max.replace(tzinfo=UTC)
    return now + timedelta(seconds=pod.grace_seconds)
