"""A workspace of Azure ML that answers as a test says, for tests of who asks it and when."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptRef, Handle
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import BackendError
from finetune_operator.kube.cache import Key
from finetune_trainer.config import ContractModel
from support.azureml.azureml_looks import URL

WORKSPACE_ID = (
    "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
)
SIGNATURE = "sig=secret"


@dataclass
class ScriptedRun:
    """A job and its run.

    Attributes:
        details: What run history has besides state, tags and logs.
        logs: Content by path.
        mlflow: MLflow's word for the state, where it is not the usual one.
    """

    job: RawJob
    tags: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, bytes] = field(default_factory=dict)
    mlflow: str = ""

    def set_state(self, state: str) -> None:
        """Let it be in another state."""
        self.job = replace(self.job, status=state)

    def set_tag(self, name: str, value: ContractModel) -> None:
        """Let it have a tag."""
        self.tags[name] = value.model_dump_json(by_alias=True, exclude_none=True)


class ScriptedWorkspace(Workspace):
    """A workspace in memory.

    Attributes:
        runs: By name.
        requests: When each came, by the loop's clock, and what it asked for.
        errors: What is raised, by the kind of request; `*` for all.
    """

    def __init__(self, workspace_id: str = WORKSPACE_ID) -> None:
        self.id = workspace_id
        self.runs: dict[str, ScriptedRun] = {}
        self.requests: list[tuple[float, str]] = []
        self.errors: dict[str, Exception] = {}

    def add(self, name: str, state: str) -> ScriptedRun:
        """Let there be a job of two nodes."""
        outputs = {"checkpoints": "azureml://datastores/d/paths/c"}
        job_id = f"{self.id}/jobs/{name}"
        made = RawJob(job_id, name, state, {"finetune.uid": "uid-1"}, URL, None, 2, outputs)
        self.runs[name] = ScriptedRun(made)
        return self.runs[name]

    def ref(self, name: str, job_uid: str = "uid-1") -> AttemptRef:
        """Return the attempt of that name, of a job of the same name."""
        handle = Handle("AzureMLJob", f"{self.id}/jobs/{name}", job_uid, URL)
        return AttemptRef(Key("default", name), job_uid, 1, handle)

    def times(self, *kinds: str) -> list[float]:
        """Return when requests of these kinds came."""
        return [time for time, kind in self.requests if kind in kinds or not kinds]

    async def job(self, name: str, priority: Priority = Priority.READ) -> RawJob | None:
        self._note("job")
        run = self.runs.get(name)
        return run.job if run is not None else None

    async def get(
        self,
        path: str,
        params: dict[str, Any] | None = None,
        priority: Priority = Priority.READ,
    ) -> dict[str, Any]:
        if path.endswith("/mlflow/runs/get"):
            assert params is not None
            self._note("mlflow")
            run = self.runs[params["run_id"]]
            status = "RUNNING" if run.job.status == "Running" else "KILLED"
            tags = [{"key": key, "value": value} for key, value in run.tags.items()]
            return {"run": {"info": {"status": run.mlflow or status}, "data": {"tags": tags}}}
        assert path.endswith("/details")
        self._note("details")
        run = self.runs[path.split("/")[-2]]
        files = {path: f"https://blob.test/{run.job.name}/{path}?{SIGNATURE}" for path in run.logs}
        said = {"status": run.job.status, "tags": run.tags, "logFiles": files, **run.details}
        return dict(json.loads(json.dumps(said)))

    async def get_range(
        self, url: str, start: int, length: int, priority: Priority = Priority.READ
    ) -> bytes:
        self._note("log")
        address, _, signature = url.partition("?")
        assert signature == SIGNATURE
        name, _, path = address.removeprefix("https://blob.test/").partition("/")
        content = self.runs[name].logs[path]
        return content[start:] if start < 0 else content[start : start + length]

    def _note(self, kind: str) -> None:
        self.requests.append((asyncio.get_running_loop().time(), kind))
        error = self.errors.get(kind) or self.errors.get("*")
        if error is not None:
            raise error


def refused(text: str = "it is forbidden") -> BackendError:
    """Return the error of a request that is refused."""
    return BackendError(text)
