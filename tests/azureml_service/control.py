"""What a test may ask of the service beside Azure's own interface; the verbs of `client`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from azureml_service.answers import Json
from azureml_service.compute import Settings
from azureml_service.faults import Fault
from azureml_service.jobs import Job, Point
from azureml_service.server import Service


class Control:
    """Carries out what a test asks: one line of JSON is a verb, and the answer is another.

    Args:
        service: Of which.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._jobs = service, service.jobs

    def serve(self, lines: Iterable[str], out: TextIO) -> None:
        """Answer each line until there are no more."""
        for line in lines:
            asked = json.loads(line)
            try:
                answer = {"value": getattr(self, f"do_{asked['verb']}")(**asked["arguments"])}
            except Exception as error:  # the test that asked raises it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=out, flush=True)

    def do_requests(self, forget: bool) -> list[Json]:
        """Return what came, in order."""
        records = self._service.records
        taken = records[:]
        if forget:
            del records[: len(taken)]
        return [dataclasses.asdict(one) for one in taken]

    def do_problems(self) -> list[str]:
        """Return the tracebacks of the service itself."""
        return self._service.problems

    def do_jobs(self) -> list[Json]:
        """Return all jobs, the oldest first."""
        with self._jobs.changed:
            return [_seen(job) for job in self._jobs.all()]

    def do_job(self, name: str) -> Json:
        """Return one job."""
        with self._jobs.changed:
            return _seen(self._jobs.named(name))

    def do_set_state(self, name: str, state: str, error: str | None) -> None:
        """Set the state of a job that runs nothing."""
        with self._jobs.changed:
            job = self._jobs.named(name)
            self._jobs.set_state(job, state, error=("UserError", error) if error else None)

    def do_preempt(self, name: str, how: str) -> None:
        """Take a job's nodes away."""
        with self._jobs.changed:
            self._service.compute.preempt(self._jobs.named(name), how)

    def do_cancel(self, name: str, by: str) -> None:
        """Cancel a job as somebody in Studio."""
        with self._jobs.changed:
            self._jobs.cancel(self._jobs.named(name).workspace, name, by)

    def do_log_batch(self, name: str, metrics: list[Json], tags: dict[str, str]) -> None:
        """Log as a run does."""
        with self._jobs.changed:
            job = self._jobs.named(name)
            job.points += [Point(**one) for one in metrics]
            job.tags.update(tags)

    def do_set_log(self, name: str, path: str, text: str) -> None:
        """Set the content of a log file."""
        with self._jobs.changed:
            self._jobs.named(name).logs[path] = text.encode

    def do_compute(self, name: str, properties: Json | None, workspace: str | None) -> None:
        """Have a compute, or none of that name."""
        for one in self._service.workspaces.values():
            if workspace in (None, one.id):
                one.computes.pop(name, None)
                if properties is not None:
                    one.computes[name] = properties

    def do_names(self, kind: str, names: list[str]) -> None:
        """Have these environments or datastores and no others."""
        for one in self._service.workspaces.values():
            setattr(one, kind, set(names))

    def do_fault(self, **fault: Any) -> None:
        """Have a fault."""
        self._service.faults.add(Fault(**fault))

    def do_clear_faults(self) -> None:
        """Have none."""
        self._service.faults.clear()

    def do_settings(self, **changes: Any) -> None:
        """Change how jobs live."""
        with self._jobs.changed:
            for name, value in settings(changes).items():
                setattr(self._service.settings, name, value)
            self._jobs.changed.notify_all()

    def do_tokens(self, lifetime: float | None, revoke: bool) -> None:
        """Change how long tokens are good."""
        tokens = self._service.tokens
        tokens.lifetime = tokens.lifetime if lifetime is None else lifetime
        if revoke:
            tokens.revoke_all()


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they came in JSON, by name.

    Raises:
        TypeError: there is no such setting.
    """
    values = {**values, **({"stuck": set(values["stuck"])} if "stuck" in values else {})}
    Settings(**values)
    return dict(values)


def _seen(job: Job) -> Json:
    return {
        "workspace": job.workspace.id,
        "name": job.name,
        "state": job.state,
        "properties": job.properties,
        "tags": job.tags,
        "client": job.created_by,
        "error": job.error[1] if job.error else "",
        "starts": job.starts,
        "created": job.created.timestamp(),
        "ended": job.ended.timestamp() if job.ended else None,
        "points": [vars(one) for one in job.points],
        "logs": {path: read().decode(errors="replace") for path, read in job.logs.items()},
    }
