"""Mark the end of each text of a turn with a private-use character, to find it when rendered.

Called by `turns`, which renders the marked turn in addition to the turn itself.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from finetune_trainer.data.formats import Message
from finetune_trainer.data.special import FIRST_MARK

# Keys for the thoughts of a turn; transformers copies the first one to the others.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class Marked(NamedTuple):
    """A turn with a mark after each of its texts.

    Attributes:
        mark_of: Mark of each text, by key.
        marks_of_calls: Marks after the names and arguments of the calls.
    """

    message: Message
    mark_of: dict[str, str]
    marks_of_calls: list[str]


def mark_turn(turn: Message) -> Marked:
    """Return `turn` with marks, each a different private-use character."""
    marks = (chr(number) for number in count(FIRST_MARK))
    marked, mark_of = _mark_texts(turn, marks)
    calls, marks_of_calls = _mark_calls(turn.get("tool_calls", []), marks)
    if calls:
        marked["tool_calls"] = calls
    return Marked(marked, mark_of, marks_of_calls)


def _mark_texts(turn: Message, marks: Iterator[str]) -> tuple[Message, dict[str, str]]:
    """Put a mark after each text of a turn; thoughts under several keys get one mark."""
    marked, mark_of = dict(turn), {}
    seen: dict[str, str] = {}
    for name in ("content", *THOUGHTS):
        text = turn.get(name)
        if not isinstance(text, str) or not text.strip():
            continue
        is_known = name != "content" and text in seen
        mark = seen[text] if is_known else next(marks)
        ended = text.rstrip()
        marked[name] = ended + mark + text[len(ended) :]
        if not is_known:
            mark_of[name] = mark
        if name != "content":
            seen[text] = mark
    return marked, mark_of


def _mark_calls(calls: Any, marks: Iterator[str]) -> tuple[Any, list[str]]:
    """Put a mark after the name and the texts of each call's function."""
    used: list[str] = []

    def mark(text: str) -> str:
        used.append(next(marks))
        return text + used[-1]

    marked = []
    for call in calls:
        inner = call.get("function", call)
        if not isinstance(inner, dict):
            marked.append(call)
            continue
        changed = dict(inner)
        if isinstance(inner.get("name"), str):
            changed["name"] = mark(inner["name"])
        if isinstance(inner.get("arguments"), dict):
            changed["arguments"] = {
                key: _mark_values(item, mark) for key, item in inner["arguments"].items()
            }
        marked.append(call | {"function": changed} if "function" in call else changed)
    return marked, used


def _mark_values(value: Any, mark: Any) -> Any:
    """Mark the texts of a value, but not the keys of its mappings."""
    if isinstance(value, dict):
        return {key: _mark_values(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark_values(item, mark) for item in value]
    return mark(value) if isinstance(value, str) else value


def legible(shown: str, marks: list[str]) -> str:
    """Restore marks that a template has printed as Python's `repr` escapes, within mappings."""
    for mark in marks:
        shown = shown.replace(f"\\U{ord(mark):08x}", mark)
    return shown


def without_marks(text: str, marks: list[str]) -> str:
    """Remove `marks` from a rendered text."""
    for mark in marks:
        text = text.replace(mark, "")
    return text
