"""Stop the jobs of `ftctl dev` with it, and let them go on at its next start.

Ctrl-C is suspend, as in `ftctl run`: jobs are suspended and marked, so that those which a person
had suspended stay so. The mark is written in the same step, and outlives a crash.
"""

import asyncio
import signal
from collections.abc import Sequence

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.kernel.jobs import KnownJob, read_job
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import ConditionType, is_finished, is_true

SUSPENDED_BY = "finetune.dev/suspended-by"
"""Annotation of a job that was suspended only because its operator ended."""

_DEV = "ftctl-dev"
_LOOK_SECONDS = 0.2


class StopSignals:
    """What Ctrl-C or SIGTERM asked for; make it on the event loop.

    Attributes:
        asked: Stop with a checkpoint.
        forced: Kill what is still there.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._hit)

    def _hit(self) -> None:
        (self.forced if self.asked.is_set() else self.asked).set()


async def resume_all(client: KubeClient) -> None:
    """Let the jobs go on that were suspended because their operator ended."""
    for known in await _jobs(client):
        annotations = known.raw["metadata"].get("annotations") or {}
        if annotations.get(SUSPENDED_BY) == _DEV:
            await resume(client, key_of(known.raw))


async def resume(client: KubeClient, key: Key) -> None:
    """Let one job go on, whoever suspended it."""
    await _mark(client, key, suspend=False, mark=None)


async def suspend_all(client: KubeClient) -> Sequence[Key]:
    """Suspend every job of ours that is not over, and return those to wait for."""
    waited: list[Key] = []
    for known in await _jobs(client):
        key = key_of(known.raw)
        if not known.is_ours or is_finished(known.status):
            continue
        waited.append(key)
        if not _is_deleted(known) and not known.raw["spec"].get("suspend"):
            await _mark(client, key, suspend=True, mark=_DEV)
    return waited


async def until_stopped(client: KubeClient, keys: Sequence[Key]) -> None:
    """Return when nothing of these jobs runs, and their status says so."""
    left = set(keys)
    while left:
        known = {key_of(one.raw): one for one in await _jobs(client)}
        left = {key for key in left if key in known and not _is_stopped(known[key])}
        if left:
            await asyncio.sleep(_LOOK_SECONDS)


def _is_stopped(known: KnownJob) -> bool:
    status = known.status
    if _is_deleted(known):
        return False  # it goes when nothing of it runs
    if is_finished(status):
        return True
    if status.observed_generation < known.metadata.generation:
        return False
    return attempts.current(status) is None or _could_not_start(status)


def _is_deleted(known: KnownJob) -> bool:
    return "deletionTimestamp" in known.raw["metadata"]


def _could_not_start(status: FineTuneJobStatus) -> bool:
    return status.backend_ref is None and is_true(status, ConditionType.STALLED)


async def _jobs(client: KubeClient) -> list[KnownJob]:
    return [read_job(one) for one in (await client.list(FINE_TUNE_JOBS)).items]


async def _mark(client: KubeClient, key: Key, *, suspend: bool, mark: str | None) -> None:
    patch = {"metadata": {"annotations": {SUSPENDED_BY: mark}}, "spec": {"suspend": suspend}}
    try:
        await client.patch(FINE_TUNE_JOBS, key.name, key.namespace, patch)
    except NotFoundError:
        return  # deleted meanwhile
