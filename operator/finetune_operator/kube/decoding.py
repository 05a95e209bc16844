"""Decodes JSON of the API server, whose depth the authors of objects choose.

No schema limits the depth of `metadata.managedFields`. Decoders, encoders and comparisons fail at
different depths, and one object that fails would fail the list of all objects of its kind. A
subtree below MAX_DEPTH is therefore replaced by the string CUT before the text is decoded. All
steps are single calls of C functions, because a page of a list has megabytes.
"""

from array import array
from itertools import accumulate
from typing import Any

import orjson

MAX_DEPTH = 100
"""Levels of an object that are decoded; an object without fields has one level."""

CUT = f"(deeper than {MAX_DEPTH} levels, and therefore not read)"
"""Value in place of a deeper subtree."""

IN_LIST = 2
"""Levels around each object of a list."""
IN_EVENT = 1
"""Levels around the object of a watch event."""

_STEPS = bytes(1 if char in b"[{" else 255 if char in b"]}" else 0 for char in range(256))
_NEITHER_BRACKETS_NOR_QUOTES = bytes(set(range(256)) - set(b'[]{}"'))


def decode(text: bytes, around: int = 0) -> Any:
    """Return the value of a JSON text, with CUT in place of each subtree below MAX_DEPTH.

    Args:
        text: The text.
        around: Levels of the text around each object; `IN_LIST`, `IN_EVENT`, or 0.

    Raises:
        orjson.JSONDecodeError: The text is not JSON.
    """
    return orjson.loads(shallow(text, MAX_DEPTH + around))


def shallow(text: bytes, levels: int) -> bytes:
    """Return the text with CUT in place of each subtree below `levels`."""
    if text.count(b"{") + text.count(b"[") <= levels or _depth(text) <= levels:
        return text
    cut, parts, end = f'"{CUT}"'.encode(), list[bytes](), 0
    depths = array("i", accumulate(array("b", _without_strings(text).translate(_STEPS))))
    while (start := _find(depths, levels + 1, end)) >= 0:
        parts += (text[end:start], cut)
        # Truncated text ends inside of the subtree; the decoder reports that.
        end = _find(depths, levels, start) + 1 or len(text)
    return b"".join((*parts, text[end:]))


def _depth(text: bytes) -> int:
    """Return the number of levels of a text."""
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = b"".join(unescaped.translate(None, _NEITHER_BRACKETS_NOR_QUOTES).split(b'"')[::2])
    return max(accumulate(array("b", brackets.translate(_STEPS))), default=0)


def _without_strings(text: bytes) -> bytes:
    """Return the text with a space in place of each byte of a string."""
    pieces = text.replace(rb"\\", b"  ").replace(rb"\"", b"  ").split(b'"')
    pieces[1::2] = [b" " * len(piece) for piece in pieces[1::2]]
    return b" ".join(pieces)


def _find(depths: "array[int]", depth: int, start: int) -> int:
    """Return the first position of a depth; -1 if there is none."""
    try:
        return depths.index(depth, start)
    except ValueError:
        return -1
