"""Log output: one line per record, as text for people or JSON for machines."""

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune_operator.kernel.settings import LogFormat, LogLevel

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEVELS = {
    "kopf": logging.WARNING,
    "kopf._core.reactor.running": logging.ERROR,  # warns that its thread cannot handle signals
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
}
_KOPFS_REQUESTS = "kopf._cogs.clients.watching"


def set_up(log_format: LogFormat, level: LogLevel, handler: logging.Handler | None = None) -> None:
    """Configure the root logger; records of kopf and aiohttp below WARNING are dropped.

    Args:
        log_format: Format of a line.
        level: Lowest level that is logged.
        handler: Destination of the lines; by default standard error.
    """
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if log_format is LogFormat.JSON else TextLine())
    logging.basicConfig(level=str(level), handlers=[handler], force=True)
    for name, least in _LEVELS.items():
        logging.getLogger(name).setLevel(least)
    logging.getLogger(_KOPFS_REQUESTS).addFilter(_is_first_failure)


def _is_first_failure(record: logging.LogRecord) -> bool:
    """Whether a record of kopf is not about a repeated retry of the same request."""
    message = record.getMessage()
    return not message.startswith("Request attempt #") or message.startswith("Request attempt #1 ")


class LogFile(logging.FileHandler):
    """Log file; a write error is reported once, not for each record."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, the name is given
        """Drop a record that cannot be written, as on a full disk; report other errors as usual."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_warned:
            self._has_warned = True
            print(f"{self.baseFilename} is incomplete: {error.strerror}", file=sys.stderr)


class TextLine(logging.Formatter):
    """`TIME LEVEL message key=value`, always on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        parts = [_time(record), record.levelname, record.getMessage()]
        parts += [f"{key}={_shown(value)}" for key, value in _fields(self, record).items()]
        return " ".join(parts).replace("\n", "\\n")


class JsonLine(logging.Formatter):
    """An object with time, level, logger, message and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(self, record),
        }
        return json.dumps(line, default=str, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _fields(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of the caller, and the traceback of an exception."""
    found = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    # Without the fields that kopf adds to its records for its own formatters.
    fields = {key: value for key, value in found.items() if not key.startswith(("k8s_", "_"))}
    if record.exc_info:
        fields["exception"] = formatter.formatException(record.exc_info)
    return fields


def _shown(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text
