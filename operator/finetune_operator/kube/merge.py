"""The patch that turns one object into another. Pure."""

from typing import Any


def merge_patch(old: Any, new: Any) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7396) that turns one object into another."""
    made: dict[str, Any] = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := merge_patch(before, value):
                made[key] = inner
        elif value != before or key not in old:
            made[key] = value
    return made
