"""The data plane: run history with its log files, and MLflow."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from urllib.parse import quote

from azureml_service.answers import Answer, Json, RefusalError, missing
from azureml_service.identity import TENANT, Tokens
from azureml_service.jobs import Job, Jobs, Point, milliseconds
from azureml_service.nodes import experiment_id
from azureml_service.resources import Workspace

_STATUS = {
    "Completed": "FINISHED",
    "Failed": "FAILED",
    "Canceled": "KILLED",
    "Running": "RUNNING",
    "Finalizing": "RUNNING",
    "CancelRequested": "RUNNING",
    "NotResponding": "RUNNING",
}
"""What MLflow calls a state; SCHEDULED for all others."""
_URL_SECONDS = 3600
MAX_NAMES = 50
MAX_VALUE = 1000


class Runs:
    """What is asked of runs.

    Args:
        jobs: Whose runs they are.
        tokens: Signs the URLs of log files, and gives a run's own token.
        base: URL of the service.
    """

    def __init__(self, jobs: Jobs, tokens: Tokens, base: str) -> None:
        self._jobs, self._tokens, self._base = jobs, tokens, base
        self._mlflow: dict[str, Callable[[Workspace, Json], Json]] = {
            "runs.get": self._get,
            "runs.update": self._update,
            "runs.log-batch": self._log_batch,
            "runs.log-metric": self._log_metric,
            "runs.log-parameter": self._log_parameter,
            "runs.set-tag": self._set_tag,
            "runs.delete-tag": self._delete_tag,
            "metrics.get-history": self._history,
            "experiments.get": self._experiment,
            "experiments.get-by-name": self._experiment,
        }

    def details(self, workspace: Workspace, name: str) -> Answer:
        """Tell of a run what no job tells: its error, times and log files."""
        with self._jobs.changed:
            job = self._jobs.find(workspace, name)
            expires = int(time.time()) + _URL_SECONDS
            body: Json = {
                "runId": job.name,
                "target": (job.properties.get("computeId") or "").rpartition("/")[2] or None,
                "status": job.state,
                "createdTimeUtc": job.created.isoformat(),
                "startTimeUtc": _shown(job.started),
                "endTimeUtc": _shown(job.ended),
                "properties": job.properties.get("properties") or {},
                "tags": job.tags,
                "statusRevision": job.revision,
                "logFiles": {path: self._url(job, path, expires) for path in job.logs},
                "createdBy": _user(job.created_by),
                "lastModifiedBy": _user(job.changed_by or job.created_by),
                "warnings": [],
                "error": _error(job),
            }
        return Answer(body)

    def log_file(self, name: str, path: str, query: dict[str, str], asked: str | None) -> Answer:
        """Return a log file or the range of it that is asked for, as blob storage does.

        Raises:
            RefusalError: the URL is not signed, or the range is not there.
        """
        expires = query.get("se", "0")
        expected = self._tokens.sign(f"{name}/{path}?{expires}")
        if query.get("sig") != expected or int(expires) < time.time():
            raise RefusalError(403, "AuthenticationFailed", "Signature did not match.")
        with self._jobs.changed:
            read = self._jobs.named(name).logs.get(path)
        if read is None:
            raise RefusalError(404, "BlobNotFound", "The specified blob does not exist.")
        content = read()
        length = len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "")
        if match is None:
            return Answer(content, headers={"Accept-Ranges": "bytes"})
        first, last = int(match[1]), min(int(match[2] or length - 1), length - 1)
        if first >= length:
            ranges = {"Content-Range": f"bytes */{length}"}
            raise RefusalError(416, "InvalidRange", "The range is invalid.", headers=ranges)
        ranges = {"Content-Range": f"bytes {first}-{last}/{length}"}
        return Answer(content[first : last + 1], 206, ranges)

    def token(self, workspace: Workspace, name: str, lifetime: float) -> Answer:
        """Give a run's own token anew."""
        with self._jobs.changed:
            self._jobs.find(workspace, name)
        expires = datetime.fromtimestamp(time.time() + lifetime).astimezone()
        token = self._tokens.give(name, lifetime, is_of_run=True)
        return Answer({"token": token, "expiryTimeUtc": expires.isoformat()})

    def mlflow(self, workspace: Workspace, verb: str, given: Json) -> Answer:
        """Answer a request of MLflow.

        Args:
            workspace: Where.
            verb: Such as "runs.get".
            given: The query of a GET, or the body.

        Raises:
            RefusalError: there is no such verb or run, or a limit is exceeded.
        """
        answer = self._mlflow.get(verb)
        if answer is None:
            raise missing(f"MLflow's {verb}")
        with self._jobs.changed:
            return Answer(answer(workspace, given))

    def _run(self, workspace: Workspace, given: Json) -> Job:
        return self._jobs.find(workspace, given.get("run_id") or given.get("run_uuid") or "")

    def _get(self, workspace: Workspace, given: Json) -> Json:
        job = self._run(workspace, given)
        newest = {point.key: point for point in job.points}
        tags = {
            **job.tags,
            "mlflow.rootRunId": job.name,
            "mlflow.runName": job.properties.get("displayName") or job.name,
            "mlflow.user": job.created_by,
        }
        data = {
            "metrics": [vars(point) for point in newest.values()],
            "params": _pairs(job.parameters),
            "tags": _pairs(tags),
        }
        return {"run": {"info": self._info(job), "data": data, "inputs": {}}}

    def _info(self, job: Job) -> Json:
        return {
            "run_id": job.name,
            "run_uuid": job.name,
            "run_name": job.properties.get("displayName") or job.name,
            "experiment_id": experiment_id(job.properties.get("experimentName") or "Default"),
            "user_id": job.created_by,
            "status": _STATUS.get(job.state, "SCHEDULED"),
            "start_time": milliseconds(job.started or job.created),
            **({"end_time": milliseconds(job.ended)} if job.ended else {}),
            "artifact_uri": f"azureml://{self._base.removeprefix('https://')}/mlflow/v2.0"
            f"{job.workspace.id}/experiments/{job.name}/runs/{job.name}/artifacts",
            "lifecycle_stage": "active",
        }

    def _update(self, workspace: Workspace, given: Json) -> Json:
        return {"run_info": self._info(self._run(workspace, given))}  # the state is the service's

    def _log_batch(self, workspace: Workspace, given: Json) -> Json:
        job = self._run(workspace, given)
        points = [_point(one) for one in given.get("metrics") or []]
        tags = {one["key"]: one["value"] for one in given.get("tags") or []}
        parameters = {one["key"]: one["value"] for one in given.get("params") or []}
        _check_number("metrics", {point.key for point in [*job.points, *points]})
        _check_values(tags)
        _check_number("tags", {*job.tags, *tags})
        job.points += points
        job.tags.update(tags)
        job.parameters.update(parameters)
        return {}

    def _log_metric(self, workspace: Workspace, given: Json) -> Json:
        return self._log_batch(workspace, {**given, "metrics": [given]})

    def _log_parameter(self, workspace: Workspace, given: Json) -> Json:
        return self._log_batch(workspace, {**given, "params": [given]})

    def _set_tag(self, workspace: Workspace, given: Json) -> Json:
        return self._log_batch(workspace, {**given, "tags": [given]})

    def _delete_tag(self, workspace: Workspace, given: Json) -> Json:
        self._run(workspace, given).tags.pop(given["key"], None)
        return {}

    def _history(self, workspace: Workspace, given: Json) -> Json:
        points = self._run(workspace, given).points
        return {"metrics": [vars(one) for one in points if one.key == given["metric_key"]]}

    def _experiment(self, workspace: Workspace, given: Json) -> Json:
        name = given.get("experiment_name") or given.get("experiment_id", "")
        name = name.removeprefix(experiment_id(""))
        experiment = {"experiment_id": experiment_id(name), "name": name}
        return {"experiment": {**experiment, "lifecycle_stage": "active", "artifact_location": ""}}

    def _url(self, job: Job, path: str, expires: int) -> str:
        signature = self._tokens.sign(f"{job.name}/{path}?{expires}")
        file = quote(f"{job.name}/{path}")
        return f"{self._base}/logs/{file}?sv=2021-08-06&se={expires}&sp=r&sig={signature}"


def _point(given: Json) -> Point:
    return Point(
        given["key"], float(given["value"]), int(given["timestamp"]), int(given.get("step") or 0)
    )


def _check_number(kind: str, names: set[str]) -> None:
    if len(names) > MAX_NAMES:
        raise RefusalError(400, "BAD_REQUEST", f"A run has at most {MAX_NAMES} {kind}.")


def _check_values(tags: dict[str, str]) -> None:
    for key, value in tags.items():
        if len(value) > MAX_VALUE:
            raise RefusalError(
                400, "BAD_REQUEST", f"The tag {key} has over {MAX_VALUE} characters."
            )


def _pairs(values: dict[str, str]) -> list[Json]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _shown(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment else None


def _user(name: str) -> Json:
    return {"userObjectId": name, "userTenantId": TENANT, "userName": name, "upn": None}


def _error(job: Job) -> Json | None:
    if job.error is None:
        return None
    code, message = job.error
    error = {"code": code, "message": message[:3000], "messageParameters": {}, "details": []}
    return {"error": error, "environment": "westeurope", "componentName": "execution-worker"}
