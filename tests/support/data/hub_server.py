"""A hub on loopback: models and data sets in folders, served as huggingface_hub asks for them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40
"""The only commit of each repository."""


class HubServer(ThreadingHTTPServer):
    """Serves `FOLDER/models/ORG/NAME` and `FOLDER/datasets/ORG/NAME`.

    Attributes:
        url: For HF_ENDPOINT.
        downloads: Files that were sent, each as `ORG/NAME/FILE`, in order.
        held: File that `hold` has named; None before.
        is_requested: Set by the first request for the held file.
        is_released: The held file is sent once this is set.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.downloads: list[str] = []
        self.held: str | None = None
        self.is_requested, self.is_released = threading.Event(), threading.Event()

    def hold(self, name: str) -> None:
        """Hold a file back until `is_released` is set."""
        self.held = name
        self.is_requested.clear()
        self.is_released.clear()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "json" in self.headers.get("Content-Type", ""):
            self._respond(json.loads(body)["paths"])
        else:
            self._respond(parse_qs(body.decode()).get("paths"))

    def log_message(self, *_: Any) -> None:
        pass

    def _respond(self, paths: list[str] | None = None) -> None:
        parts = [unquote(one) for one in urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api" and parts[1] in ("models", "datasets"):
            self._describe(parts[1], parts[2:], paths)
            return
        kind = "datasets" if parts[0] == "datasets" else "models"
        rest = parts[1:] if kind == "datasets" else parts
        if len(rest) < 5 or rest[2] != "resolve":
            self._send(404, {"error": "not found"})
            return
        repository = self._repository(kind, rest)
        if repository is not None:
            self._send_file(repository, rest)

    def _repository(self, kind: str, rest: list[str]) -> Path | None:
        found = self.server.folder / kind / "/".join(rest[:2])
        if found.is_dir():
            return found
        self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return None

    def _send_file(self, repository: Path, rest: list[str]) -> None:
        file = repository / "/".join(rest[4:])
        if not file.is_file():
            code = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            self._send(404, {"error": "Entry not found"}, code)
            return
        content = file.read_bytes()
        if self.command == "GET":
            name = "/".join([*rest[:2], *rest[4:]])
            self.server.downloads.append(name)
            if name == self.server.held:
                self.server.is_requested.set()
                self.server.is_released.wait()
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT}
        self._send(200, content, headers)

    def _describe(self, kind: str, rest: list[str], paths: list[str] | None) -> None:
        repository = self._repository(kind, rest)
        if repository is None:
            return
        action, below = (rest[2] if len(rest) > 2 else "revision"), "/".join(rest[4:])
        if action == "revision":
            names = [{"rfilename": name} for name in _files(repository)]
            self._send(200, {"id": "/".join(rest[:2]), "sha": COMMIT, "siblings": names})
        elif action == "tree":
            self._send(200, list(_entries(repository, repository / below)))
        elif action == "paths-info":
            wanted = paths or []
            entries = (_entry(repository, repository / one) for one in wanted)
            self._send(200, [one for one in entries if one is not None])
        else:
            self._send(404, {"error": f"{action} is not served"})

    def _send(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _files(repository: Path) -> Iterator[str]:
    for file in sorted(repository.rglob("*")):
        if file.is_file():
            yield file.relative_to(repository).as_posix()


def _entries(repository: Path, folder: Path) -> Iterator[dict[str, Any]]:
    for one in sorted(folder.rglob("*")):
        if (entry := _entry(repository, one)) is not None:
            yield entry


def _entry(repository: Path, one: Path) -> dict[str, Any] | None:
    name = one.relative_to(repository).as_posix()
    if one.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40}
    if not one.is_file():
        return None
    content = one.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_of(folder: Path) -> Iterator[HubServer]:
    """Serve the repositories below `folder`."""
    with HubServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
