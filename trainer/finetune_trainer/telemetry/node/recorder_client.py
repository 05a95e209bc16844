"""Query the flight recorder of a rank, which a C++ thread serves on a socket.

The recorder responds even while a thread of the rank holds the interpreter lock, but not while the
process is stopped. See `witness`.
"""

import json
import socket
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from finetune_trainer.telemetry.collectives.groups import CHECKPOINT

_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")  # NCCL's and gloo's recorder
_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 25


def query_recorder(path: Path, *, with_ring: bool = True) -> bytes | None:
    """Return the contents of the recorder behind a socket, as JSON; None if it does not respond.

    Without the ring, NCCL's recorder reports only each group's progress; gloo's always adds it.
    """
    with closing(_Connection(path)) as connection:
        try:
            for handler in _HANDLERS:
                wanted = "true" if with_ring else "false"
                connection.request("POST", f"/handler/{handler}?includecollectives={wanted}")
                response = connection.getresponse()
                text = response.read(_MAX_BYTES)
                if response.status == HTTPStatus.OK:
                    return text
        except (OSError, HTTPException):
            pass  # stopped, gone, or without a recorder
    return None


def num_begun(dump: bytes) -> int | None:
    """Return the number of collectives that a rank's training has begun, from a recorder's dump.

    None if this version cannot parse the dump.
    """
    try:
        found = json.loads(dump)
        entries = found.get("entries", ())
        apart = {str(one["pg_id"]) for one in entries if one["process_group"][1] == CHECKPOINT}
        begun = [
            max(0, int(status["last_enqueued_collective"]))
            for group, status in found["pg_status"].items()
            if group not in apart
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return sum(begun) if begun else None


class _Connection(HTTPConnection):
    """HTTP connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_SECONDS)
        self.sock.connect(str(self._path))
