"""The client's verbs on a store in this process: no server, no port, no secret.

`ftctl run` uses it, as nobody else needs to reach its one job. The same code serves requests that
come over HTTP.
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
    """The verbs on a store; it needs no `async with`.

    `on_write` is called with each object that was written; what it raises is the answer.
    """

    def __init__(self, store: Store, on_write: Callable[[Object], None]) -> None:
        super().__init__()
        self._store = store
        self._on_write = on_write

    async def exchange(self, call: Call) -> Object:
        """Serve one request."""
        try:
            made = VERBS[call.verb](self._store, self._request(call)).made
        except StatusError as error:
            said = error.status
            raise error_of(error.code, said["reason"], said["message"]) from error
        if call.verb not in ("get", "list"):
            self._on_write(made)
        return made

    async def lines(self, call: Call, *, is_patient: bool = False) -> AsyncIterator[bytes]:
        """Yield the events of a watch."""
        watch = Watch(self._store, self._request(call))
        async for event in watch.events():
            yield orjson.dumps(event)

    def _request(self, call: Call) -> ApiRequest:
        # Every body is JSON, and every patch a merge patch.
        path = call.path.lstrip("/")
        request = parse_request(self._store, path, call.query, MERGE, call.body or b"")
        if request is None:
            raise error_of(404, "NotFound", f"{call.path} is not served")
        return request
