"""The client's verbs on a store in this process: no server, no port, no secret.

`ftctl run` uses it: its one job is nobody else's business. Requests are served by the same code as
those that come over HTTP.
"""

from collections.abc import AsyncIterator, Callable, Mapping

import orjson

from finetune_operator.embedded.faults import Faults
from finetune_operator.embedded.patches import MERGE
from finetune_operator.embedded.status_errors import StatusError
from finetune_operator.embedded.store import Store
from finetune_operator.embedded.verbs import VERBS, Asked, asked_for
from finetune_operator.embedded.watching import Watch
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.errors import error_of
from finetune_operator.kube.resources import Object, Resource


class EmbeddedClient(KubeClient):
    """The verbs on a store; it needs no `async with`.

    Args:
        store: What it reads and writes.
        on_write: Called with each object that was written; what it raises is the answer.
    """

    def __init__(self, store: Store, on_write: Callable[[Object], None]) -> None:
        super().__init__()
        self._store = store
        self._faults = Faults(store)
        self._on_write = on_write

    async def exchange(
        self,
        verb: str,
        resource: Resource,
        path: str,
        data: bytes | None,
        query: Mapping[str, str] | None,
    ) -> Object:
        """Serve one request."""
        try:
            made = VERBS[verb](self._store, self._asked(path, query or {}, data)).made
        except StatusError as error:
            said = error.status
            raise error_of(error.code, said["reason"], said["message"]) from error
        if verb not in ("get", "list"):
            self._on_write(made)
        return made

    async def lines(
        self,
        verb: str,
        resource: Resource,
        path: str,
        query: Mapping[str, str],
        *,
        is_patient: bool = False,
    ) -> AsyncIterator[bytes]:
        """Yield the events of a watch."""
        watch = Watch(self._store, self._faults, self._asked(path, query))
        async for event in watch.events():
            yield orjson.dumps(event)

    def _asked(self, path: str, query: Mapping[str, str], data: bytes | None = None) -> Asked:
        # Every body is JSON, and every patch a merge patch.
        asked = asked_for(self._store, path.lstrip("/"), query, MERGE, data or b"")
        if asked is None:
            raise error_of(404, "NotFound", f"{path} is not served")
        return asked
