"""The jobs of all workspaces, as Azure Resource Manager shows and takes them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from azureml_service.answers import Answer, Json, bad, missing
from azureml_service.bodies import check_job
from azureml_service.resources import Workspace

TERMINAL = frozenset({"Completed", "Failed", "Canceled"})
_MUTABLE = ("description", "tags", "displayName", "properties", "isArchived")
_PAGE = 50

PREEMPTED = (
    "AzureMLCompute job failed.\nPreemptionError: Nodes of this job got pre-empted. Check if the "
    "run has failed or restarted"
)


@dataclass
class Point:
    """One value of a metric; `timestamp` in milliseconds."""

    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class Job:
    """A job; whoever looks at it or changes it holds the lock of `Jobs`.

    Attributes:
        properties: As they were put.
        created_by: Client id of who put it.
        changed_by: Who last asked for something, as Azure tells it: a client id or a user's name.
        error: Code and message, of one that has failed.
        is_cancelled: Whether a cancel was accepted that has an effect.
        preemption: "failed" or "requeued" while it loses its nodes.
        starts: How many times the service has started it.
        revision: How many states it has had.
        points: Values of metrics, as they came.
        parameters: As MLflow calls them.
        logs: Content of the log files, by path.
    """

    workspace: Workspace
    name: str
    properties: Json
    created_by: str
    state: str = "NotStarted"
    changed_by: str = ""
    error: tuple[str, str] | None = None
    is_cancelled: bool = False
    preemption: str = ""
    starts: int = 0
    revision: int = 0
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: datetime | None = None
    ended: datetime | None = None
    points: list[Point] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    logs: dict[str, Callable[[], bytes]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """ARM id."""
        return f"{self.workspace.id}/jobs/{self.name}"

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the job, which are those of its run as well."""
        found: dict[str, str] = self.properties["tags"]
        return found

    @property
    def has_ended(self) -> bool:
        """Whether its state stays for ever."""
        return self.state in TERMINAL

    @property
    def studio_url(self) -> str:
        """Where people look at it."""
        workspace = quote(self.workspace.id, safe="/")
        return f"https://ml.azure.com/runs/{self.name}?wsid={workspace}"

    def body(self, base: str) -> Json:
        """Return it as ARM shows it."""
        tracking = f"azureml://{base.removeprefix('https://')}/mlflow/v1.0{self.workspace.id}"
        endpoints = {"Tracking": f"{tracking}?", "Studio": self.studio_url}
        outputs = {
            "default": {
                "jobOutputType": "uri_folder",
                "mode": "ReadWriteMount",
                "uri": "azureml://datastores/workspaceartifactstore"
                f"/ExperimentRun/dcid.{self.name}",
            },
            **(self.properties.get("outputs") or {}),
        }
        shown = {
            "displayName": self.name,
            "isArchived": False,
            "services": {
                kind: {"endpoint": url, "jobServiceType": kind, "port": None, "status": None}
                for kind, url in endpoints.items()
            },
            **{key: value for key, value in self.properties.items() if value is not None},
            "outputs": outputs,
            "status": self.state,
        }
        return {
            "id": self.id,
            "name": self.name,
            "type": "Microsoft.MachineLearningServices/workspaces/jobs",
            "properties": shown,
            "systemData": {
                "createdAt": self.created.isoformat(),
                "createdBy": self.created_by,
                "createdByType": "Application",
                "lastModifiedBy": self.changed_by or self.created_by,
            },
        }


class Jobs:
    """All jobs.

    Args:
        base: URL of the service.

    Attributes:
        changed: Held by whoever looks at jobs or changes them; told of each change.
        on_put: Told of each new job, under the lock.
        on_cancel: Told of each cancel that was accepted, under the lock.
    """

    def __init__(self, base: str) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.on_put: Callable[[Job], None] = lambda job: None
        self.on_cancel: Callable[[Job], None] = lambda job: None
        self._base = base
        self._jobs: dict[tuple[str, str], Job] = {}
        self._named: dict[str, Job] = {}

    def all(self) -> list[Job]:
        """Return all jobs, the oldest first."""
        return list(self._jobs.values())

    def named(self, name: str) -> Job:
        """Return the job of that name in any workspace.

        Raises:
            RefusalError: there is none.
        """
        if name not in self._named:
            raise missing(f"Job {name}")
        return self._named[name]

    def find(self, workspace: Workspace, name: str) -> Job:
        """Return the job of that name.

        Raises:
            RefusalError: there is none.
        """
        job = self._jobs.get((workspace.id, name))
        if job is None:
            raise missing(f"Job {name}")
        return job

    def set_state(self, job: Job, state: str, *, error: tuple[str, str] | None = None) -> None:
        """Change the state of a job, and tell who waits for that."""
        with self.changed:
            job.state, job.error = state, error
            job.revision += 1
            if state == "Running":
                job.started = job.started or datetime.now(UTC)
            job.ended = datetime.now(UTC) if job.has_ended else None
            self.changed.notify_all()

    def put(self, workspace: Workspace, name: str, body: object, client: str) -> Answer:
        """Create a job, or change the little of it that can be changed.

        Raises:
            RefusalError: the body is not that of a job, or of another job than has the name.
        """
        properties = check_job(name, body)  # without the lock: the first one imports the models
        properties["tags"] = properties.get("tags") or {}
        with self.changed:
            job = self._jobs.get((workspace.id, name))
            if job is not None:
                self._change(job, properties)
                return Answer(job.body(self._base))
            compute = (properties.get("computeId") or "").rpartition("/")[2]
            if compute and compute not in workspace.computes:
                raise bad(f"Unknown compute target '{compute}'.", "BadArgument")
            job = Job(workspace, name, properties, client)
            self._jobs[(workspace.id, name)] = self._named[name] = job
            self.on_put(job)
            self.changed.notify_all()
            return Answer(job.body(self._base), 201)

    def _change(self, job: Job, properties: Json) -> None:
        for key in properties.keys() | job.properties.keys():
            if key not in _MUTABLE and properties.get(key) != job.properties.get(key):
                field_ = key[0].upper() + key[1:]
                raise bad(
                    "A job with this name already exists. If you are trying to create a new job, "
                    "use a different name. If you are trying to update an existing job, the "
                    f"existing job's {field_} cannot be changed. Only description, tags, "
                    "displayName, properties, and isArchived can be updated.",
                    "Immutable",
                    "JobPropertyImmutable",
                )
        tags = {**job.tags, **properties["tags"]}
        job.properties = {**properties, "tags": tags}

    def get(self, workspace: Workspace, name: str) -> Answer:
        """Show a job."""
        with self.changed:
            return Answer(self.find(workspace, name).body(self._base))

    def list(self, workspace: Workspace, query: dict[str, str]) -> Answer:
        """Show all jobs of a workspace, a page at a time, the newest first."""
        with self.changed:
            found = [job for job in reversed(self._jobs.values()) if job.workspace is workspace]
            tag, _, value = query.get("tag", "").partition("=")
            found = [job for job in found if not tag or job.tags.get(tag) == value]
            first = int(query.get("$skip", "0"))
            page = [job.body(self._base) for job in found[first : first + _PAGE]]
        answer: Json = {"value": page}
        if first + _PAGE < len(found):
            next_query = {**query, "$skip": str(first + _PAGE)}
            text = "&".join(f"{key}={quote(one)}" for key, one in next_query.items())
            answer["nextLink"] = f"{self._base}{workspace.id}/jobs?{text}"
        return Answer(answer)

    def cancel(self, workspace: Workspace, name: str, by: str) -> Answer:
        """Accept a cancel.

        Raises:
            RefusalError: there is no such job, or it cannot be cancelled any more.
        """
        with self.changed:
            job = self.find(workspace, name)
            if job.has_ended or job.state == "Finalizing":
                raise bad(f"Job {name} is in state {job.state} and cannot be canceled.")
            job.changed_by = by
            self.on_cancel(job)
        result = f"{self._base}{workspace.id}/mfeOperationResults/{name}"
        headers = {"Location": f"{result}?api-version=2023-04-01-preview", "Retry-After": "1"}
        return Answer(None, 202, headers)

    def cancel_result(self, workspace: Workspace, name: str) -> Answer:
        """Say whether a cancel has had its effect."""
        with self.changed:
            ended = self.find(workspace, name).has_ended
        return Answer(None, 200) if ended else Answer(None, 202, {"Retry-After": "1"})


def milliseconds(moment: datetime | None) -> int | None:
    """Return a time as MLflow has it."""
    return None if moment is None else int(moment.timestamp() * 1000)
