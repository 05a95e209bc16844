"""Find the readings of a data set that its column names allow.

Called by `detection`. Pure: it sees the first rows, and never picks among several readings.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from finetune_trainer.config import ColumnMap, DataFormat
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError

MESSAGES = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
PROMPTS = ("instruction", "prompt", "question", "query", "problem", "request", "user", "human")
RESPONSES = (
    *("completion", "output", "response", "answer", "solution", "reply"),
    *("assistant", "gpt", "bot"),
)
CONTEXTS = ("input", "context")
WITH_CONTEXT = ("instruction", "question", "query")  # prompts that a context may follow
SYSTEMS = ("system_message", "systemprompt", "system_text")  # beside the names that are read
TEXTS = ("text", "content", "document", "body", "code")
NATURAL = {
    *(("prompt", "completion"), ("prompt", "response"), ("question", "answer")),
    *(("query", "response"), ("instruction", "output"), ("instruction", "response")),
    *(("problem", "solution"), ("problem", "answer"), ("user", "assistant")),
    *(("human", "assistant"), ("human", "gpt"), ("human", "bot")),
}
FORMATS = {
    DataFormat.CHAT: ("messages", "prompt", "completion", "system"),
    DataFormat.INSTRUCTION: ("instruction", "input", "output"),
    DataFormat.TEXT: ("text",),
}
SHOWN_CHARACTERS = 60
SHOWN_COLUMNS = 12
MAX_OPTIONS = 6


@dataclass(frozen=True)
class Reading:
    """A format, and the column of each field that it reads.

    Attributes:
        named: Pairs of a field of `ColumnMap` and the name of its column.
        is_chosen: Whether a user has named the columns.
    """

    format: DataFormat
    named: tuple[tuple[str, str], ...]
    is_chosen: bool = False

    @property
    def columns(self) -> ColumnMap:
        """Columns that the format would not find by their names."""
        other = {field: column for field, column in self.named if field != column}
        if not self.is_chosen and other.get("messages") == "conversations":
            del other["messages"]
        return ColumnMap(**other)

    @property
    def option(self) -> str:
        """The value of `--columns` that asks for this reading."""
        return ",".join(f"{field}={column}" for field, column in self.named)

    def __str__(self) -> str:
        return " and ".join(column for _, column in self.named)


def reading_of(**columns: str) -> Reading:
    """Return the reading that a user asks for by naming columns.

    Raises:
        DataError: the fields belong to different formats.
    """
    for kind, fields in FORMATS.items():
        if columns.keys() <= {*fields}:
            return Reading(kind, tuple(columns.items()), is_chosen=True)
    known = "; or ".join(f"{', '.join(fields)} ({kind})" for kind, fields in FORMATS.items())
    raise DataError(f"--columns {', '.join(columns)} belong to several formats; use {known}")


class Head:
    """The first rows of a data set, by column.

    Attributes:
        rows: The rows.
        first: A value of each column, in the order of the columns; filled if any value is.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.first: dict[str, Any] = {}
        for row in rows:
            for name, value in row.values.items():
                if name not in self.first or self.first[name] in ("", [], {}):
                    self.first[name] = value

    def named(self, names: Collection[str]) -> list[str]:
        """Return the columns that have these names in any case, in the order of `names`."""
        folded = {column.strip().lower(): column for column in reversed(self.first)}
        return [folded[name] for name in names if name in folded]

    def filled(self, names: Collection[str]) -> list[str]:
        """Return such columns that have a value."""
        return [name for name in self.named(names) if self.first[name] not in ("", [], {}, False)]

    def values(self, column: str) -> Iterator[Any]:
        """Yield the values of a column."""
        return (row.values[column] for row in self.rows if column in row.values)

    def is_text(self, column: str) -> bool:
        """Whether the column holds text."""
        return isinstance(self.first[column], str)

    def holds_turns(self, column: str) -> bool:
        """Whether the column holds lists of objects."""
        value = self.first[column]
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)

    def has_words(self, column: str, least: int) -> bool:
        """Whether a text of the column has so many words, or has no ASCII letters to count."""
        return any(
            isinstance(value, str) and (len(value.split()) >= least or not value.isascii())
            for value in self.values(column)
        )

    def shown(self) -> str:
        """Return a line for each column, with a value."""
        width = max(map(len, self.first), default=0)
        lines = [
            f"\n  {name:<{width}}  {_shortened(value)}"
            for name, value in list(self.first.items())[:SHOWN_COLUMNS]
        ]
        more = len(self.first) - SHOWN_COLUMNS
        return "".join(lines) + (f"\n  and {more} more columns" if more > 0 else "")


def readings(head: Head) -> list[Reading]:
    """Return the readings of the most structured format that the names allow."""
    turns = [
        name for name in head.named(MESSAGES) if name in MESSAGES[:2] or head.holds_turns(name)
    ]
    if turns:
        return [Reading(DataFormat.CHAT, (("messages", name), *_system(head))) for name in turns]
    if pairs := _pairs(head):
        return pairs
    texts = [name for name in head.named(TEXTS) if head.is_text(name)]
    return [Reading(DataFormat.TEXT, (("text", name),)) for name in texts]


def _pairs(head: Head) -> list[Reading]:
    prompts = head.named(PROMPTS)
    # A column `user` may hold names of users.
    prompts = [name for name in prompts if head.holds_turns(name) or head.has_words(name, 2)] or (
        prompts
    )
    contexts = head.named(CONTEXTS)
    if not prompts:
        prompts, contexts = head.named(["input"]), head.named(["context"])
    responses = head.named(RESPONSES)
    responses = [
        name for name in responses if head.is_text(name) or head.holds_turns(name)
    ] or responses
    pairs = list(product(prompts, responses))
    matched = [pair for pair in pairs if (pair[0].lower(), pair[1].lower()) in NATURAL]
    if {name for pair in matched for name in pair} == {*prompts, *responses}:
        pairs = matched
    return [_pair(head, prompt, response, contexts) for prompt, response in pairs[:MAX_OPTIONS]]


def _pair(head: Head, prompt: str, response: str, contexts: list[str]) -> Reading:
    name = prompt.strip().lower()
    follows = [one for one in contexts if one != prompt and head.is_text(one)]
    takes = bool(follows) and name in (*WITH_CONTEXT, "input") and head.is_text(prompt)
    if name != "instruction" and not takes:
        return Reading(
            DataFormat.CHAT, (("prompt", prompt), ("completion", response), *_system(head))
        )
    context = (("input", follows[0]),) if follows else ()
    return Reading(
        DataFormat.INSTRUCTION, (("instruction", prompt), *context, ("output", response))
    )


def _system(head: Head) -> tuple[tuple[str, str], ...]:
    names = () if head.named(("system", "system_prompt")) else head.named(SYSTEMS)
    return tuple(("system", name) for name in names[:1] if head.is_text(name))


def _shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
