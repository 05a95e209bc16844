"""Client for the verbs of the API server, used by the kernel and by backends.

Objects are plain JSON (`Object`), without a cache. Every failure is an `ApiError` of
`finetune_operator.kube.api_errors`. Each verb's docstring lists its errors; every verb can also
raise ForbiddenError, UnauthorizedError, ThrottledError and UnavailableError.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from finetune_operator.kube.api_errors import (
    ApiError,
    LargePageError,
    NotFoundError,
    UnavailableError,
    error_of,
)
from finetune_operator.kube.decoding import IN_EVENT, decode
from finetune_operator.kube.resources import PODS, Object, Resource
from finetune_operator.kube.watch import Trim

Propagation = Literal["Background", "Foreground", "Orphan"]
"""How a deletion treats the dependents of the object."""


@dataclass(frozen=True)
class ClientOptions:
    """Limits of one client.

    Attributes:
        connections: Maximum concurrent requests, without watches and followed logs.
        request_seconds: Timeout of a request, which then raises UnavailableError.
        silence_seconds: Maximum silence of a watch; bookmarks arrive about once a minute.
        page: Most objects per page of a list.
        page_bytes: Most bytes of a page with more than one object. Decoded objects take up to 30
            times the memory of their text, and their authors choose their size.
        seconds_to_write: Returns the time left in which this process may write. It is the timeout
            of every write; at 0 or less the write is refused. None: no limit.
        user_agent: Name of the caller in the API server's audit log.
    """

    connections: int = 32
    request_seconds: float = 20.0
    silence_seconds: float = 150.0
    page: int = 500
    page_bytes: int = 2**22
    seconds_to_write: Callable[[], float] | None = None
    user_agent: str = "finetune-operator"


@dataclass(frozen=True)
class Listing:
    """All objects of a kind at one moment.

    Attributes:
        resource_version: Version from which a watch continues.
    """

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """An event of a watch.

    Attributes:
        type: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`; a bookmark has only a resourceVersion.
    """

    type: str
    object: Object

    @property
    def resource_version(self) -> str:
        """Version from which the next watch continues."""
        return str(self.object["metadata"]["resourceVersion"])


OUTAGE_SECONDS = 15.0
"""Time without any response after which the API server counts as unavailable."""


@dataclass
class CallCounts:
    """Number of requests by verb, resource and HTTP status; status 0 means no response.

    Attributes:
        responded_at: When a request last had a response, on the loop's clock.
        unavailable_at: When the API server was last unavailable: a request had no response, nor had
            any other request in the `OUTAGE_SECONDS` before.
    """

    by_kind: dict[tuple[str, str, int], int] = field(default_factory=dict)
    responded_at: float = -math.inf
    unavailable_at: float = -math.inf

    def add(self, verb: str, resource: str, status: int) -> None:
        """Count one request."""
        key = (verb, resource, status)
        self.by_kind[key] = self.by_kind.get(key, 0) + 1
        now = asyncio.get_running_loop().time()
        if status:
            self.responded_at = now
        elif now - self.responded_at > OUTAGE_SECONDS:
            self.unavailable_at = now


@dataclass(frozen=True)
class Call:
    """A request.

    Attributes:
        verb: RBAC verb, or `log` for the log of a pod.
        path: URL path without the host.
        body: JSON; None for no body.
        max_bytes: Most bytes of the response; None for no limit.
    """

    verb: str
    resource: Resource
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    max_bytes: int | None = None

    def __str__(self) -> str:
        """Return `VERB PATH`, for messages."""
        return f"{self.verb} {self.path}"


class KubeClient(ABC):
    """The API server's verbs; a subclass transports requests in `exchange` and `lines`.

    `kube/http.py` sends them to a cluster, `embedded/store_client.py` serves them in this process.

    Attributes:
        calls: Number of requests so far.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.options = options or ClientOptions()
        self.calls = CallCounts()

    @abstractmethod
    async def exchange(self, call: Call) -> Object:
        """Send a request and return the object in the response; streams use `lines` instead.

        Raises:
            LargePageError: the response has more than `max_bytes`.
        """

    @abstractmethod
    def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        """Yield the lines of a streaming response: a watch or a log."""

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """Return one object.

        Raises:
            NotFoundError: no object of that name exists.
        """
        return await self._send("get", resource, resource.path(namespace, name))

    async def serves(self, group: str) -> bool:
        """Return whether the API server serves an API group, which every account may ask."""
        discovery = Resource(group, "", "discovery", "", namespaced=False)
        try:
            await self._send("get", discovery, f"/apis/{group}")
        except NotFoundError:
            return False
        return True

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        trim: Trim | None = None,
    ) -> Listing:
        """Return all objects, read page by page; None as namespace means all namespaces.

        A page with too many bytes is requested again with half of the objects.

        Raises:
            GoneError: the continue token expired before the last page; list again.
            NotFoundError: the kind is not served.
        """
        items: list[Object] = []
        query, limit = dict[str, str](), self.options.page
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        path = resource.path(namespace)
        while True:
            query["limit"] = str(limit)
            max_bytes = self.options.page_bytes if limit > 1 else None
            try:
                page = await self.exchange(Call("list", resource, path, query, None, max_bytes))
            except LargePageError:
                limit = max(1, limit // 2)
                continue
            items += map(trim, page["items"]) if trim else page["items"]
            if not (token := page["metadata"].get("continue")):
                return Listing(items, page["metadata"]["resourceVersion"])
            query["continue"] = token

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        """Create an object and return it as stored; unknown fields are refused.

        Raises:
            AlreadyExistsError: the name is taken.
            ConflictError: the object cannot be created now, because its namespace is terminating.
            InvalidError: the server will never accept this object.
            ForbiddenError: refused by RBAC, a quota or an admission plugin.
            NotFoundError: the namespace does not exist.
            UnavailableError: no response; the object may exist nevertheless.
            NotLeadingError: this process may not write.
        """
        query = {"fieldValidation": "Strict"}
        return await self._send(
            "create", resource, resource.path(namespace), body=body, query=query
        )

    async def replace(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        """Replace an object by `body`, whose resourceVersion, if set, must match the stored object.

        Raises:
            ConflictError: another writer has changed the object.
            NotFoundError, InvalidError, NotLeadingError: as for `create`.
        """
        path = resource.path(namespace, str(body["metadata"]["name"]))
        return await self._send("update", resource, path, body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any],
        *,
        subresource: Literal["status"] | None = None,
    ) -> Object:
        """Merge `patch` into an object and return the result; a null removes a field.

        A `metadata.resourceVersion` or `metadata.uid` in the patch must match the stored object;
        a different uid raises ConflictError or InvalidError, depending on the kind.

        Raises:
            NotFoundError: no object of that name exists.
            ConflictError: the object differs from the preconditions in the patch.
            InvalidError: the patched object is invalid.
            NotLeadingError: this process may not write.
        """
        parts = (name, subresource) if subresource else (name,)
        path = resource.path(namespace, *parts)
        return await self._send("patch", resource, path, body=patch)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_seconds: float | None = None,
        propagation: Propagation = "Background",
    ) -> None:
        """Delete an object, which remains until its grace period ends and it has no finalizers.

        With `uid`, an object of the same name and another uid is not deleted. `grace_seconds` is
        the time of a pod between SIGTERM and SIGKILL; None means the grace period in its spec.

        Raises:
            NotFoundError: no object of that name exists.
            ConflictError: the object has another uid.
            NotLeadingError: this process may not write.
        """
        body: Object = {"propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = max(0, round(grace_seconds))
        await self._send("delete", resource, resource.path(namespace, name), body=body)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 300,
    ) -> AsyncIterator[WatchEvent]:
        """Yield the changes after `resource_version`, until the server ends the watch.

        A server normally ends a watch after at most `timeout_seconds`: continue from the
        `resource_version` of the last event, bookmarks included.

        Raises:
            GoneError: the resourceVersion is too old; list again.
            UnavailableError: the connection broke, possibly within an event, or the server sent
                neither an event nor a bookmark for `silence_seconds`.
            NotFoundError: the kind is not served.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(timeout_seconds),
        }
        if label_selector:
            query["labelSelector"] = label_selector
        call = Call("watch", resource, resource.path(namespace), query)
        async for line in self.lines(call):
            try:
                event = decode(line, IN_EVENT)
                obj, kind = event["object"], event["type"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                # A proxy whose connection broke ends a watch in the middle of a line.
                raise no_response(error, call) from error
            if kind == "ERROR":
                raise error_in(int(obj.get("code", 500)), obj, None)
            yield WatchEvent(kind, obj)

    async def log(
        self,
        name: str,
        namespace: str,
        *,
        container: str | None = None,
        tail: int | None = None,
        max_bytes: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the lines of a pod's log, without line ends.

        `container` may be None if the pod has only one. `tail` is the number of last lines, of
        which the first `max_bytes` are read; `follow` continues until the container terminates.

        Raises:
            NotFoundError: the pod does not exist.
            InvalidError: the container has not started.
        """
        query: dict[str, str] = {"container": container} if container else {}
        if tail is not None:
            query["tailLines"] = str(tail)
        if max_bytes is not None:
            query["limitBytes"] = str(max_bytes)
        if follow:
            query["follow"] = "true"
        call = Call("log", PODS, PODS.path(namespace, name, "log"), query)
        async for line in self.lines(call, is_patient=follow):
            yield line.decode(errors="replace")

    async def _send(
        self,
        verb: str,
        resource: Resource,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        data = None if body is None else orjson.dumps(body)
        return await self.exchange(Call(verb, resource, path, query or {}, data))


def error_in(status: int, body: Mapping[str, Any], header: str | None) -> ApiError:
    """Return the error for a response.

    Args:
        status: HTTP status.
        body: The `Status` object in the response.
        header: Value of `Retry-After`; None if it is absent.
    """
    details = body.get("details") or {}
    wait = header if header and header.isdigit() else details.get("retryAfterSeconds")
    message = str(body.get("message") or f"the API server returned HTTP status {status}")
    return error_of(
        status, str(body.get("reason") or ""), message, None if wait is None else float(wait)
    )


def no_response(error: Exception, call: Call) -> ApiError:
    """Return the error for a request without a readable response."""
    if isinstance(error, asyncio.TimeoutError):
        return UnavailableError(0, "Timeout", f"{call} timed out")
    reason = str(error) or type(error).__name__
    return UnavailableError(0, type(error).__name__, f"no response to {call} ({reason})")


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns one object into another."""
    patch: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                patch[key] = inner
        elif value != before or key not in old:
            patch[key] = value
    return patch
