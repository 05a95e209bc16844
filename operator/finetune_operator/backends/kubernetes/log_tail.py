"""Store the end of the root cause's log, because pods are deleted with their logs.

It becomes an annotation of the batch Job, once, as soon as the attempt has failed.
"""

import asyncio
import logging
from collections.abc import Sequence

from finetune_operator.backends.kubernetes.child_names import (
    CONTAINER,
    LOG_TAIL_ANNOTATION,
    AttemptName,
)
from finetune_operator.backends.kubernetes.children import Children
from finetune_operator.backends.kubernetes.finality import was_cancelled
from finetune_operator.backends.kubernetes.observe import root_cause
from finetune_operator.backends.kubernetes.pod_facts import PodFacts
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.api_errors import ApiError
from finetune_operator.kube.resources import JOBS, Object
from finetune_trainer.config import FailureClass, redact

log = logging.getLogger(__name__)

NUM_LINES = 50
_READ_SECONDS = 3.0  # the pod's node may be lost
_MAX_CHARACTERS = 16_384
_MAX_BYTES = 1 << 20  # read into memory; a single line may be as long as the log
_MOST_TRIES = 3


class LogTails:
    """Writes log tails in one cluster; counts failed writes."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}

    async def keep(
        self, children: Children, name: AttemptName, batch_job: Object, pods: Sequence[Verdict]
    ) -> None:
        """Write the log tail of the root cause, unless it is already written.

        If the log cannot be read, the reason is written instead.

        Raises:
            ApiError: The tail was not written, and a retry may succeed.
        """
        if kept_tail(batch_job) or was_cancelled(batch_job):
            return
        cause = root_cause(one for one in pods if not one.pod.is_gone)
        if cause is None or not _has_log(cause):
            return
        uid = batch_job["metadata"]["uid"]
        text = await _log_tail(children, cause.pod)
        change = {"metadata": {"uid": uid, "annotations": {LOG_TAIL_ANNOTATION: text}}}
        try:
            client = children.cluster.client
            children.note_response(await client.patch(JOBS, name.batch_job, name.namespace, change))
        except ApiError as error:
            self._failures[uid] = self._failures.get(uid, 0) + 1
            # The rest of the attempt is stopped only after this, and then there is no retry.
            if error.retryable and self._failures[uid] < _MOST_TRIES:
                raise
            log.warning("the log tail of %s is not stored (%s)", name, error)

    def forget(self, uid: str) -> None:
        """Drop the state of a finished attempt."""
        self._failures.pop(uid, None)


def _has_log(cause: Verdict) -> bool:
    """Whether the log is worth a read: the trainer ran, and was not preempted."""
    is_preempted = cause.end is not None and cause.end.failure_class is FailureClass.PREEMPTED
    return cause.pod.trainer.state == "terminated" and not is_preempted


async def _log_tail(children: Children, pod: PodFacts) -> str:
    client, name, namespace = children.cluster.client, pod.name, pod.namespace
    try:
        async with asyncio.timeout(_READ_SECONDS):
            lines = client.log(
                name, namespace, container=CONTAINER, tail=NUM_LINES, max_bytes=_MAX_BYTES
            )
            text = "\n".join([line async for line in lines])[-2 * _MAX_CHARACTERS :]
    except (ApiError, TimeoutError) as error:
        text = f"its log could not be read ({error or type(error).__name__})"
    # Everyone with the role view reads annotations, also without the right to read logs.
    return f"the last lines of pod {name}:\n{redact(text)[-_MAX_CHARACTERS:] or '(none)'}"


def kept_tail(batch_job: Object) -> list[str]:
    """Return the stored lines; empty if there are none."""
    annotations = batch_job["metadata"].get("annotations") or {}
    return str(annotations.get(LOG_TAIL_ANNOTATION, "")).splitlines()
