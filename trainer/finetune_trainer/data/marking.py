"""Mark the end of each text of a turn with a private-use character, to find it when rendered.

Called by `turns`, which renders the marked turn in addition to the turn itself.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

from finetune_trainer.data.formats import Message
from finetune_trainer.data.special import FIRST_MARK, FIRST_SPECIAL, SHIELD

_FEW = 32  # marks that `replace` removes faster than `translate`
FIRST_OF_MESSAGES = FIRST_MARK + 0x800  # the marks before belong to a single turn

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
    marks = map(chr, count(FIRST_MARK))
    marked, mark_of = _mark_texts(turn, marks)
    calls, marks_of_calls = _mark_calls(turn.get("tool_calls", []), marks)
    if calls:
        marked["tool_calls"] = calls
    return Marked(marked, mark_of, marks_of_calls)


def mark_messages(messages: Sequence[Message]) -> tuple[list[Message], list[list[str]]]:
    """Return `messages` with marks, and the marks by which to recognise each one when rendered.

    A message is recognised by its content, and a message of calls by the name of each call: the
    text beside a call is a thought, which templates omit later. A message without text has no mark.
    If the private-use characters are too few, the first messages have none.
    """
    marks = map(chr, range(FIRST_OF_MESSAGES, FIRST_SPECIAL))
    marked, marks_of = list(messages), [list[str]() for _ in messages]
    for place in reversed(range(len(messages))):
        message, used = messages[place], list(islice(marks, _num_texts(messages[place])))
        if len(used) < _num_texts(message):
            break
        if message.get("tool_calls"):
            calls = _mark_names(message["tool_calls"], iter(used))
            marked[place] = {**message, "tool_calls": calls}
        elif used:
            text = message["content"].rstrip()
            content = text + used[0] + message["content"][len(text) :]
            marked[place] = {**message, "content": content}
        marks_of[place] = used
    return marked, marks_of


def _num_texts(message: Message) -> int:
    """Return the number of texts by which a message is recognised."""
    if calls := message.get("tool_calls"):
        return sum(isinstance(_inner(call).get("name"), str) for call in calls)
    return bool(message["content"].strip())


def _mark_names(calls: list[dict[str, Any]], marks: Iterator[str]) -> list[dict[str, Any]]:
    """Put a mark after the name of each call's function."""
    marked = []
    for call in calls:
        inner = _inner(call)
        if isinstance(inner.get("name"), str):
            inner = {**inner, "name": inner["name"] + next(marks)}
        is_nested = isinstance(call.get("function"), dict)
        marked.append({**call, "function": inner} if is_nested else inner)
    return marked


def _inner(call: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a call, which may be the call itself."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


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


def without_numbers(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call in which a text that no row contains replaces each number and truth value."""
    inner = _inner(call)
    if not isinstance(inner.get("arguments"), dict):
        return call
    arguments = {
        key: SHIELD if isinstance(value, int | float) else value
        for key, value in inner["arguments"].items()
    }
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if isinstance(call.get("function"), dict) else inner


def legible(shown: str, marks: list[str]) -> str:
    """Restore marks that a template has printed as Python's `repr` escapes, within mappings."""
    if "\\U" not in shown:
        return shown
    for mark in marks:
        shown = shown.replace(f"\\U{ord(mark):08x}", mark)
    return shown


def without_marks(text: str, marks: list[str]) -> str:
    """Remove `marks` from a rendered text."""
    if len(marks) > _FEW:  # a pass for each would take time quadratic in the messages
        return text.translate(dict.fromkeys(map(ord, marks)))
    for mark in marks:
        text = text.replace(mark, "")
    return text
