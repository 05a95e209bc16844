"""The service as tests have it: a process of its own, driven over its standard input."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_service.answers import Json, Record
from azureml_service.faults import Fault
from azureml_service.resources import WORKSPACE

_END_SECONDS = 20.0


@dataclass(frozen=True)
class SeenJob:
    """A job as the service has it.

    Attributes:
        properties: As they were put.
        client: Client id of who put it.
        error: Message of the error; empty without one.
        starts: How many times its command was started.
        created: When it was created, in seconds.
        ended: When it ended; None where it has not.
        points: Every value of every metric, as it came.
        logs: Text of the log files, by path.
    """

    workspace: str
    name: str
    state: str
    properties: Json
    tags: dict[str, str]
    client: str
    error: str
    starts: int
    created: float
    ended: float | None
    points: list[Json]
    logs: dict[str, str]


class ServiceClient:
    """A service that runs; each verb is at once in effect.

    Args:
        process: The service.
        environ: What it told.
        root: Folder of its datastores and models.
    """

    def __init__(
        self, process: "subprocess.Popen[str]", environ: dict[str, str], root: Path
    ) -> None:
        self._process, self._environ, self._root = process, environ, root
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def environ(self) -> dict[str, str]:
        """Return the variables with which SDK and azure-identity find the service."""
        return dict(self._environ)

    def datastore(self, name: str, path: str = "") -> Path:
        """Return the folder of a path in a datastore."""
        return self._made(self._root / "datastores" / name / path)

    def model(self, name: str, version: str, *, registry: str | None = None) -> Path:
        """Return the folder of a registered model, of the workspace or of a registry."""
        owner = self._root / "registries" / registry if registry else self._root
        return self._made(owner / "models" / name / version)

    def requests(self, kind: str | None = None, *, forget: bool = False) -> list[Record]:
        """Return the requests that came, in order.

        Args:
            kind: Of which kind; such as "job.put".
            forget: Whether the next call tells only of later ones.
        """
        records = [Record(**one) for one in self._ask("requests", forget=forget)]
        return [one for one in records if kind in (None, one.kind)]

    def jobs(self) -> list[SeenJob]:
        """Return all jobs, the oldest first."""
        return [SeenJob(**one) for one in self._ask("jobs")]

    def job(self, name: str) -> SeenJob:
        """Return one job."""
        return SeenJob(**self._ask("job", name=name))

    def set_state(self, name: str, state: str, *, error: str | None = None) -> None:
        """Set the state of a job that runs nothing; another one leaves it again."""
        self._ask("set_state", name=name, state=state, error=error)

    def preempt(self, name: str, how: str = "failed") -> None:
        """Take a job's nodes away at once.

        Args:
            name: Of the job.
            how: "failed", or "requeued" where the service starts the same run again.
        """
        self._ask("preempt", name=name, how=how)

    def studio_cancel(self, name: str, by: str = "somebody@example.test") -> None:
        """Cancel a job as a person does."""
        self._ask("cancel", name=name, by=by)

    def log_batch(
        self, name: str, metrics: Sequence[Json] = (), tags: Mapping[str, str] | None = None
    ) -> None:
        """Log as a run does: metrics of `key`, `value`, `timestamp` (in ms) and `step`."""
        self._ask("log_batch", name=name, metrics=list(metrics), tags=dict(tags or {}))

    def set_log(self, name: str, text: str, path: str = "user_logs/std_log.txt") -> None:
        """Set the content of a log file."""
        self._ask("set_log", name=name, path=path, text=text)

    def compute(self, name: str, properties: Json | None, workspace: str | None = None) -> None:
        """Have a compute, as of `resources.amlcompute` or `kubernetes`; None for none."""
        self._ask("compute", name=name, properties=properties, workspace=workspace)

    def environments(self, *names: str) -> None:
        """Have these environments, each NAME/VERSION, and no others."""
        self._ask("names", kind="environments", names=names)

    def datastores(self, *names: str) -> None:
        """Have these datastores and no others."""
        self._ask("names", kind="datastores", names=names)

    def fault(self, kind: str, **what: Any) -> None:
        """Have a fault; the arguments are those of `Fault`."""
        self._ask("fault", **dataclasses.asdict(Fault(kind, **what)))

    def clear_faults(self) -> None:
        """Have none any more; what is delayed until then goes on."""
        self._ask("clear_faults")

    def settings(self, **changes: Any) -> None:
        """Change how jobs live; the arguments are those of `compute.Settings`."""
        self._ask("settings", **_plain(changes))

    def tokens(self, *, lifetime: float | None = None, revoke: bool = False) -> None:
        """Change how many seconds new tokens are good, or end all that were given."""
        self._ask("tokens", lifetime=lifetime, revoke=revoke)

    def problems(self) -> list[str]:
        """Return the tracebacks of errors in the service itself."""
        found: list[str] = self._ask("problems")
        return found

    def _ask(self, verb: str, **arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            print(json.dumps({"verb": verb, "arguments": arguments}), file=stdin, flush=True)
            answer = json.loads(stdout.readline())
        if "error" in answer:
            raise ValueError(f"{verb}: {answer['error']}")
        return answer["value"]

    def _made(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextmanager
def running_service(
    folder: Path,
    *,
    root: Path | None = None,
    workspaces: Sequence[str] = (WORKSPACE,),
    **settings: Any,
) -> Iterator[ServiceClient]:
    """Run the service until the block ends, and all processes of its jobs at most as long.

    Args:
        folder: For all that it writes.
        root: Of datastores and registered models; by default in `folder`.
        workspaces: ARM ids.
        settings: How jobs live, as `compute.Settings` has it.

    Raises:
        RuntimeError: the service had errors of its own.
    """
    place = root or folder / "azureml"
    for one in (folder, place):
        one.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "azureml_service", "--control", "--folder", str(folder)]
    command += ["--root", str(place), "--settings", json.dumps(_plain(settings))]
    command += [f"--workspace={one}" for one in workspaces]
    tests = str(Path(__file__).parents[1])
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    log = folder / "service.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env={**environ, "PYTHONPATH": tests},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    with process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise RuntimeError(f"the service did not start:\n{log.read_text()}")
            service = ServiceClient(process, json.loads(first), place)
            yield service
            problems = service.problems()
        finally:
            assert process.stdin is not None
            process.stdin.close()  # which ends it, also when a test process is killed
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    if problems:
        raise RuntimeError("the service had errors of its own:\n" + "\n".join(problems))


def _plain(settings: Mapping[str, Any]) -> Json:
    return {key: sorted(one) if isinstance(one, set) else one for key, one in settings.items()}
