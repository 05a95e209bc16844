"""An MLflow server's REST API in memory: experiments, runs, metrics, tags; and its faults.

`tests/integration/launch/test_trackers.py` also runs on a real server, mlflow 3.17.2, if
FINETUNE_TEST_MLFLOW names the program.
"""

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
MAX_METRICS = 1_000
_UID = re.compile(r"tags\.`finetune\.job_uid` = '([^']*)'")


class StandInMlflow(ThreadingHTTPServer):
    """An HTTP server on the loopback address.

    Attributes:
        token: Token that requests need; None accepts every request.
        redirects_to: Address that every request is redirected to.
        hangs: Set to let every request wait.
        authorizations: The header of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token: str | None = None
        self.redirects_to: str | None = None
        self.hangs = threading.Event()
        self.released = threading.Event()
        self.authorizations: list[str | None] = []
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Json] = {}
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def respond(self, path: str, query: Json, body: Json) -> tuple[int, Json]:
        """Return status and content of the response to a request."""
        with self.lock:
            match path:
                case "experiments/get-by-name":
                    return self._experiment(query["experiment_name"][0])
                case "experiments/create":
                    if body["name"] in self.experiments:
                        return _error(400, "RESOURCE_ALREADY_EXISTS")
                    number = str(len(self.experiments) + 1)
                    self.experiments[body["name"]] = number
                    return 200, {"experiment_id": number}
                case "runs/search":
                    uid = _UID.fullmatch(body["filter"])
                    assert uid is not None
                    found = [one for one in self.runs.values() if one["uid"] == uid[1]]
                    return 200, {"runs": [_shown(one) for one in found]}
                case "metrics/get-history":
                    run = self.runs[query["run_id"][0]]
                    return 200, {
                        "metrics": [
                            {"step": step, "value": value}
                            for key, step, value in run["metrics"]
                            if key == query["metric_key"][0]
                        ]
                    }
                case "runs/create":
                    return self._create(body)
            known = self.runs.get(body.get("run_id", ""))
            if known is None:
                return _error(404, "RESOURCE_DOES_NOT_EXIST")
            if path == "runs/log-batch":
                return self._log(known, body)
            known["status"] = body["status"]
            return 200, {}

    def _experiment(self, name: str) -> tuple[int, Json]:
        if name not in self.experiments:
            return _error(404, "RESOURCE_DOES_NOT_EXIST")
        return 200, {"experiment": {"experiment_id": self.experiments[name]}}

    def _create(self, body: Json) -> tuple[int, Json]:
        number = f"run-{len(self.runs) + 1}"
        tags = {one["key"]: one["value"] for one in body["tags"]}
        self.runs[number] = {
            "id": number,
            "uid": tags["finetune.job_uid"],
            "name": body["run_name"],
            "status": "RUNNING",
            "metrics": [],
            "params": {},
        }
        return 200, {"run": {"info": {"run_id": number}}}

    def _log(self, run: Json, body: Json) -> tuple[int, Json]:
        metrics = body.get("metrics", [])
        if len(metrics) > MAX_METRICS:
            return _error(400, "INVALID_PARAMETER_VALUE")
        run["metrics"] += [(one["key"], one["step"], one["value"]) for one in metrics]
        run["params"] |= {one["key"]: one["value"] for one in body.get("params", [])}
        return 200, {}


class _Handler(BaseHTTPRequestHandler):
    server: StandInMlflow

    def log_message(self, *_: Any) -> None:
        """Do not print requests."""

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self._respond(json.loads(self.rfile.read(size) or b"{}"))

    def _respond(self, body: Json) -> None:
        server = self.server
        header = self.headers.get("Authorization")
        server.authorizations.append(header)
        if server.hangs.is_set():
            server.released.wait()
            return
        parts = urlsplit(self.path)
        if server.redirects_to is not None:
            self.send_response(307)
            self.send_header("Location", server.redirects_to + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if server.token is not None and not _has(header, server.token):
            status, content = 401, {"message": f"not {header}"}
        else:
            name = parts.path.removeprefix("/api/2.0/mlflow/")
            status, content = server.respond(name, parse_qs(parts.query), body)
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _has(header: str | None, token: str) -> bool:
    basic = base64.b64encode(token.encode()).decode()
    return header in (f"Bearer {token}", f"Basic {basic}")


def _shown(run: Json) -> Json:
    info = {"run_id": run["id"], "run_name": run["name"], "status": run["status"]}
    params = [{"key": key, "value": value} for key, value in run["params"].items()]
    return {"info": info, "data": {"params": params}}


def _error(status: int, code: str) -> tuple[int, Json]:
    return status, {"error_code": code, "message": code.lower().replace("_", " ")}


@contextmanager
def running_mlflow() -> Iterator[StandInMlflow]:
    """Run the server in a thread."""
    with StandInMlflow() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
