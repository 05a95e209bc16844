"""Read a row as a conversation or a text, by the names of its columns.

`encoding` calls it. It knows the usual column names (OpenAI messages, ShareGPT conversations,
prompt and completion, instruction and output), but not tokens. A configured column is never read
under another name.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.config import ColumnMap, DataFormat
from finetune_trainer.data import masks
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError

Message = dict[str, Any]
"""`role` and `content` (str), and other keys that a template may read, such as `tool_calls`."""

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
CALL = "function_call"  # OpenAI's earlier field of a turn, and LLaMA-Factory's role
ROLES_SINCE = {"function": "tool", CALL: "assistant"}  # unknown to release 0.1.0
COLUMNS = "spec.dataset.columns"


@dataclass(frozen=True)
class Conversation:
    """Turns of a dialogue.

    Attributes:
        messages: All turns.
        learned: Indices of the learned turns, all of them the assistant's.
        tools: JSON schemas of the functions that the assistant may call.
    """

    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def is_learned_whole(self) -> bool:
        """Whether all turns of the assistant are learned."""
        return len(self.learned) == [one["role"] for one in self.messages].count("assistant")


def read_example(
    row: Row, data_format: DataFormat, columns: ColumnMap, rules: Rules = Rules.CURRENT
) -> Conversation | str:
    """Read `row` under `data_format` as a dialogue, or as a text that is learned whole.

    A row that its columns exclude from the loss is a dialogue without learned turns, or no text.

    Raises:
        DataError: a column is missing or has another type; names the row, the columns found and the
            field to set.
    """
    return _read(_RowReader(row, columns, rules), data_format)


def unread_columns(row: Row, data_format: DataFormat, columns: ColumnMap) -> tuple[str, ...]:
    """Return the columns that `read_example` does not read, in their order.

    Raises:
        DataError: see `read_example`.
    """
    reader = _RowReader(row, columns, Rules.CURRENT)
    _read(reader, data_format)
    return tuple(name for name in row.values if name not in reader.seen)


def _read(reader: "_RowReader", data_format: DataFormat) -> Conversation | str:
    example = _example(reader, data_format)
    if reader.is_learned():
        return example
    return "" if isinstance(example, str) else replace(example, learned=())


def _example(reader: "_RowReader", data_format: DataFormat) -> Conversation | str:
    try:
        return _of_format(reader, data_format)
    except _NoColumnError as error:
        other = next(filter(reader.is_readable_as, DataFormat), None)
        help_ = error.help if other is None else f"For such rows set spec.dataset.format: {other}"
        raise DataError(f"{error}. {help_}") from None


def _of_format(reader: "_RowReader", data_format: DataFormat) -> Conversation | str:
    if data_format is DataFormat.TEXT:
        return reader.text("text")
    if data_format is DataFormat.INSTRUCTION:
        return _instruction(reader)
    if reader.has("messages", "conversations"):
        messages = reader.messages("messages", "conversations")
        return _conversation((*reader.system(messages), *messages), tools=reader.tools())
    if reader.has("prompt") and reader.has("completion"):
        return _prompt_and_completion(reader)
    raise _NoColumnError(
        f"{reader.where} has no column messages or conversations, and not both prompt and "
        f"completion; it has {reader.found()}",
        f"Name yours in {COLUMNS}.messages, or in {COLUMNS}.prompt and {COLUMNS}.completion",
    )


class _NoColumnError(DataError):
    """A row lacks a column that its format reads.

    Attributes:
        help: What to do if the row has no other format.
    """

    def __init__(self, message: str, help_: str) -> None:
        super().__init__(message)
        self.help = help_


class _RowReader:
    """Reads columns of a row by their usual or configured names.

    Attributes:
        where: Place of the row for messages.
        seen: Names of the columns that were read.
    """

    def __init__(self, row: Row, columns: ColumnMap, rules: Rules) -> None:
        self._rules = rules
        self._row = row
        self._columns = columns
        self.where = row.where
        self.seen: set[str] = set()

    def found(self) -> str:
        return ", ".join(self._row.values) or "no column with a value"

    def has(self, *usual: str) -> bool:
        """Whether the row has the column; a configured column that is missing is an error."""
        return self._find(usual) is not None

    def system(self, turns: tuple[Message, ...] = ()) -> tuple[Message, ...]:
        """Return the system turn if the row has a column for it.

        Of `turns`, which follow it, the first may be a system turn in place of `system_prompt`.
        """
        names = ["system"]
        has_turn = bool(turns) and turns[0]["role"] == "system"
        if not has_turn and isinstance(self._later("system_prompt"), str):
            names.append("system_prompt")
        text = self.text(*names) if self.has(*names) else ""
        return ({"role": "system", "content": text},) if text else ()

    def text(self, *usual: str) -> str:
        """Return a column that must hold text."""
        column, value = self._get(usual)
        if isinstance(value, str):
            return value
        raise DataError(
            f"{self.where}: column {column!r} holds {_kind(value)}, not text; convert it, or "
            f"name another column in {COLUMNS}.{usual[0]}"
        )

    def messages(self, *usual: str) -> tuple[Message, ...]:
        """Return a column that must hold a list of turns."""
        column, value = self._get(usual)
        if isinstance(value, list):
            return tuple(self._message(item, column, turn) for turn, item in enumerate(value))
        raise DataError(
            f"{self.where}: column {column!r} holds {_kind(value)}, not a list of messages; "
            f"convert it, or name another column in {COLUMNS}.{usual[0]}"
        )

    def turns(self, usual: str, role: str) -> tuple[Message, ...]:
        """Return a column that holds either one turn's text or a list of turns."""
        _, value = self._get((usual,))
        if isinstance(value, list):
            return self.messages(usual)
        return ({"role": role, "content": self.text(usual)},)

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the column `tools` or `functions`: a list of JSON schemas, or JSON text of one."""
        self.seen.add("tools")
        tools = _objects(self._row.values.get("tools"), f"{self.where}: column 'tools'")
        functions = None if tools else _listed(self._later("functions"))
        if not functions or not all(isinstance(one, dict) for one in functions):
            return tuple(tools)
        self.seen.add("functions")
        return tuple(
            one if "function" in one else {"type": "function", "function": one} for one in functions
        )

    def history(self) -> tuple[Message, ...]:
        """Return the column `history`: earlier turns as pairs of two texts, or as messages."""
        earlier = _listed(self._later("history"))
        if earlier is None:
            return ()
        self.seen.add("history")
        turns: list[Message] = []
        for number, item in enumerate(earlier):
            if isinstance(item, dict):
                turns.append(self._message(item, "history", number))
                continue
            if not isinstance(item, list) or [type(text) for text in item] != [str, str]:
                raise DataError(
                    f"{self.where}: column 'history' item {number + 1} is not a pair of the "
                    "user's and the assistant's text; correct the row"
                )
            turns.append({"role": "user", "content": item[0]})
            turns.append({"role": "assistant", "content": item[1]})
        return tuple(turns)

    def is_readable_as(self, data_format: DataFormat) -> bool:
        """Whether the usual columns of a format are there, with values of their types."""
        try:
            _of_format(_RowReader(self._row, ColumnMap(), self._rules), data_format)
        except DataError:
            return False
        return True

    def is_learned(self) -> bool:
        """Whether no column excludes the row from the loss, such as a weight of 0."""
        found = ((name, masks.of_row(name, self._later(name))) for name in masks.OF_ROW)
        flags = {name: flag for name, flag in found if flag is not None}
        self.seen.update(flags)
        return all(flags.values())

    def _later(self, name: str) -> Any:
        """Return a column that release 0.1.0 did not read; None if it has another meaning here."""
        value = self._row.values.get(name)
        if value is None or self._rules is Rules.RELEASE_0_1_0:
            return None
        is_configured = any(column == name for _, column in self._columns)
        return None if is_configured else value

    def _find(self, usual: tuple[str, ...]) -> str | None:
        configured = getattr(self._columns, usual[0])
        if configured is None:
            return next((name for name in usual if name in self._row.values), None)
        if configured not in self._row.values:
            raise DataError(
                f"{COLUMNS}.{usual[0]} {configured!r}: {self.where} has no such column; it "
                f"has {self.found()}"
            )
        return str(configured)

    def _get(self, usual: tuple[str, ...]) -> tuple[str, Any]:
        column = self._find(usual)
        if column is None:
            raise _NoColumnError(
                f"{self.where} has no column {' or '.join(usual)}; it has {self.found()}",
                f"Name yours in {COLUMNS}.{usual[0]}",
            )
        self.seen.add(column)
        return column, self._row.values[column]

    def _message(self, item: Any, column: str, turn: int) -> Message:
        where = f"{self.where}: column {column!r} turn {turn + 1}"
        if not isinstance(item, dict):
            raise DataError(f"{where} holds {_kind(item)}, not an object with role and content")
        message = {key: value for key, value in item.items() if value is not None}
        sender = message.pop("role", None) or message.pop("from", None)
        is_released = self._rules is Rules.RELEASE_0_1_0
        roles = ROLES if is_released else ROLES | ROLES_SINCE
        if not isinstance(sender, str) or sender not in roles:
            raise DataError(f"{where} has the role {sender!r}; use one of {', '.join(ROLES)}")
        role = roles[sender]
        if not masks.pop_turn(message, role, where, self._rules):
            message["train"] = False
        if sender == CALL:
            message[CALL] = message.pop("content", None) or message.pop("value", None)
        if not is_released:
            _move_call(message, where)
        if "tool_calls" in message:
            calls = _objects(message["tool_calls"], f"{where}: tool_calls")
            message["tool_calls"] = [_read_call(call, where) for call in calls]
        key = next((key for key in ("content", "value") if key in message), None)
        if key is not None:
            content = _flatten(message.pop(key), where)
        elif role == "assistant" and message.get("tool_calls"):
            content = ""  # the turn consists of its calls
        else:
            keys = (key if value is not None else f"{key} (null)" for key, value in item.items())
            raise DataError(
                f"{where} has no text: it has {', '.join(keys)}, and neither content nor value; "
                "write its text as content, or delete the row"
            )
        return {"role": role, "content": content, **message}


def _instruction(reader: _RowReader) -> Conversation:
    question = reader.text("instruction")
    context = reader.text("input") if reader.has("input") else ""
    user = f"{question}\n\n{context}" if context.strip() else question
    answer = reader.text("output")
    return _conversation(
        (
            *reader.system(),
            *reader.history(),
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
        )
    )


def _prompt_and_completion(reader: _RowReader) -> Conversation:
    asked = reader.turns("prompt", "user")
    prompt = (*reader.system(asked), *asked)
    # Assistant turns of the prompt are examples and are not learned.
    messages = (*prompt, *reader.turns("completion", "assistant"))
    return _conversation(messages, first_learned=len(prompt), tools=reader.tools())


def _conversation(
    messages: Iterable[Message], *, first_learned: int = 0, tools: tuple[dict[str, Any], ...] = ()
) -> Conversation:
    """Select the learned turns: all turns of the assistant without a flag that excludes them.

    An empty turn is not learned: its stop token alone would teach the model to be silent.
    """
    turns, learned = [], []
    for turn, message in enumerate(messages):
        is_filled = message["content"].strip() or message.get("tool_calls")
        is_wanted = turn >= first_learned and message.get("train", True)
        if is_filled and is_wanted and message["role"] == "assistant":
            learned.append(turn)
        turns.append({key: value for key, value in message.items() if key != "train"})
    return Conversation(tuple(turns), tuple(learned), tools)


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, which may be given as JSON text; empty if there is no value."""
    items = _from_json(value, where) or []
    if isinstance(items, list) and all(isinstance(item, dict) for item in items):
        return items
    raise DataError(f"{where} is not a list of objects; correct the row")


def _listed(value: Any) -> list[Any] | None:
    """Return a list, which may be given as JSON text; None if the value is something else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _move_call(message: Message, where: str) -> None:
    """Turn a `function_call`, one or a list of several, into `tool_calls`."""
    given = _from_json(message.pop(CALL, None), f"{where}: {CALL}")
    calls = given if isinstance(given, list) else [given]
    # Tables have nulls where only other rows have a call.
    calls = [call for call in calls if call and not _is_empty(call)]
    if not calls:
        return
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{where}: {CALL} is not an object with a name; correct the row")
    if message.get("tool_calls"):
        raise DataError(f"{where} has both {CALL} and tool_calls; delete either")
    message["tool_calls"] = [{"type": "function", "function": call} for call in calls]


def _read_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Parse arguments that are JSON text; most templates would encode them once more."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _read_call(call["function"], where)}
    if not isinstance(call.get("arguments"), str):
        return call
    return {**call, "arguments": _from_json(call["arguments"], f"{where}: arguments") or {}}


def _is_empty(call: Any) -> bool:
    """Whether a call has neither name nor arguments, as in rows of a table without a call."""
    return isinstance(call, dict) and not any(call.values())


def _from_json(value: Any, where: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}; correct or delete the row") from error


def _flatten(content: Any, where: str) -> str:
    """Join the text parts of a content that is a list of typed parts."""
    if isinstance(content, str):
        return content
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not is_parts or any(part.get("type", "text") != "text" for part in content):
        raise DataError(f"{where} holds {_kind(content)}; only text can be trained on")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where} has a part without text; write the text of each part as text")
    return "".join(texts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", str: "text"}
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:60])
