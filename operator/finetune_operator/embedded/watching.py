"""A watch: existing objects, changes, bookmarks, and its end.

`server.py` sends the events that it yields. It waits only for the store.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from finetune_operator.embedded.api_requests import ApiRequest
from finetune_operator.embedded.selectors import selects
from finetune_operator.embedded.status_errors import StatusError
from finetune_operator.embedded.store import Change, Store
from finetune_operator.kube.resources import Object

_DEFAULT_SECONDS = 1800  # if the client sets no timeout
_BOOKMARK_SECONDS = 10.0


class Watch:
    """The events of a watch request.

    Raises:
        StatusError: a parameter is invalid.
    """

    def __init__(self, store: Store, request: ApiRequest) -> None:
        self._store = store
        self._request = request
        self._at = request.number("resourceVersion")
        self._seconds = request.number("timeoutSeconds") or _DEFAULT_SECONDS
        has_bookmarks = request.query.get("allowWatchBookmarks") == "true"
        self._bookmark_seconds = _BOOKMARK_SECONDS if has_bookmarks else math.inf
        self._marks_initial_end = request.query.get("sendInitialEvents") == "true"
        self._sends_initial = self._marks_initial_end or not self._at
        self._matches = selects(request.kind, request.key.namespace, request.query)

    async def events(self) -> AsyncIterator[Object]:
        """Yield events until the timeout of the watch, or until the store is closed."""
        clock = asyncio.get_running_loop().time
        end, bookmark_at = clock() + self._seconds, clock() + self._bookmark_seconds
        for event in self._initial_events():
            yield event
        while not self._store.is_closed and clock() < end:
            try:
                changes = self._store.since(self._at, str(self._request.kind.resource))
            except StatusError as error:
                yield {"type": "ERROR", "object": error.status}
                return
            self._at = self._store.version
            for event in filter(None, map(self._event, changes)):
                yield event
            if clock() >= bookmark_at:
                bookmark_at = clock() + self._bookmark_seconds
                yield self._bookmark({})
            if self._at == self._store.version:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(end, bookmark_at)):
                        await self._store.changed()

    def _initial_events(self) -> Iterator[Object]:
        """Yield the existing objects, if the client has no version of them yet."""
        if not self._sends_initial:
            return
        self._at = self._store.version
        for obj in filter(self._matches, self._store.objects(self._request.kind)):
            yield {"type": "ADDED", "object": obj}
        if self._marks_initial_end:
            yield self._bookmark({"annotations": {"k8s.io/initial-events-end": "true"}})

    def _event(self, change: Change) -> Object | None:
        """Return the event for a client that sees only the selected objects; None for no event."""
        did_match = change.before is not None and self._matches(change.before)
        does_match = change.type != "DELETED" and self._matches(change.obj)
        if not did_match and not does_match:
            return None
        kind = "DELETED" if not does_match else "MODIFIED" if did_match else "ADDED"
        return {"type": kind, "object": change.obj}

    def _bookmark(self, more: Object) -> Object:
        resource = self._request.kind.resource
        metadata = {"resourceVersion": str(self._at), "creationTimestamp": None, **more}
        kind = {"kind": resource.kind, "apiVersion": resource.api_version}
        return {"type": "BOOKMARK", "object": {**kind, "metadata": metadata}}
