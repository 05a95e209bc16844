"""The API server: HTTP on the loopback address in front of `api_requests.py`, and watches.

`ftctl dev` and tests start the server. Clients send no token over plain HTTP, so its URL contains a
secret, which is in the kubeconfig. Otherwise any web page and any user of the machine could start
jobs.
"""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import orjson
from aiohttp import web

from finetune_operator.embedded import discovery
from finetune_operator.embedded.admission import admit_change, admit_new
from finetune_operator.embedded.api_requests import VERBS, ApiRequest, parse_request
from finetune_operator.embedded.status_errors import StatusError
from finetune_operator.embedded.store import Store
from finetune_operator.embedded.tables import table
from finetune_operator.embedded.watching import Watch
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import CRDS, NAMESPACES, Object, Resource

_BODY_BYTES = 3 * 2**20
_VERBS = {
    ("GET", True): "get",
    ("GET", False): "list",
    ("POST", False): "create",
    ("PUT", True): "update",
    ("PATCH", True): "patch",
    ("DELETE", True): "delete",
    ("DELETE", False): "delete",
}
"""The verb, by HTTP method and whether the path names an object."""


class EmbeddedApi:
    """An in-process Kubernetes API server; an async context manager.

    Args:
        crds: CustomResourceDefinitions that are served from the start.
        port: Port of the server; 0 for a free port.
        state: File that stores the objects between runs; None: only in memory.

    Raises:
        StateError: the file cannot be parsed.

    Attributes:
        url: `http://127.0.0.1:PORT/SECRET`, available inside the context.
    """

    url: str

    def __init__(self, crds: Sequence[Object], *, port: int = 0, state: Path | None = None) -> None:
        self._store = Store(state)
        self._secret = secrets.token_urlsafe(24)
        self._crds = crds
        self._port = port
        self._maintenance: asyncio.Task[None] | None = None
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_route("*", "/{secret}/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1
        )

    def kubeconfig(self) -> Object:
        """Return the kubeconfig; store it readable by its owner only: it contains the secret."""
        name = "embedded"
        context = {"cluster": name, "user": name, "namespace": "default"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": context}],
        }

    async def __aenter__(self) -> Self:
        """Create the default namespace and the CRDs, and listen.

        Raises:
            OSError: the port is in use.
        """
        listener = socket.create_server(("127.0.0.1", self._port))
        self._ensure(NAMESPACES, {"metadata": {"name": "default"}})
        for definition in self._crds:
            self._ensure(CRDS, definition)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{self._secret}"
        self._maintenance = asyncio.create_task(self._store.maintain())
        return self

    async def __aexit__(self, *raised: object) -> None:
        """End all watches, stop listening, and write the state."""
        self._store.close()
        await self._runner.cleanup()
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
        self._store.save()

    def _ensure(self, resource: Resource, body: Object) -> None:
        kind = self._store.kinds[str(resource)]
        before = self._store.get(kind, Key("", body["metadata"]["name"]))
        if before is None:
            self._store.put(kind, admit_new(kind, body, "", "", "Strict")[0])
        elif resource == CRDS:
            self._store.put(kind, admit_change(kind, body, before, "Strict")[0])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not secrets.compare_digest(request.match_info["secret"].encode(), self._secret.encode()):
            raise _page_not_found()
        path = request.match_info["path"].strip("/")
        if path in ("healthz", "livez", "readyz"):
            return web.Response(text="ok")
        description = discovery.describe(self._store.kinds.values(), path.split("/"))
        if description is not None:
            return _json(description)
        try:
            parsed = await self._parsed(request, path)
            return await self._serve(_verb(request, parsed), request, parsed)
        except StatusError as error:
            wait = error.status["details"].get("retryAfterSeconds")
            headers = {"Retry-After": str(wait)} if wait else {}
            return _json(error.status, error.code, headers)

    async def _parsed(self, request: web.Request, path: str) -> ApiRequest:
        body = await request.read()
        content_type = request.content_type if body else ""
        parsed = parse_request(self._store, path, request.query, content_type, body)
        if parsed is None:
            raise _page_not_found()
        return parsed

    async def _serve(
        self, verb: str, request: web.Request, parsed: ApiRequest
    ) -> web.StreamResponse:
        if verb == "watch":
            return await self._watch(request, parsed)
        response = VERBS[verb](self._store, parsed)
        obj = response.obj
        if verb in ("get", "list") and not parsed.subresource and _wants_table(request):
            items = obj["items"] if verb == "list" else [obj]
            obj = table(parsed.kind, items, obj["metadata"])
        warnings = [f"299 - {orjson.dumps(text).decode()}" for text in response.warnings]
        return _json(obj, response.status, {"Warning": ", ".join(warnings)} if warnings else {})

    async def _watch(self, request: web.Request, parsed: ApiRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        watch = Watch(self._store, parsed)
        with suppress(ConnectionResetError):  # the client has disconnected
            await response.prepare(request)
            async for event in watch.events():
                obj = event["object"]
                if _wants_table(request) and event["type"] != "ERROR":
                    rows = [] if event["type"] == "BOOKMARK" else [obj]
                    obj = table(parsed.kind, rows, obj["metadata"])
                await response.write(orjson.dumps({**event, "object": obj}) + b"\n")
            await response.write_eof()
        return response


def _verb(request: web.Request, parsed: ApiRequest) -> str:
    verb = _VERBS.get((request.method, bool(parsed.key.name)))
    if verb is None:
        message = "the server does not allow this method on the requested resource"
        raise StatusError(405, "MethodNotAllowed", message)
    return "watch" if verb == "list" and request.query.get("watch") in ("1", "true") else verb


def _wants_table(request: web.Request) -> bool:
    return "as=Table" in request.headers.get("Accept", "")


def _json(obj: Object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(obj)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _page_not_found() -> web.HTTPNotFound:
    return web.HTTPNotFound(text="404 page not found\n")
