"""A run on an MLflow server, by its REST API (https://mlflow.org/docs/latest/rest-api.html).

Without MLflow's library, which takes 117 MB, follows redirects with its credentials and retries for
minutes.
"""

import base64
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from time import time
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from finetune_trainer.config import TrackerConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.launch.journal_points import Point
from finetune_trainer.launch.trackers.tracker import (
    End,
    NotAvailableError,
    RefusedPointsError,
    RunFacts,
    credentials_of,
)

UID_TAG = "finetune.job_uid"
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 1 << 20
_MAX_PARAM = 500  # characters that every version of the server accepts
_NOT_FOUND = "RESOURCE_DOES_NOT_EXIST"
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_STATUS_OF = {End.DONE: "FINISHED", End.STOPPED: "KILLED", End.FAILED: "FAILED"}
# Responses to a malformed request; others may pass, such as 401 after a renewed token.
_REFUSES_POINTS = (400, 413, 422)

Json = dict[str, Any]


class MlflowError(TrainerError):
    """A response that is not a success.

    Attributes:
        status: HTTP status.
        code: MLflow's code of the error; empty if the response has none.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(" ".join(filter(None, (f"HTTP {status}", code, message))))
        self.status = status
        self.code = code


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would receive the credentials."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class MlflowServer:
    """Sends requests to one server."""

    def __init__(self, tracker: TrackerConfig, environ: Mapping[str, str] = os.environ) -> None:
        """Prepare; sends no request.

        Raises:
            NotAvailableError: The address is missing or unsupported, or the credentials cannot be
                read.
        """
        address = tracker.url or environ.get("MLFLOW_TRACKING_URI", "")
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NotAvailableError(
                "MLFLOW_TRACKING_URI is not the address of an MLflow server; set http:// or https://"
            )
        if tracker.url is not None:
            credentials, environ = credentials_of(tracker), {}
        else:
            credentials = _credentials_in(environ, parts.username, parts.password)
        host = parts.netloc.rpartition("@")[2]
        self.address = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._authorization = _authorization(credentials)
        self._opener = urllib.request.build_opener(
            _NoRedirect, urllib.request.HTTPSHandler(context=_tls(environ))
        )

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send one request to `/api/2.0/mlflow/PATH`, and return the response.

        Raises:
            MlflowError: The server refuses the request.
            OSError: The server cannot be reached, or takes too long.
        """
        headers = {"Content-Type": "application/json", **self._authorization}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}/api/2.0/mlflow/{path}", data, headers, method=method
        )
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                return _json(response.read(_MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                found = _json(error.read(_MAX_BYTES))
            code, message = str(found.get("error_code", "")), str(found.get("message", ""))
            raise MlflowError(error.code, code, message or str(error.reason)) from error
        except HTTPException as error:
            raise OSError(f"not an HTTP response ({error!r})") from error


class MlflowRun:
    """The run whose tag has the id of the job; the first attempt creates it."""

    def __init__(self, tracker: TrackerConfig, facts: RunFacts) -> None:
        """Find or create the experiment and the run.

        Raises:
            NotAvailableError: See `MlflowServer`.
            MlflowError: The server refuses a request.
            OSError: The server cannot be reached.
        """
        self._server = MlflowServer(tracker)
        self._experiment = self._experiment_of(tracker.project)
        known = self._known_run(facts.id)
        self._id = known or self._create(facts)
        if known is not None:
            self._server.call("POST", "runs/update", {"run_id": known, "status": "RUNNING"})

    @property
    def url(self) -> str:
        """Page of the run."""
        run = f"experiments/{quote(self._experiment)}/runs/{quote(self._id)}"
        return f"{self._server.address}/#/{run}"

    def log(self, points: Sequence[Point]) -> None:
        """Send the points in one request.

        Raises:
            RefusedPointsError: The server does not accept these points.
            MlflowError: The server refuses the request.
            OSError: The server cannot be reached.
        """
        metrics = [
            {"key": name, "value": value, "timestamp": int(point.time * 1000), "step": point.step}
            for point in points
            for name, value in point.values.items()
        ]
        try:
            self._server.call("POST", "runs/log-batch", {"run_id": self._id, "metrics": metrics})
        except MlflowError as error:
            if error.status in _REFUSES_POINTS:
                raise RefusedPointsError(str(error)) from error
            raise

    def finish(self, end: End) -> None:
        """Set the final status of the run."""
        body = {"run_id": self._id, "status": _STATUS_OF[end], "end_time": _milliseconds()}
        self._server.call("POST", "runs/update", body)

    def _experiment_of(self, name: str) -> str:
        path = f"experiments/get-by-name?experiment_name={quote(name, safe='')}"
        try:
            return str(self._server.call("GET", path)["experiment"]["experiment_id"])
        except MlflowError as error:
            if error.code != _NOT_FOUND:
                raise
        try:
            created = self._server.call("POST", "experiments/create", {"name": name})
        except MlflowError as error:
            if error.code != _EXISTS:
                raise
            created = self._server.call("GET", path)["experiment"]  # another job was faster
        return str(created["experiment_id"])

    def _known_run(self, uid: str) -> str | None:
        body = {
            "experiment_ids": [self._experiment],
            "filter": f"tags.`{UID_TAG}` = '{uid}'",
            "max_results": 1,
        }
        runs = self._server.call("POST", "runs/search", body).get("runs") or []
        return str(runs[0]["info"]["run_id"]) if runs else None

    def _create(self, facts: RunFacts) -> str:
        tags = {
            UID_TAG: facts.id,
            "finetune.namespace": facts.namespace,
            "finetune.job": facts.name,
        }
        body = {
            "experiment_id": self._experiment,
            "run_name": facts.name,
            "start_time": _milliseconds(),
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        run = str(self._server.call("POST", "runs/create", body)["run"]["info"]["run_id"])
        params = [
            {"key": key, "value": str(value)[:_MAX_PARAM]} for key, value in facts.settings.items()
        ]
        self._server.call("POST", "runs/log-batch", {"run_id": run, "params": params})
        return run


def _credentials_in(environ: Mapping[str, str], user: str | None, password: str | None) -> str:
    """Return the user's credentials: in the address, as user and password, or a token."""
    name = environ.get("MLFLOW_TRACKING_USERNAME") or unquote(user or "")
    if name:
        secret = environ.get("MLFLOW_TRACKING_PASSWORD") or unquote(password or "")
        return f"{name}:{secret}"
    return environ.get("MLFLOW_TRACKING_TOKEN", "")


def _authorization(credentials: str) -> dict[str, str]:
    """Return the header for a token or USER:PASSWORD; none without credentials."""
    if not credentials:
        return {}
    if ":" in credentials:
        return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}
    return {"Authorization": f"Bearer {credentials}"}


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(
        cafile=environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None
    )
    if environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _json(text: bytes) -> Json:
    """Return a JSON object; empty for any other text, such as a proxy's page."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _milliseconds() -> int:
    return int(time() * 1000)
