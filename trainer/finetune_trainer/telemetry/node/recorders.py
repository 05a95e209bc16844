"""Asks torch's flight recorder of a rank, which answers from a thread in C++ behind a socket.

So also while the rank holds the interpreter lock; not while it is stopped. See `witness`.
"""

import json
import socket
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from finetune_trainer.telemetry.collectives.groups import CHECKPOINT

_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")  # of NCCL's recorder, and of gloo's
_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 25


def ask_recorder(path: Path, *, with_ring: bool = True) -> bytes | None:
    """Return what the recorder behind a socket has, as JSON; None where it does not answer.

    Without the ring NCCL's tells how far each group is; gloo's always has it.
    """
    with closing(_Connection(path)) as connection:
        try:
            for handler in _HANDLERS:
                wanted = "true" if with_ring else "false"
                connection.request("POST", f"/handler/{handler}?includecollectives={wanted}")
                answer = connection.getresponse()
                text = answer.read(_MAX_BYTES)
                if answer.status == HTTPStatus.OK:
                    return text
        except (OSError, HTTPException):
            pass  # it is stopped, gone, or has no recorder
    return None


def begun_in(dump: bytes) -> int | None:
    """Return how many collectives of training a rank has begun, as its recorder says.

    None where it says something else than this version understands.
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
    """A connection to a socket of this machine."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_SECONDS)
        self.sock.connect(str(self._path))
