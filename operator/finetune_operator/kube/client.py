"""The API server's verbs, used by the kernel and by backends.

Objects are JSON as they come (`Object`); nothing is cached. Every failure is an `ApiError` of
`finetune_operator.kube.api_errors`: the errors in a verb's docstring, and for all verbs
ForbiddenError, UnauthorizedError, ThrottledError and UnavailableError.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from finetune_operator.kube.api_errors import ApiError, UnavailableError, error_of
from finetune_operator.kube.resources import PODS, Object, Resource
from finetune_operator.kube.watch import Trim

Propagation = Literal["Background", "Foreground", "Orphan"]
"""What becomes of the objects that a deleted one owns."""


@dataclass(frozen=True)
class ClientOptions:
    """Limits of one client.

    Attributes:
        connections: Concurrent requests; watches and followed logs are not counted.
        request_seconds: Longest time for one request; then it is an UnavailableError.
        silence_seconds: Longest silence of a watch; bookmarks come about once a minute.
        page: Objects of one page of a list.
        seconds_to_write: Time left in which this process may write: the time limit of every write,
            which is refused at 0 or less. None: no limit.
        user_agent: Name of the caller in the API server's audit log.
    """

    connections: int = 32
    request_seconds: float = 20.0
    silence_seconds: float = 150.0
    page: int = 500
    seconds_to_write: Callable[[], float] | None = None
    user_agent: str = "finetune-operator"


@dataclass(frozen=True)
class Listing:
    """All objects of a kind at one moment.

    Attributes:
        resource_version: Where a watch goes on from.
    """

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch.

    Attributes:
        type: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`; a bookmark holds a resourceVersion only.
    """

    type: str
    object: Object

    @property
    def resource_version(self) -> str:
        """Where to go on from after this event."""
        return str(self.object["metadata"]["resourceVersion"])


@dataclass
class CallCounts:
    """Requests so far, by verb, resource and status; 0 where there was no answer."""

    by_kind: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def add(self, verb: str, resource: str, status: int) -> None:
        """Count one request."""
        key = (verb, resource, status)
        self.by_kind[key] = self.by_kind.get(key, 0) + 1


@dataclass(frozen=True)
class Call:
    """One request.

    Attributes:
        verb: As RBAC names it; `log` for the log of a pod.
        path: Without the host.
        body: JSON; None for none.
    """

    verb: str
    resource: Resource
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None

    def __str__(self) -> str:
        """`VERB PATH`, for messages."""
        return f"{self.verb} {self.path}"


class KubeClient(ABC):
    """The API server's verbs; a subclass transports requests in `exchange` and `lines`.

    `kube/http.py` sends them to a cluster, `embedded/store_client.py` serves them in this process.

    Attributes:
        calls: Requests so far.
    """

    def __init__(self, options: ClientOptions | None = None) -> None:
        self.options = options or ClientOptions()
        self.calls = CallCounts()

    @abstractmethod
    async def exchange(self, call: Call) -> Object:
        """Send one request and return the object in its answer; all verbs but streams use it."""

    @abstractmethod
    def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        """Yield the lines of an answer without a set end: a watch, a log."""

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """Return one object.

        Raises:
            NotFoundError: there is none of that name.
        """
        return await self._send("get", resource, resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        trim: Trim | None = None,
    ) -> Listing:
        """Return all objects, read page by page; None as namespace means all.

        Raises:
            GoneError: the list took so long that its version is gone; start again.
            NotFoundError: the kind is not served.
        """
        items: list[Object] = []
        asked: dict[str, str] = {"limit": str(self.options.page)}
        if label_selector:
            asked["labelSelector"] = label_selector
        if field_selector:
            asked["fieldSelector"] = field_selector
        path = resource.path(namespace)
        while True:
            page = await self._send("list", resource, path, query=asked)
            items += map(trim, page["items"]) if trim else page["items"]
            if not (token := page["metadata"].get("continue")):
                return Listing(items, page["metadata"]["resourceVersion"])
            asked["continue"] = token

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        """Create an object and return it as stored; unknown fields are refused.

        Raises:
            AlreadyExistsError: the name is taken.
            ConflictError: it cannot be created now, as its namespace is being deleted.
            InvalidError: it will never be accepted as it is.
            ForbiddenError: RBAC, a quota or an admission plugin.
            NotFoundError: there is no such namespace.
            UnavailableError: no answer; it may exist nevertheless.
            NotLeadingError: this process may not write.
        """
        query = {"fieldValidation": "Strict"}
        return await self._send(
            "create", resource, resource.path(namespace), body=body, query=query
        )

    async def replace(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        """Replace an object by `body`, whose resourceVersion, if set, must be the stored one.

        Raises:
            ConflictError: somebody else changed it since.
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
        """Merge `patch` into an object and return it; a null removes a field.

        A `metadata.resourceVersion` in the patch must be the stored one, and so must a
        `metadata.uid`; a wrong uid is a ConflictError or an InvalidError, depending on the kind.

        Raises:
            NotFoundError: there is none of that name.
            ConflictError: it is not the one that the patch was made for.
            InvalidError: the outcome is not acceptable.
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
        """Delete an object; it stays until its grace is over and its finalizers are gone.

        With `uid` only this very object is deleted. `grace_seconds` is the time that a pod gets
        between SIGTERM and SIGKILL; None leaves it the pod's own.

        Raises:
            NotFoundError: there is none of that name.
            ConflictError: its uid is another.
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
        """Yield what changes after `resource_version`, until the server ends the watch.

        Ending is normal, after `timeout_seconds` at most: go on from the last event's (also a
        bookmark's) `resource_version`.

        Raises:
            GoneError: the resourceVersion is too old; list again.
            UnavailableError: the connection broke, also in the middle of an event, or the server
                said nothing, not even a bookmark, for `silence_seconds`.
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
                event = orjson.loads(line)
                made, kind = event["object"], event["type"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                # A proxy that was cut off ends a watch in the middle of a line.
                raise no_answer(error, call) from error
            if kind == "ERROR":
                raise error_in(int(made.get("code", 500)), made, None)
            yield WatchEvent(kind, made)

    async def log(
        self,
        name: str,
        namespace: str,
        *,
        container: str | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[str]:
        """Yield the lines of a pod's log, without line ends.

        `container` may be None where there is only one; `tail` limits it to the last lines;
        `follow` goes on until the container ends.

        Raises:
            NotFoundError: there is no such pod.
            InvalidError: the container has not started.
        """
        query: dict[str, str] = {"container": container} if container else {}
        if tail is not None:
            query["tailLines"] = str(tail)
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


def error_in(status: int, said: Mapping[str, Any], header: str | None) -> ApiError:
    """Return the error for an answer with this HTTP status."""
    details = said.get("details") or {}
    wait = header if header and header.isdigit() else details.get("retryAfterSeconds")
    message = str(said.get("message") or f"the API server answered {status}")
    return error_of(
        status, str(said.get("reason") or ""), message, None if wait is None else float(wait)
    )


def no_answer(error: Exception, call: Call) -> ApiError:
    """Return the error of a request without an answer that can be read."""
    if isinstance(error, asyncio.TimeoutError):
        return UnavailableError(0, "Timeout", f"no answer in time to {call}")
    word = str(error) or type(error).__name__
    return UnavailableError(0, type(error).__name__, f"no answer to {call} ({word})")


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns one object into another."""
    made: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                made[key] = inner
        elif value != before or key not in old:
            made[key] = value
    return made
