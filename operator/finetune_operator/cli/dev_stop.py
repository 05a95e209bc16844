"""Stop the jobs of `ftctl dev` when it ends, and resume them when it starts again.

Ctrl-C suspends jobs, as in `ftctl run`. The same write marks them. The next start, even after a
crash, resumes the marked jobs only, so a job that a person suspended stays suspended.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress

from finetune_operator.kernel.jobs import JobView, read_job
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, is_finished, is_true

SUSPENDED_BY = "finetune.dev/suspended-by"
"""Annotation of a job that was suspended only because its operator stopped."""

_DEV = "ftctl-dev"
_POLL_SECONDS = 0.2


async def resume_all(client: KubeClient) -> None:
    """Resume the jobs that were suspended because their operator stopped."""
    for known in await _jobs(client):
        annotations = known.raw["metadata"].get("annotations") or {}
        if annotations.get(SUSPENDED_BY) == _DEV:
            await _suspend(client, key_of(known.raw), suspend=False)


async def running_elsewhere(client: KubeClient, here: Collection[str]) -> list[str]:
    """Return the names of jobs with an open attempt of a backend that is not in `here`."""
    return [
        str(key_of(known.raw))
        for known in await _jobs(client)
        if known.backend not in here and attempts.current(known.status) is not None
    ]


async def stop_all(client: KubeClient, here: Collection[str]) -> None:
    """Suspend the jobs of the backends in `here`, and wait until their attempts have ended."""
    while running := [
        known for known in await _jobs(client) if known.backend in here and not _is_stopped(known)
    ]:
        for known in running:
            if not _is_deleted(known) and not known.raw["spec"].get("suspend"):
                await _suspend(client, key_of(known.raw), suspend=True)
        await asyncio.sleep(_POLL_SECONDS)


def _is_stopped(known: JobView) -> bool:
    status = known.status
    if not known.is_ours:
        return True
    if _is_deleted(known):
        return False  # it is removed when all its processes have ended
    if is_finished(status):
        return True
    if not known.raw["spec"].get("suspend"):
        return False
    if status.observed_generation < known.metadata.generation:
        return False
    # A Suspended job with an open attempt: the attempt was never created.
    return attempts.current(status) is None or is_true(status, ConditionType.SUSPENDED)


def _is_deleted(known: JobView) -> bool:
    return "deletionTimestamp" in known.raw["metadata"]


async def _jobs(client: KubeClient) -> list[JobView]:
    return [read_job(one) for one in (await client.list(FINE_TUNE_JOBS)).items]


async def _suspend(client: KubeClient, key: Key, *, suspend: bool) -> None:
    annotations = {SUSPENDED_BY: _DEV if suspend else None}
    patch = {"metadata": {"annotations": annotations}, "spec": {"suspend": suspend}}
    with suppress(NotFoundError):  # deleted meanwhile
        await client.patch(FINE_TUNE_JOBS, key.name, key.namespace, patch)
