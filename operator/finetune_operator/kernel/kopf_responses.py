"""Responses of the API server as kopf reads them: lists without objects, and events without depth.

kopf decodes each line of a watch with `json.loads`, which fails on objects that are deeper than
`kube/decoding.py` permits. kopf would end and list again indefinitely.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp.connector import Connection

from finetune_operator.kube.decoding import IN_EVENT, IN_LIST, MAX_DEPTH, decode, shallow


class CutResponse(aiohttp.ClientResponse):
    """A response without deep subtrees."""

    async def json(self, **_: Any) -> Any:
        """Return the decoded body; of a list only its version, as if it were empty.

        kopf continues with a watch from that version. `Resync` lists the objects.
        """
        body = decode(await self.read(), IN_LIST)
        if isinstance(body, dict) and "items" in body:
            version = (body.get("metadata") or {}).get("resourceVersion")
            return {**body, "items": [], "metadata": {"resourceVersion": version}}
        return body

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the headers."""
        await super().start(connection)
        self.content = _CutLines(self.content)  # type: ignore[assignment]  # delegates the rest
        return self


class _CutLines:
    """A stream whose chunks are whole lines, each without deep subtrees."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        """Yield the lines of the stream, including an incomplete last line."""
        rest = b""
        async for chunk in self._stream.iter_chunked(n):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield shallow(line, MAX_DEPTH + IN_EVENT) + b"\n"
        if rest:
            yield rest
