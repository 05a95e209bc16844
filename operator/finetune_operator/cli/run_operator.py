"""The operator of `ftctl run`: that of a cluster, for one job, on an API of this process.

The API's objects are in memory, and the job is in `job.json` of its run directory: every change of
it is saved before the operator goes on. An attempt that runs when the operator ends keeps running.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from finetune_operator.api.crd import custom_resource_definition, profile_definition
from finetune_operator.api.v1alpha1 import KIND, FineTuneJob, FineTuneJobSpec, FineTuneProfile
from finetune_operator.backends import registry
from finetune_operator.backends.base import AttemptRef, Backend, BackendContext, Observation
from finetune_operator.backends.local.backend import TRAINER
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.folder_backend import FolderBackend
from finetune_operator.cli.stop_signals import StopSignals
from finetune_operator.embedded.store import Store, timestamp
from finetune_operator.embedded.store_client import EmbeddedClient
from finetune_operator.errors import FineTuneError, TransientError
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.cache import Key
from finetune_operator.kube.labels import FINALIZER
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    NAMESPACES,
    Object,
)
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, find, is_finished, is_settled

POLL_SECONDS = 0.2

OnObservation = Callable[[FineTuneJob, Observation | None], None]


class StalledError(FineTuneError):
    """The job does not go on until somebody fixes the cause."""


async def follow(
    job: FineTuneJob,
    folder: RunFolder,
    context: BackendContext,
    *,
    on_observation: OnObservation,
    stop: StopSignals,
    then: FineTuneJobSpec | None = None,
    command: Sequence[str] = TRAINER,
) -> FineTuneJob:
    """Run `job` until it is Complete, Failed or Suspended, and return it as it is then.

    A stop leaves an attempt running that does not run on this machine, and returns.
    Cancelling this coroutine, or killing the process, leaves a running attempt running: the next
    call adopts it.

    Args:
        job: As `open_job` returned it.
        folder: Its run directory, locked by the caller.
        context: What its backend is given.
        on_observation: Called with the job and the observation of its attempt, several times a
            second.
        stop: The user's requests to stop it.
        then: The spec to set once it is suspended, for changes that the API takes only then.
        command: What a node runs.

    Raises:
        StalledError: somebody must fix something first.
        RunFolderError: the job's status cannot be saved.
    """
    async with aclosing(Operator(job, folder, context, command)) as operator:
        while True:
            if stop.asked.is_set() and operator.runs_on_this_machine:
                await operator.stop(job.spec, kills=stop.forced.is_set())
            job = await operator.read()
            if stop.asked.is_set() and not operator.runs_on_this_machine:
                return job
            # A status of an older spec, such as Suspended, is not true any more.
            if is_finished(job.status) or job.status.observed_generation >= job.metadata.generation:
                on_observation(job, await operator.observe(job))
                if is_settled(job.status):
                    if then is None or stop.asked.is_set() or is_finished(job.status):
                        return job
                    await operator.change(then)
                    then = None
                elif operator.runs_on_this_machine or handle_of(job.status) is None:
                    _raise_if_stalled(job)
            await asyncio.sleep(POLL_SECONDS)


def _raise_if_stalled(job: FineTuneJob) -> None:
    found = find(job.status, ConditionType.STALLED)
    if found and found.status == "True":
        raise StalledError(found.message)


class Operator:
    """API and operator of one job, which work until `aclose`."""

    def __init__(
        self, job: FineTuneJob, folder: RunFolder, context: BackendContext, command: Sequence[str]
    ) -> None:
        self._key = Key(job.metadata.namespace, job.metadata.name)
        self._folder = folder
        self._name = job.spec.backend.type
        backend: Backend | type[Backend] = registry.load(self._name)
        self.runs_on_this_machine = backend.runs_on_this_machine
        if self._name == FolderBackend.name:
            backend = FolderBackend(context, command=command, held=folder)
        self._client = EmbeddedClient(_store_of(job, context.profiles.values()), self._save)
        settings = Settings(
            workers=1, leader_election=False, identity="ftctl-run", lease_namespace="default"
        )
        self._term = LeaderTerm(
            self._client,
            settings,
            backends={self._name: backend},
            folder=context.manifest_dir,
            listen=FollowedJobs,
        )
        self._work = asyncio.create_task(self._term.run())
        self._is_saved = True
        self._seen: Observation | None = None

    async def aclose(self) -> None:
        """End the operator and save the job."""
        self._work.cancel()
        await asyncio.wait({self._work})
        if not self._is_saved:
            self._folder.save(await self.read())

    async def read(self) -> FineTuneJob:
        """Return the job as it is now, or raise the error that ended the operator."""
        if self._work.done() and not self._work.cancelled():
            self._work.result()
        made = await self._client.get(FINE_TUNE_JOBS, self._key.name, self._key.namespace)
        return FineTuneJob.model_validate(made)

    async def observe(self, job: FineTuneJob) -> Observation | None:
        """Observe the attempt itself, as the status has progress less often and in less detail.

        The operator reconciles the job, too, where something has begun or ended.
        """
        handle, before = handle_of(job.status), self._seen
        if handle is None:
            return None
        ref = AttemptRef(self._key, job.metadata.uid, job.status.attempt, handle, job.spec)
        try:
            seen = self._seen = await self._term.observe(self._name, ref)
        except TransientError:
            return None
        if before is None or (before.phase, before.all_gone) != (seen.phase, seen.all_gone):
            self._term.wake(self._key)
        return seen

    async def stop(self, spec: FineTuneJobSpec, *, kills: bool) -> None:
        """Stop the attempt with a checkpoint, for which `kills` leaves no time; start no other."""
        asked: Object = {} if spec.suspend else {"suspend": True}
        if kills and spec.deadlines.termination_grace_seconds > 1:
            asked["deadlines"] = {"terminationGraceSeconds": 1}  # the least that the API takes
        if asked:
            change = {"spec": asked}
            await self._client.patch(FINE_TUNE_JOBS, self._key.name, self._key.namespace, change)

    async def change(self, spec: FineTuneJobSpec) -> None:
        """Make this the spec of the job."""
        job = (await self.read()).model_copy(update={"spec": spec})
        await self._client.replace(FINE_TUNE_JOBS, job.to_object(), self._key.namespace)

    def _save(self, made: Object) -> None:
        if made.get("kind") == KIND:
            self._is_saved = False
            self._folder.save(FineTuneJob.model_validate(made))
            self._is_saved = True


def _store_of(job: FineTuneJob, profiles: Iterable[FineTuneProfile]) -> Store:
    """Return a store with the job, its namespace, the profiles, and their kinds.

    The job has the finalizer that the operator would add before the first attempt.
    """
    store = Store()
    for definition in (custom_resource_definition(), profile_definition()):
        store.put(store.kinds[str(CRDS)], definition)
    for one in profiles:
        shown = one.model_dump(by_alias=True, exclude_none=True, mode="json")
        shown["metadata"] = {"name": one.metadata.name}  # profiles have no namespace
        store.put(store.kinds[str(FINE_TUNE_PROFILES)], shown)
    store.put(store.kinds[str(NAMESPACES)], {"metadata": {"name": job.metadata.namespace}})
    made = job.to_object()
    made["metadata"].setdefault("creationTimestamp", timestamp())
    made["metadata"].setdefault("finalizers", [FINALIZER])
    store.put(store.kinds[str(FINE_TUNE_JOBS)], made)
    return store
