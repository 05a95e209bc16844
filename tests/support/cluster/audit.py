"""The API server's audit log: who wrote what, counted from where a reader began."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  resources:
  - {group: coordination.k8s.io}
  - {group: authorization.k8s.io}
  - {group: authentication.k8s.io}
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
"""
"""What an API server must log for `AuditLog`: every write that is stored, but those of Leases."""


@dataclass(frozen=True)
class Write:
    """One write that succeeded.

    Attributes:
        what: Verb and resource, such as `patch finetunejobs/status`.
        name: Of the object.
        received_at: When the API server received the request.
    """

    what: str
    namespace: str
    name: str
    received_at: datetime


class AuditLog:
    """Reads an audit log from its present end; use it as a context manager.

    Args:
        path: The file that the API server appends to.
        who: Beginning of the user's name or of the user agent whose writes count.
    """

    def __init__(self, path: Path, who: str) -> None:
        self._path = path
        self._who = who
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def writes(self) -> list[Write]:
        """Return what was written since the last call; the server logs before it answers."""
        return list(self._new())

    def _new(self) -> Iterator[Write]:
        assert os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()), (
            f"{self._path} was rotated meanwhile; start the API server with a larger "
            "--audit-log-maxsize"
        )
        for line in iter(self._file.readline, b""):
            if not line.endswith(b"\n"):  # its end is being written
                self._file.seek(-len(line), os.SEEK_CUR)
                return
            event = json.loads(line)
            user, agent = event["user"]["username"], event.get("userAgent", "")
            if not (user.startswith(self._who) or agent.startswith(self._who)):
                continue
            if (event.get("responseStatus") or {}).get("code", 500) >= 400:
                continue
            about = event.get("objectRef") or {}
            parts = (about.get("resource", ""), about.get("subresource", ""))
            what = f"{event['verb']} {'/'.join(part for part in parts if part)}"
            received_at = datetime.fromisoformat(event["requestReceivedTimestamp"])
            yield Write(what, about.get("namespace", ""), about.get("name", ""), received_at)


def counted(writes: list[Write]) -> dict[str, int]:
    """Return how often each kind of write was made."""
    return dict(Counter(write.what for write in writes))
