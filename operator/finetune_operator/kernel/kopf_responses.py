"""Responses of the API server as kopf reads them: lists without objects, and events with texts.

kopf decodes each line of a watch with `json.loads`, which fails on objects that are deeper than
`kube/decoding.py` permits. kopf would end and list again indefinitely. Decoded, an object takes
about five times the memory of its text, and kopf has many events at once.
"""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp.connector import Connection

from finetune_operator.kube.decoding import IN_EVENT, IN_LIST, decode
from finetune_operator.kube.watch import trim_metadata

_NAMES = ("name", "namespace", "uid", "resourceVersion")
_CHANGES = ("ADDED", "MODIFIED", "DELETED")


class BriefResponse(aiohttp.ClientResponse):
    """A response that is cheap to decode and to retain."""

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
        self.content = _BriefEvents(self.content)  # type: ignore[assignment]  # delegates the rest
        return self


class _BriefEvents:
    """A stream whose chunks are whole lines, each with a brief event."""

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
                yield _brief(line) + b"\n"
        if rest:
            yield rest


def _brief(line: bytes) -> bytes:
    """Return an event whose object has its names, and itself as JSON in `text`.

    Raises:
        json.JSONDecodeError: The line is not JSON, as kopf would raise it.
    """
    event = decode(line, IN_EVENT)
    if event.get("type") not in _CHANGES:
        return line
    obj = event["object"]
    metadata = {name: obj["metadata"][name] for name in _NAMES if name in obj["metadata"]}
    text = orjson.dumps(trim_metadata(obj)).decode()
    return orjson.dumps({"type": event["type"], "object": {"metadata": metadata, "text": text}})
