"""Format fields and values in messages; all checks of manifests use it."""

import json
import re
from dataclasses import dataclass
from typing import Any

FieldPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_VALUE = 60


@dataclass(frozen=True)
class Finding:
    """An error in a value of an object, without its position in a file.

    Attributes:
        path: Path of the value, which may be missing.
        message: Message without the path, but with the value.
        is_unknown: Whether the field is not in the schema, so no rule can depend on it.
    """

    path: FieldPath
    message: str
    is_unknown: bool = False


def show_path(path: FieldPath) -> str:
    """Return `spec.restartPolicy.rules[0].action`, or `labels["a.b/c"]` for other keys."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def show_value(value: Any) -> str:
    """Return a value as JSON on one line, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def show_count(number: int, noun: str, plural: str | None = None) -> str:
    """Return `1 node` or `1,024 nodes`; pass the plural if it is not formed with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def is_scalar(value: Any) -> bool:
    """Whether a message can quote the value."""
    return isinstance(value, str | int | float | bool)
