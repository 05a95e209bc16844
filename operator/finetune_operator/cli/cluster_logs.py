"""What one rank of a job in a cluster said: its pod's log, or what was kept of one that is gone.

`ftctl logs` calls it. It reads with the user's own rights: FineTuneJobs, batch Jobs, pods and logs.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.backends import registry
from finetune_operator.backends.aks.names import BACKEND, AttemptName
from finetune_operator.backends.base import BackendContext, Handle
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.errors import NotFoundError
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, Object
from finetune_trainer.config import FailureClass


@dataclass(frozen=True)
class RankLog:
    """Which log is asked for.

    Attributes:
        previous: That of the attempt before the newest one.
        follow: Go on until the attempt ends.
    """

    rank: int
    previous: bool
    follow: bool


async def print_log(job: Key, wanted: RankLog) -> None:
    """Print the log of one rank of a job in the cluster that kubectl would ask.

    Raises:
        FineTuneError: there is no such job, attempt or batch Job, or the cluster cannot be asked.
    """
    async with await HttpClient.connect() as client:
        async for line in _lines(client, job, wanted):
            print(line, flush=True)


def attempt_number(job: str, status: FineTuneJobStatus, *, previous: bool) -> int:
    """Return which attempt's log is meant.

    `previous` is the one before the newest; the only one there is, if it has failed: what is
    looked for is why a job does not run any more.

    Raises:
        FineTuneError: there is no such attempt.
    """
    newest = status.attempt
    if not previous or newest > 1:
        return newest - int(previous)
    ends = {one.number: one.failure_class for one in status.attempts}
    if ends.get(newest) in (None, FailureClass.COMPLETED):
        raise FineTuneError(f"{job} has no attempt before the first; leave out --previous")
    return newest


async def _lines(client: HttpClient, job: Key, wanted: RankLog) -> AsyncIterator[str]:
    made = await _get_job(client, job)
    status = FineTuneJobStatus.model_validate(made.get("status") or {})
    if not status.attempt:
        said = next((one.message for one in status.conditions if one.type == "Ready"), "")
        raise FineTuneError(f"FineTuneJob {job} has no attempt yet ({said})")
    backend = made["spec"]["backend"]["type"]
    if backend != BACKEND:
        raise FineTuneError(
            f"FineTuneJob {job} runs on backend {backend}, whose logs are not in the cluster"
        )
    number = attempt_number(f"FineTuneJob {job}", status, previous=wanted.previous)
    name = AttemptName(job.namespace, job.name, number)
    context = BackendContext(Path(), cluster=Cluster(client, ObjectCache))
    handle = Handle("Job", str(name), await _uid(client, name, made["metadata"]["uid"]))
    async for line in registry.load(BACKEND)(context).logs(handle, wanted.rank, wanted.follow):
        yield line


async def _get_job(client: HttpClient, job: Key) -> Object:
    try:
        return await client.get(FINE_TUNE_JOBS, job.name, job.namespace)
    except NotFoundError as error:
        raise FineTuneError(
            f"there is no FineTuneJob {job} in {client.access.host}; kubectl get ftj -A lists them"
        ) from error


async def _uid(client: HttpClient, name: AttemptName, job_uid: str) -> str:
    """Return the uid of the attempt's batch Job."""
    try:
        there = await client.get(JOBS, name.batch_job, name.namespace)
    except NotFoundError:
        there = {"metadata": {}}
    owners = [one["uid"] for one in there["metadata"].get("ownerReferences") or ()]
    if job_uid not in owners:
        raise FineTuneError(
            f"Job {name} does not exist any more, and its logs went with it; the last two attempts "
            "are kept"
        )
    return str(there["metadata"]["uid"])
