"""Read the log of one rank of a job in a cluster, from its pod or the stored tail of a deleted pod.

`ftctl logs` calls it. It reads FineTuneJobs, batch Jobs, pods and logs with the user's permissions,
and FineTuneProfiles for a backend that calls a service.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus, FineTuneProfile
from finetune_operator.backends import registry
from finetune_operator.backends.base import Attempt, AttemptRef, Backend, BackendContext
from finetune_operator.backends.hosting import HostedBackend
from finetune_operator.cli.top_cluster import get_job
from finetune_operator.errors import FineTuneError, NoLogYetError
from finetune_operator.kube.api_errors import ForbiddenError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, Object, Resource
from finetune_operator.kube.watch import Watch
from finetune_operator.reconcile.conditions import ConditionType, find, is_finished
from finetune_trainer.config import FailureClass

_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class RankLog:
    """Which log to print.

    Attributes:
        previous: Whether to print the log of the attempt before the newest one.
        follow: Whether to print new lines until the attempt ends.
    """

    rank: int
    previous: bool
    follow: bool


async def print_log(job: Key, wanted: RankLog, profiles: Mapping[str, FineTuneProfile]) -> None:
    """Print the log of one rank of a job in the cluster that kubectl uses.

    Args:
        job: The job.
        wanted: The rank and the attempt.
        profiles: Profiles by name; they take precedence over the cluster's profiles.

    Raises:
        FineTuneError: the job, attempt or batch Job does not exist, or the cluster cannot be
            reached.
    """
    async with await HttpClient.connect() as client:
        async for line in lines_in_cluster(client, job, wanted, profiles):
            print(line, flush=True)


def attempt_number(job: str, status: FineTuneJobStatus, *, previous: bool) -> int:
    """Return the number of the attempt whose log the user wants.

    `previous` means the attempt before the newest, or the only attempt if it has failed: the user
    wants to know why the job no longer runs.

    Raises:
        FineTuneError: no such attempt exists.
    """
    newest = status.attempt
    if not previous or newest > 1:
        return newest - int(previous)
    ends = {one.number: one.failure_class for one in status.attempts}
    if ends.get(newest) in (None, FailureClass.COMPLETED):
        raise FineTuneError(f"{job} has no attempt before the first; leave out --previous")
    return newest


async def lines_in_cluster(
    client: HttpClient, job: Key, wanted: RankLog, profiles: Mapping[str, FineTuneProfile]
) -> AsyncIterator[str]:
    """Yield the log of one rank; arguments and errors as in `print_log`."""

    async def read_job() -> FineTuneJob:
        return FineTuneJob.model_validate(await get_job(client, job))

    async def lines(stored: FineTuneJob) -> AsyncIterator[str]:
        kind = registry.load(stored.spec.backend.type)
        cluster = await cluster_for(kind, client, profiles)
        context = BackendContext(Path(), dict(os.environ), cluster)
        async for line in lines_of(kind(context), stored, wanted):
            yield line

    async for line in once_started(read_job, lines, follow=wanted.follow):
        yield line


async def once_started(
    read_job: Callable[[], Awaitable[FineTuneJob]],
    lines: Callable[[FineTuneJob], AsyncIterator[str]],
    *,
    follow: bool,
) -> AsyncIterator[str]:
    """Yield the lines of a job's log; `follow` waits until the job has one.

    The reason of the wait is printed to standard error, again if it changes.

    Args:
        read_job: Returns the present job.
        lines: Yields the log of a job with an attempt.
        follow: Whether to wait.

    Raises:
        FineTuneError: the job has no log yet; with `follow`, it has finished without one.
    """
    known = ""
    while True:
        job = await read_job()
        try:
            if not job.status.attempt:
                raise NoLogYetError("it has no attempt yet")
            async for line in lines(job):
                yield line
            return
        except NoLogYetError as error:
            reason = _waiting(job, error)
            if not follow or is_finished(job.status):
                raise FineTuneError(reason) from error
        if reason != known:
            print(reason, file=sys.stderr, flush=True)
            known = reason
        await asyncio.sleep(_POLL_SECONDS)


def _waiting(job: FineTuneJob, error: NoLogYetError) -> str:
    """Return why a job has no log: its phase, and reason and message of the condition Ready."""
    name, status = f"{job.metadata.namespace}/{job.metadata.name}", job.status
    ready = find(status, ConditionType.READY)
    why = f" ({ready.reason}): {ready.message}" if ready else ""
    return f"no log of FineTuneJob {name}: {error}; the job is {status.phase}{why}"


async def cluster_for(
    kind: type[Backend], client: KubeClient, profiles: Mapping[str, FineTuneProfile]
) -> Cluster:
    """Return a cluster with the caches that a backend needs to find an attempt.

    A backend that finds attempts in the cluster gets empty caches: it reads missing objects from
    the API server. Otherwise the caches hold the cluster-scoped kinds that the backend watches,
    such as profiles.

    Args:
        kind: Class of the backend.
        client: Client with the user's permissions.
        profiles: Profiles by name; they take precedence over the cluster's profiles.

    Raises:
        FineTuneError: the user may not read a kind.
    """
    caches: dict[Resource, ObjectCache] = {}
    for watch in () if kind.finds_from_cache else kind.watches:
        if watch.selector is None and not watch.resource.namespaced:
            given = profiles if watch.resource == FINE_TUNE_PROFILES else {}
            found = await _read(client, watch, given)
            caches[watch.resource] = ObjectCache(watch.resource)
            caches[watch.resource].replace(found.values(), "0")
    return Cluster(client, lambda resource: caches.setdefault(resource, ObjectCache(resource)))


async def _read(
    client: KubeClient, watch: Watch, given: Mapping[str, FineTuneProfile]
) -> dict[str, Object]:
    """Return the objects of a kind by name; `given` takes precedence."""
    try:
        listing = await client.list(watch.resource, trim=watch.trim)
        found = {one["metadata"]["name"]: one for one in listing.items}
    except ForbiddenError as error:
        if not given:
            remedy = "request permission to list them"
            if watch.resource == FINE_TUNE_PROFILES:
                remedy += ", or pass the job's profile with --profile FILE"
            what = f"{watch.resource.plural} of the cluster cannot be read"
            raise FineTuneError(f"the {what} ({error}); {remedy}") from error
        found = {}
    for name, profile in given.items():
        spec = profile.spec.model_dump(by_alias=True, exclude_none=True, mode="json")
        found[name] = {"metadata": {"name": name, "resourceVersion": "0"}, "spec": spec}
    return found


async def lines_of(backend: Backend, job: FineTuneJob, wanted: RankLog) -> AsyncIterator[str]:
    """Yield the log of one rank; the backend is started for it, without write access.

    Raises:
        FineTuneError: the attempt or log does not exist, or the backend fails.
    """
    name = f"FineTuneJob {job.metadata.namespace}/{job.metadata.name}"
    number = attempt_number(name, job.status, previous=wanted.previous)
    hosted = HostedBackend(job.spec.backend.type, backend, seconds_to_write=lambda: 0.0)
    try:
        ref = await _find_attempt(hosted, job, number)
        async for line in backend.logs(ref, wanted.rank, wanted.follow):
            yield line
    finally:
        await hosted.close()


async def _find_attempt(backend: HostedBackend, job: FineTuneJob, number: int) -> AttemptRef:
    # Without its status, the job has no known attempt, so `find` leaves conflicting objects alone.
    unopened = job.model_copy(update={"status": FineTuneJobStatus()})
    found = await backend.find(unopened, Attempt(number))
    key = Key(job.metadata.namespace, job.metadata.name)
    if found is None:
        raise FineTuneError(
            f"attempt {number} of FineTuneJob {key} was deleted, and its logs with it"
        )
    return AttemptRef(key, job.metadata.uid, number, found.handle, job.spec)
