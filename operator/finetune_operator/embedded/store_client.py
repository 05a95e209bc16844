"""The client's verbs on a store in this process: no server, no port, no secret.

`ftctl run` uses it, because no other process needs access to its job. The same code serves
requests over HTTP.
"""

from collections.abc import AsyncIterator, Callable

import orjson

from finetune_operator.embedded.api_requests import VERBS, ApiRequest, parse_request
from finetune_operator.embedded.patches import MERGE
from finetune_operator.embedded.status_errors import StatusError
from finetune_operator.embedded.store import Store
from finetune_operator.embedded.watching import Watch
from finetune_operator.kube.api_errors import error_of
from finetune_operator.kube.client import Call, KubeClient
from finetune_operator.kube.resources import Object


class EmbeddedClient(KubeClient):
    """Client of a store; not a context manager.

    `on_write` is called with each written object; its exception is raised to the caller.
    """

    def __init__(self, store: Store, on_write: Callable[[Object], None]) -> None:
        super().__init__()
        self._store = store
        self._on_write = on_write

    async def exchange(self, call: Call) -> Object:
        """Serve a request."""
        try:
            obj = VERBS[call.verb](self._store, self._request(call)).obj
        except StatusError as error:
            status = error.status
            raise error_of(error.code, status["reason"], status["message"]) from error
        if call.verb not in ("get", "list"):
            self._on_write(obj)
        return obj

    async def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        """Yield the events of a watch."""
        watch = Watch(self._store, self._request(call))
        async for event in watch.events():
            yield orjson.dumps(event)

    def _request(self, call: Call) -> ApiRequest:
        # All bodies are JSON, and all patches are merge patches.
        path = call.path.lstrip("/")
        request = parse_request(self._store, path, call.query, MERGE, call.body or b"")
        if request is None:
            raise error_of(404, "NotFound", f"{call.path} is not served")
        return request
