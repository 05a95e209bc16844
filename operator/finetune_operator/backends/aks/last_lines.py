"""Keep the last lines of a failed attempt's guilty pod, as pods and their logs do not last.

They go onto the batch Job, once, as soon as the attempt is seen to have failed.
"""

import asyncio
import logging
from collections.abc import Sequence

from finetune_operator.backends.aks.children import Children
from finetune_operator.backends.aks.names import CONTAINER, LAST_LINES_ANNOTATION, AttemptName
from finetune_operator.backends.aks.observe import guilty_pod
from finetune_operator.backends.aks.reasons import was_cancelled
from finetune_operator.backends.aks.words import end_of
from finetune_operator.kube.errors import ApiError
from finetune_operator.kube.resources import JOBS, Object
from finetune_trainer.config import ExitCode

log = logging.getLogger(__name__)

NUM_LINES = 50
_READ_SECONDS = 3.0  # its node may be lost
_MAX_CHARACTERS = 16_384


async def keep_last_lines(
    children: Children, name: AttemptName, batch_job: Object, pods: Sequence[Object]
) -> None:
    """Write down what the guilty pod said last, unless that was done.

    A log that cannot be read is no reason to hold the attempt up: that is written down instead.
    """
    if kept_lines(batch_job) or was_cancelled(batch_job):
        return
    pod = guilty_pod(pods)
    if pod is None or end_of(pod).words.exit_code == ExitCode.PREEMPTED:
        return  # it never ran, or was told to stop
    client, pod_name = children.cluster.client, pod["metadata"]["name"]
    try:
        async with asyncio.timeout(_READ_SECONDS):
            lines = client.log(pod_name, name.namespace, container=CONTAINER, tail=NUM_LINES)
            said = "\n".join([line async for line in lines])[-_MAX_CHARACTERS:]
    except (ApiError, TimeoutError) as error:
        said = f"its log could not be read ({error or type(error).__name__})"
    text = f"the last lines of pod {pod_name}:\n{said or '(none)'}"
    metadata = {
        "uid": batch_job["metadata"]["uid"],
        "annotations": {LAST_LINES_ANNOTATION: text},
    }
    try:
        change = {"metadata": metadata}
        children.note(await client.patch(JOBS, name.batch_job, name.namespace, change))
    except ApiError as error:
        log.warning("the last lines of %s are not kept (%s)", name, error)


def kept_lines(batch_job: Object) -> list[str]:
    """Return what was kept; empty if nothing was."""
    annotations = batch_job["metadata"].get("annotations") or {}
    return str(annotations.get(LAST_LINES_ANNOTATION, "")).splitlines()
