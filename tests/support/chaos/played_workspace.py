"""A workspace of Azure ML in virtual time that acts by itself: its queue, nodes and trainers.

The backend is real except for its SDK: a `ScriptedWorkspace` responds to its requests.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.azureml.submit import handle_of, submit
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import Backend, BackendContext, Handle, Request
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, Object
from finetune_trainer.config import HEARD_TAG, PROGRESS_TAG, CheckpointRef, Heard, Phase, Progress
from support.azureml.azureml_cases import JOB, profile
from support.azureml.scripted_workspace import ScriptedRun, ScriptedWorkspace
from support.chaos.played_world import EVERY, LOAD_SECONDS, TOTAL_STEPS, PlayedWorld

START_SECONDS = 10
"""Time that a run waits for its nodes."""


class Service(ScriptedWorkspace):
    """The workspace; runs are created as the operator requests them."""

    async def create(self, job: Mapping[str, Any]) -> RawJob:
        """Create a job that waits for its nodes."""
        self._note("create")
        run = self.add(job["name"], "NotStarted")
        run.job = replace(run.job, tags=dict(job["tags"]))
        return run.job


class PlayedBackend(AzureMLBackend):
    """The backend with one workspace, whose compute is not checked.

    Args:
        service: The workspace.
    """

    def __init__(self, context: BackendContext, service: Service) -> None:
        super().__init__(context)
        self.service = service

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        """Accept every compute."""
        return []

    async def submit(self, request: Request) -> Handle:
        """Adopt the job of that name, or create it."""
        (command_job,) = request.objects
        job = await submit(self.service, command_job)
        self._poller.note(job)
        return handle_of(self.service, job)

    def _asked_as(self, workspace_id: str, name: str) -> Workspace:
        return self.service

    def _place_of(self, job: FineTuneJob) -> tuple[Workspace, Any]:
        return self.service, super()._place_of(job)[1]


class PlayedWorkspace(PlayedWorld):
    """A job in a workspace whose parts act by themselves.

    Attributes:
        has_nodes: The compute has nodes for the runs that wait.
        is_working: Nodes and service proceed; a fault stops them.
        starts: How often the newest run has started.
    """

    def __init__(self) -> None:
        self.service = Service()
        super().__init__()
        self.begin()
        self.has_nodes = self.is_working = True
        self.starts = 1
        self._run = ""
        self._waits = self._runs = self._resumed = 0

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator["PlayedWorkspace"]:
        """Yield a workspace; virtual time runs already."""
        world = cls()
        yield world
        await world.backends.close()

    def given(self, context: BackendContext) -> Mapping[str, Backend]:
        return {"azureml": PlayedBackend(context, self.service)}

    async def catch_up(self) -> None:
        await super().catch_up()
        listing = await self.api.list(FINE_TUNE_PROFILES)
        self.cache(FINE_TUNE_PROFILES).replace(listing.items, listing.resource_version)

    async def apply(self, **overrides: Any) -> None:
        spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
        profiles: Object = {"metadata": {"name": "default"}, "spec": spec}
        await self.api.create(FINE_TUNE_PROFILES, profiles)
        await super().apply(**{**JOB, **overrides})

    @property
    def run(self) -> ScriptedRun:
        """The newest run."""
        return self.service.runs[max(self.service.runs)]

    def fail_run(self, state: str, **details: Any) -> None:
        """Let the newest run be over in a state of Azure ML, with details of run history."""
        self.run.set_state(state)
        self.run.details = details

    async def act(self, step: int) -> None:
        """Let queue, nodes and trainer do their next step."""
        if not self.service.runs or not self.is_working:
            return
        run = self.run
        if run.job.name != self._run:
            self._run, self._waits, self.starts = run.job.name, 0, 1
        if run.job.status in ("NotStarted", "Queued"):
            run.set_state("Queued")
            self._runs = 0
            self._waits = self._waits + step if self.has_nodes else 0
            if self._waits >= START_SECONDS:
                self._waits = 0
                run.set_state("Running")
                self.lost_steps, self.step = self.step - self.saved, self.saved
                self._resumed = self.saved
        elif run.job.status == "Running":
            self._runs += step
            if self._runs > LOAD_SECONDS:
                before, self.step = self.step, self.step + step
                if before // EVERY != self.step // EVERY:
                    self.saved = self.step - self.step % EVERY
            run.set_tag(PROGRESS_TAG, self._progress())
            run.set_tag(HEARD_TAG, Heard(time=self.now.timestamp(), starts=self.starts))

    def _progress(self) -> Progress:
        ref = CheckpointRef(step=self.saved, path=f"/c/step-{self.saved}", time=0.0, world_size=2)
        return Progress(
            attempt=self.number,
            phase=Phase.TRAINING if self.step > self._resumed else Phase.STARTING,
            step=self.step,
            total_steps=TOTAL_STEPS,
            resumed_step=self._resumed or None,
            checkpoint=ref if self.saved else None,
            time=self.now.timestamp(),
        )
