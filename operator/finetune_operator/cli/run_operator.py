"""Run the operator for the one job of `ftctl run`, on an API in this process.

The API stores its objects in memory and the job in `job.json` of the run directory: every change of
the job is saved before the operator continues. A running attempt survives the end of the operator.
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
    """The job is stalled until the user fixes the cause."""


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
    """Run `job` until it is Complete, Failed or Suspended, and return it.

    A stop request returns at once if the attempt does not run on this machine; the attempt
    continues. A running attempt also survives the cancellation of this coroutine and the death of
    the process: the next call adopts it.

    Args:
        job: The result of `open_job`.
        folder: Run directory of the job, locked by the caller.
        context: Context of the backend.
        on_observation: Called with the job and the observation of its attempt, several times a
            second.
        stop: Stop requests of the user.
        then: The spec to set once the job is suspended, for changes that the API takes only then.
        command: Command of a node.

    Raises:
        StalledError: the user must fix a fault first.
        RunFolderError: the job's status cannot be saved.
    """
    async with aclosing(Operator(job, folder, context, command)) as operator:
        while True:
            if stop.asked.is_set() and operator.runs_on_this_machine:
                await operator.stop(job.spec, kills=stop.forced.is_set())
            job = await operator.read()
            if stop.asked.is_set() and not operator.runs_on_this_machine:
                return job
            # The status of an older spec, such as Suspended, is stale.
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
    """The API and the operator of one job, which run until `aclose`."""

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
        """Stop the operator and save the job."""
        self._work.cancel()
        await asyncio.wait({self._work})
        if not self._is_saved:
            self._folder.save(await self.read())

    async def read(self) -> FineTuneJob:
        """Return the job in its present state, or raise the error that ended the operator."""
        if self._work.done() and not self._work.cancelled():
            self._work.result()
        stored = await self._client.get(FINE_TUNE_JOBS, self._key.name, self._key.namespace)
        return FineTuneJob.model_validate(stored)

    async def observe(self, job: FineTuneJob) -> Observation | None:
        """Observe the attempt directly: progress in the status is less frequent and less detailed.

        The operator reconciles the job as well if the phase of the attempt has changed.
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
        """Suspend the job; `kills` shortens the grace, which leaves no time for a checkpoint."""
        changed: Object = {} if spec.suspend else {"suspend": True}
        if kills and spec.deadlines.termination_grace_seconds > 1:
            changed["deadlines"] = {"terminationGraceSeconds": 1}  # the minimum of the API
        if changed:
            change = {"spec": changed}
            await self._client.patch(FINE_TUNE_JOBS, self._key.name, self._key.namespace, change)

    async def change(self, spec: FineTuneJobSpec) -> None:
        """Replace the spec of the job."""
        job = (await self.read()).model_copy(update={"spec": spec})
        await self._client.replace(FINE_TUNE_JOBS, job.to_object(), self._key.namespace)

    def _save(self, obj: Object) -> None:
        if obj.get("kind") == KIND:
            self._is_saved = False
            self._folder.save(FineTuneJob.model_validate(obj))
            self._is_saved = True


def _store_of(job: FineTuneJob, profiles: Iterable[FineTuneProfile]) -> Store:
    """Return a store that holds the job, its namespace, the profiles, and their kinds.

    The job has the finalizer that the operator would add before the first attempt.
    """
    store = Store()
    for definition in (custom_resource_definition(), profile_definition()):
        store.put(store.kinds[str(CRDS)], definition)
    for one in profiles:
        profile = one.model_dump(by_alias=True, exclude_none=True, mode="json")
        profile["metadata"] = {"name": one.metadata.name}  # profiles have no namespace
        store.put(store.kinds[str(FINE_TUNE_PROFILES)], profile)
    store.put(store.kinds[str(NAMESPACES)], {"metadata": {"name": job.metadata.namespace}})
    obj = job.to_object()
    obj["metadata"].setdefault("creationTimestamp", timestamp())
    obj["metadata"].setdefault("finalizers", [FINALIZER])
    store.put(store.kinds[str(FINE_TUNE_JOBS)], obj)
    return store
