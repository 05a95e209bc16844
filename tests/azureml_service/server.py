"""The service over HTTPS: of which kind a request is, who may ask it, what faults it meets."""

import json
import re
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from azureml_service import resources
from azureml_service.answers import Answer, Record, RefusalError, bad, missing
from azureml_service.compute import Compute, Settings
from azureml_service.faults import Fault, Faults
from azureml_service.identity import Grant, Tokens, make_certificates
from azureml_service.jobs import Jobs
from azureml_service.nodes import Place
from azureml_service.resources import Workspace
from azureml_service.runs import Runs

_WORKSPACE = (
    r"(?P<workspace>/subscriptions/[^/]+/resourceGroups/[^/]+"
    r"/providers/Microsoft\.MachineLearningServices/workspaces/[^/]+)"
)
_RUN = rf"/history/v1\.0{_WORKSPACE}(?:/experiment(?:id)?s/[^/]+)?/runs/(?P<name>[^/]+)"
_ROUTES = tuple(
    (kind, method, re.compile(path, re.IGNORECASE))
    for kind, method, path in (
        ("token", "POST", r"/(?P<tenant>[^/]+)/oauth2/v2\.0/token"),
        ("discovery.get", "GET", r"/discovery"),
        ("log.get", "GET", r"/logs/(?P<name>[^/]+)/(?P<path>.+)"),
        ("workspace.get", "GET", _WORKSPACE),
        ("job.list", "GET", rf"{_WORKSPACE}/jobs"),
        ("job.get", "GET", rf"{_WORKSPACE}/jobs/(?P<name>[^/]+)"),
        ("job.put", "PUT", rf"{_WORKSPACE}/jobs/(?P<name>[^/]+)"),
        ("job.cancel", "POST", rf"{_WORKSPACE}/jobs/(?P<name>[^/]+)/cancel"),
        ("cancel.get", "GET", rf"{_WORKSPACE}/mfeOperationResults/(?P<name>[^/]+)"),
        ("compute.get", "GET", rf"{_WORKSPACE}/computes/(?P<name>[^/]+)"),
        ("datastore.get", "GET", rf"{_WORKSPACE}/datastores/(?P<name>[^/]+)"),
        (
            "environment.get",
            "GET",
            rf"{_WORKSPACE}/environments/(?P<name>[^/]+)/versions/(?P<version>[^/]+)",
        ),
        (
            "sizes.list",
            "GET",
            r"/subscriptions/[^/]+/providers/Microsoft\.MachineLearningServices"
            r"/locations/[^/]+/vmSizes",
        ),
        ("run.details", "GET", rf"{_RUN}/details"),
        ("run.token", "GET", rf"{_RUN}/token"),
        (
            "mlflow",
            "(GET|POST)",
            rf"/mlflow/v[12]\.0{_WORKSPACE}/api/2\.0/mlflow/(?P<verb>[a-z-]+/[a-z-]+)",
        ),
    )
)
_ANONYMOUS = frozenset({"token", "discovery.get", "log.get"})
_OF_A_RUN = ("run.token", "mlflow")


class Service:
    """All that the service is, on a port of its own.

    Args:
        folder: For certificates, the token file and the disks of nodes.
        root: Of datastores and registered models.
        settings: How jobs live.
        workspaces: ARM ids.
        image: Variables of the environments' images.
    """

    def __init__(
        self,
        folder: Path,
        root: Path,
        settings: Settings,
        workspaces: list[str],
        image: dict[str, str],
    ) -> None:
        self.settings = settings
        self.faults, self.tokens = Faults(), Tokens(folder)
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.workspaces = {one.lower(): Workspace(one) for one in workspaces}
        self._server = _Server(self, make_certificates(folder))
        self.base = f"https://127.0.0.1:{self._server.server_address[1]}"
        self.jobs = Jobs(self.base)
        self.runs = Runs(self.jobs, self.tokens, self.base)
        trust = {
            "REQUESTS_CA_BUNDLE": str(folder / "ca.pem"),
            "AZUREML_CURRENT_CLOUD": "AzureCloud",  # else MLflow's plugin asks Azure itself
        }
        place = Place(self.base, root, folder / "nodes", {**image, **trust})
        self.compute = Compute(self.jobs, settings, place, self._token_of_run)
        threading.excepthook = lambda failed: self.note_problem(failed.exc_value)

    def start(self) -> None:
        """Answer from now on."""
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def close(self) -> None:
        """Answer no more, and end all processes of jobs."""
        self._server.shutdown()
        self.faults.clear()
        self.compute.close()
        self._server.server_close()

    def note_problem(self, error: BaseException | None) -> None:
        """Keep an error of the service itself, which no test asked for."""
        self.problems.append("".join(traceback.format_exception(error)))
        print(self.problems[-1], file=sys.stderr, flush=True)

    def answer(self, record: Record, match: "re.Match[str]", asked: "Asked") -> Answer:
        """Answer a request, as if there were no faults.

        Raises:
            RefusalError: as Azure would.
        """
        grant = Grant("", 0.0)
        if record.kind not in _ANONYMOUS:
            grant = self.tokens.check(asked.authorization)
            record.client = grant.client
            is_own = record.name in ("", grant.client) and record.kind.startswith(_OF_A_RUN)
            if grant.is_of_run and not is_own:
                raise RefusalError(
                    403, "AuthorizationFailed", "The token of a run is not good for it."
                )
        elif asked.authorization is not None:
            raise bad("A token was sent to where none is needed.")
        parts = match.groupdict()
        name, kind, query = parts.get("name") or "", record.kind, asked.query
        if kind == "token":
            return Answer(self.tokens.exchange(parts["tenant"], dict(parse_qsl(asked.text))))
        if kind == "discovery.get":
            return Answer({"api": self.base, "history": self.base})
        if kind == "log.get":
            return self.runs.log_file(name, parts["path"], query, asked.range)
        if kind == "sizes.list":
            return Answer(resources.sizes())
        workspace = self.workspaces.get(parts["workspace"].lower())
        if workspace is None:
            what = f"The workspace '{parts['workspace']}' was not found."
            raise RefusalError(404, "ResourceNotFound", what)
        if kind.startswith("mlflow."):
            return self.runs.mlflow(workspace, kind.removeprefix("mlflow."), asked.values())
        if not kind.startswith("run.") and "api-version" not in query:
            raise RefusalError(400, "MissingApiVersionParameter", "The api-version is missing.")
        answers: dict[str, Callable[[], Answer]] = {
            "workspace.get": lambda: Answer(workspace.body(self.base)),
            "job.list": lambda: self.jobs.list(workspace, query),
            "job.get": lambda: self.jobs.get(workspace, name),
            "job.put": lambda: self.jobs.put(workspace, name, asked.json(), grant.client),
            "job.cancel": lambda: self.jobs.cancel(workspace, name, grant.client),
            "cancel.get": lambda: self.jobs.cancel_result(workspace, name),
            "compute.get": lambda: Answer(workspace.compute(name)),
            "datastore.get": lambda: Answer(workspace.datastore(name)),
            "environment.get": lambda: Answer(workspace.environment(name, parts["version"])),
            "run.details": lambda: self.runs.details(workspace, name),
            "run.token": lambda: self.runs.token(workspace, name, self.settings.run_token),
        }
        return answers[kind]()

    def _token_of_run(self, name: str, lifetime: float) -> str:
        return self.tokens.give(name, lifetime, is_of_run=True)


@dataclass(frozen=True)
class Asked:
    """What came with a request."""

    query: dict[str, str]
    text: str
    authorization: str | None
    range: str | None

    def values(self) -> dict[str, Any]:
        """Return the body, or the query of a request without one.

        Raises:
            RefusalError: it is not an object of JSON.
        """
        if not self.text:
            return self.query
        found = self.json()
        if not isinstance(found, dict):
            raise bad("The body is not an object.")
        return found

    def json(self) -> Any:
        """Return the body.

        Raises:
            RefusalError: it is not JSON.
        """
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise bad(f"The body is not JSON: {error}") from error


def _name(kind: str, match: "re.Match[str] | None", asked: Asked) -> str:
    """Return what a request is about: a job, a compute or the like; empty if nobody can tell."""
    if match is None:
        return ""
    if not kind.startswith("mlflow."):
        return match.groupdict().get("name") or ""
    try:
        values = asked.values()
    except RefusalError:
        return ""  # the answer will say so
    return str(values.get("run_id") or values.get("run_uuid") or "")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, service: Service, context: ssl.SSLContext) -> None:
        self.service, self._context = service, context
        super().__init__(("127.0.0.1", 0), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        # In the thread of the connection: a client that is slow to shake hands delays no other.
        with self._context.wrap_socket(request, server_side=True) as wrapped:
            super().finish_request(wrapped, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # clients may go away at any time
            self.service.note_problem(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one piece
    server: _Server

    def do_GET(self) -> None:
        self._handle()

    do_PUT = do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        came = time.monotonic()
        service, url = self.server.service, urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        path = unquote(url.path).replace("//", "/")
        found = _route(self.command, path)
        kind, match = found or ("unknown", None)
        authorization = self.headers.get("Authorization")
        asked = Asked(query, text, authorization, self.headers.get("Range"))
        name = _name(kind, match, asked)
        shown = {key: value for key, value in query.items() if key != "sig"}
        record = Record(self.command, path, kind, shown, name, came)
        service.records.append(record)

        def carry_out() -> Answer:
            try:
                if match is None:
                    raise missing(f"{self.command} {path}")
                return service.answer(record, match, asked)
            except RefusalError as refusal:
                record.problem = str(refusal)
                return refusal.answer()
            except Exception as error:
                service.note_problem(error)
                return RefusalError(
                    500, "InternalServerError", "An error of the stand-in."
                ).answer()

        answer = self._with_fault(carry_out, service.faults.take(kind, name))
        if answer is None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        record.status = answer.status  # before it is sent, as who has it may look at once
        self._send(answer)

    def _with_fault(self, carry_out: Callable[[], Answer], fault: Fault | None) -> Answer | None:
        """Return the answer, or None for a connection that is closed instead."""
        if fault is None:
            return carry_out()
        if fault.is_late:
            later = threading.Timer(fault.delay, carry_out)
            later.daemon = True
            later.start()
            return None
        answer = carry_out() if fault.is_carried_out else None
        if fault.delay:
            self.server.service.faults.wait(fault)
        if fault.is_lost:
            return None
        if fault.status is not None:
            return fault.refusal()
        return answer or carry_out()

    def _send(self, answer: Answer) -> None:
        is_file = isinstance(answer.body, bytes)
        content = answer.body if is_file else b""
        if not is_file and answer.body is not None:
            content = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/plain" if is_file else "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()


def _route(method: str, path: str) -> tuple[str, "re.Match[str]"] | None:
    for kind, allowed, pattern in _ROUTES:
        if re.fullmatch(allowed, method) and (match := pattern.fullmatch(path)):
            verb = match.groupdict().get("verb")
            return f"{kind}.{verb.replace('/', '.')}" if verb else kind, match
    return None
