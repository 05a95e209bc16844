"""The API server: HTTP on the loopback address in front of `verbs.py`, and watches.

`ftctl dev` and tests start it. Its URL holds a secret that its kubeconfig tells, or every web page
and every user of this machine could start jobs; clients send no token over plain HTTP.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web

from finetune_operator.embedded import openapi, verbs
from finetune_operator.embedded.admission import admit_change, admit_new
from finetune_operator.embedded.faults import Fault, Faults
from finetune_operator.embedded.kinds import group_list, resource_list
from finetune_operator.embedded.refusals import RefusalError
from finetune_operator.embedded.store import CRDS, Store
from finetune_operator.embedded.tables import table
from finetune_operator.embedded.verbs import Answer, Asked
from finetune_operator.embedded.watching import Watch
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import NAMESPACES, Object

_VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0-embedded", "platform": "embedded"}
_BODY_BYTES = 3 * 2**20
_VERBS: dict[str, Callable[[Store, Asked], Answer]] = {
    "get": verbs.get,
    "create": verbs.create,
    "update": verbs.update,
    "patch": verbs.patch,
    "delete": verbs.delete,
}
_METHODS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class EmbeddedApi:
    """An in-process Kubernetes API server; use it as an async context manager.

    Args:
        crds: CustomResourceDefinitions that are there from the start.
        faults: What goes wrong; nothing if left out.
        port: Its port; 0 for a free one.
        state: File that keeps the objects between runs; None keeps them in memory.

    Attributes:
        faults: What goes wrong; may be changed at any time.
        url: `http://127.0.0.1:PORT/SECRET`, once it is entered.
    """

    def __init__(
        self,
        crds: Sequence[Object],
        *,
        faults: Faults | None = None,
        port: int = 0,
        state: Path | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.url = ""
        self._store = Store(state)
        self._secret = secrets.token_urlsafe(24)
        self._crds = crds
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_route("*", "/{secret}/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1
        )

    def kubeconfig(self) -> Object:
        """Return the kubeconfig; it tells the secret, so a file of it must be its owner's only."""
        name = "embedded"
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}
            ],
        }

    async def __aenter__(self) -> Self:
        """Listen, with the namespaces and the CRDs that are there from the start."""
        loop = asyncio.get_running_loop()
        self.faults.attach(
            lambda: _call(loop, self._store.wake), lambda: _call(loop, self._store.forget)
        )
        for name in ("default", "kube-system"):
            self._ensure(str(NAMESPACES), {"metadata": {"name": name}})
        for definition in self._crds:
            self._ensure(CRDS, definition)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self._port))
        await web.SockSite(self._runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/{self._secret}"
        self._tasks = [
            asyncio.create_task(self._store.collect_garbage()),
            asyncio.create_task(self._store.save_changes()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every watch, stop listening, and write the state."""
        self._store.close()
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.save()

    def _ensure(self, plural: str, body: Object) -> None:
        kind = self._store.kinds[plural]
        before = self._store.get(kind, Key("", body["metadata"]["name"]))
        if before is None:
            self._store.put(kind, admit_new(kind, body, "", "Strict").made)
        elif plural == CRDS:
            self._store.put(kind, admit_change(kind, body, before, "Strict").made)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except RefusalError as refusal:
            wait = refusal.retry_after
            headers = {"Retry-After": str(wait)} if wait is not None else {}
            return _json(refusal.status, refusal.code, headers)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not secrets.compare_digest(request.match_info["secret"].encode(), self._secret.encode()):
            raise _no_page()
        parts = request.match_info["path"].strip("/").split("/")
        if parts[0] in ("healthz", "livez", "readyz"):
            return web.Response(text="ok")
        about = self._about(request, parts)
        if about is not None:
            return about
        asked = await self._asked(request, parts)
        verb = _verb(request, asked)
        fault = self.faults.take(verb, asked.kind.resource.plural)
        if fault is not None:
            await _suffer(fault)
        if verb == "watch":
            return await self._watch(request, asked)
        if verb == "list":
            return _json(self._listed(request, asked))
        answer = _VERBS[verb](self._store, asked)
        made = answer.made
        shape = _shape(request)
        if verb == "get" and shape and not asked.subresource:
            version = {"resourceVersion": made["metadata"]["resourceVersion"]}
            made = table(asked.kind, [made], version, shape)
        warnings = [f"299 - {orjson.dumps(one).decode()}" for one in answer.warnings]
        return _json(made, answer.status, {"Warning": ", ".join(warnings)} if warnings else {})

    def _about(self, request: web.Request, parts: list[str]) -> web.Response | None:
        """Answer what is asked about the server itself and its kinds."""
        kinds = self._store.kinds.values()
        made: Object | None
        match parts:
            case ["version"]:
                made = _VERSION
            case ["api"]:
                made = {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                made = group_list(kinds)
            case ["api", version]:
                made = resource_list(kinds, "", version)
            case ["apis", name, version]:
                made = resource_list(kinds, name, version)
            case ["openapi", "v3"]:
                made = openapi.documents(kinds)
            case ["openapi", "v3", *place]:
                made = openapi.document(kinds, "/".join(place))
            case ["api" | "apis", *_]:
                return None
            case _:
                made = None
        if made is None:
            raise _no_page()
        return _json(made)

    async def _asked(self, request: web.Request, parts: list[str]) -> Asked:
        group, *rest = ["", *parts[1:]] if parts[0] == "api" else parts[1:]
        if len(rest) < 2:
            raise _no_page()
        version, *rest = rest
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2 and rest[2] != "status":
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource, *more = [*rest, "", "", ""][: max(3, len(rest))]
        kind = self._store.kinds.get(f"{plural}.{group}" if group else plural)
        if kind is None or kind.resource.version != version or more:
            raise _no_page()
        if (namespace and not kind.resource.namespaced) or (
            subresource and subresource not in kind.subresources
        ):
            raise _no_page()
        body = await request.read()
        content = request.content_type if body else ""
        return Asked(kind, namespace, name, subresource, request.query, content, body)

    def _listed(self, request: web.Request, asked: Asked) -> Object:
        items, metadata = verbs.list_page(self._store, asked)
        if shape := _shape(request):
            return table(asked.kind, items, metadata, shape)
        resource = asked.kind.resource
        kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
        return {**kind, "metadata": metadata, "items": items}

    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        watch = Watch(self._store, self.faults, asked)
        with suppress(ConnectionResetError):  # the client has gone
            await response.prepare(request)
            shape, is_first = _shape(request), True
            async for event in watch.events():
                made = event["object"]
                if shape and event["type"] != "ERROR":
                    metadata = {"resourceVersion": made["metadata"]["resourceVersion"]}
                    rows = [] if event["type"] == "BOOKMARK" else [made]
                    made = table(asked.kind, rows, metadata, shape)
                    if not is_first:
                        made["columnDefinitions"] = None
                    is_first = False
                await response.write(orjson.dumps({**event, "object": made}) + b"\n")
            if watch.is_dropped and request.transport is not None:
                request.transport.abort()
            await response.write_eof()
        return response


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call it on the server's event loop, from any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _verb(request: web.Request, asked: Asked) -> str:
    verb = _METHODS.get(request.method, "")
    if request.method == "GET":
        is_watch = request.query.get("watch") in ("1", "true")
        verb = "get" if asked.name else "watch" if is_watch else "list"
    needs_name = verb in ("get", "update", "patch")
    is_homeless = verb == "create" and asked.kind.resource.namespaced and not asked.namespace
    if (
        not verb
        or needs_name > bool(asked.name)
        or (verb == "create" and asked.name)
        or is_homeless
    ):
        message = "the server does not allow this method on the requested resource"
        raise RefusalError(405, "MethodNotAllowed", message)
    return verb


async def _suffer(fault: Fault) -> None:
    await asyncio.sleep(fault.seconds)
    if fault.status:
        raise fault.refusal()


def _shape(request: web.Request) -> str:
    """Return what rows hold beside their cells where a Table is asked for, else nothing."""
    if "as=Table" not in request.headers.get("Accept", ""):
        return ""
    return request.query.get("includeObject") or "Metadata"


def _json(made: Object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(made)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _no_page() -> web.HTTPNotFound:
    return web.HTTPNotFound(text="404 page not found\n")
