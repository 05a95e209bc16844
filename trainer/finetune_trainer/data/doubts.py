"""Refuse rows that may not mean what their columns suggest, with a question to the user.

Called by `detection`. Each message shows the columns with a value, and the options that decide.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from finetune_trainer.config import DataFormat
from finetune_trainer.data import unread
from finetune_trainer.data.formats import read_example
from finetune_trainer.data.shapes import (
    CONTEXTS,
    MAX_OPTIONS,
    PROMPTS,
    RESPONSES,
    TEXTS,
    Head,
    Reading,
    reading_of,
    readings,
)
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError

LABELS = ("label", "labels", "label_text", "sentiment", "class", "category", "intent", "emotion")
TOKENS = ("input_ids", "token_ids", "tokens", "labels")
CHOSEN = ("chosen", "preferred_output")
REJECTED = ("rejected", "rejected_response", "non_preferred_output")
SENDERS = ("role", "from", "speaker")
TEMPLATE = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|(?:user|assistant)\|>|\[INST\]"
    r"|^### (?:Instruction|Response|Assistant|Human):|^\s*(?:Human|User): .*\n+\s*Assistant: ",
    re.MULTILINE,
)
PROSE_WORDS = 8  # a column of so many words may be meant for training


class UnclearDataError(DataError):
    """The rows allow several readings or none; the message is a question to the user.

    Attributes:
        options: Values of `--columns` that decide.
    """

    def __init__(self, message: str, options: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.options = tuple(options)


def refuse_other_data(head: Head, name: str) -> None:
    """Refuse rows that the columns show to be of a kind that is not read from them by default.

    Raises:
        UnclearDataError: preference rows, images, token ids, or a turn per row.
    """
    if media := head.filled(unread.MEDIA):
        raise UnclearDataError(f"{name}: column {media[0]}. Only text can be trained on")
    chosen, rejected = head.named(CHOSEN), head.named(REJECTED)
    flags = [one for one in head.named(("label", "kto_tag")) if _is_truth(head.first[one])]
    if (chosen and rejected) or flags:
        names = ", ".join([*chosen, *rejected, *flags])
        lead = "To train on the chosen responses alone"
        raise _question(
            f"{name}: preference data ({names}). Preference learning is not supported yet.",
            head,
            _of_chosen(head, chosen[0]) if chosen else readings(head),
            lead if chosen else "To train on all responses, also the undesired ones",
        )
    if lists := [one for one in head.named(TOKENS) if _is_numbers(head.first[one])]:
        raise _question(
            f"{name}: token ids ({', '.join(lists)}). Rows must hold text; the run tokenises it.",
            head,
            readings(head),
            "To read another column",
        )
    senders, texts = head.named(SENDERS), head.named(("content", "value", "text"))
    if senders and texts and all(head.is_text(one) for one in (senders[0], texts[0])):
        raise _question(
            f"{name}: each row has a single turn ({senders[0]}, {texts[0]}). A row must hold a "
            "whole conversation: a list of turns in a column messages.",
            head,
            [reading_of(text=texts[0])],
            "To train on each text alone",
        )


def _of_chosen(head: Head, chosen: str) -> list[Reading]:
    """Return the readings of the chosen responses alone."""
    if head.holds_turns(chosen) and len(head.first[chosen]) > 1:
        return [reading_of(messages=chosen)]
    prompts = head.named((*PROMPTS, "input"))
    if not prompts:
        return [reading_of(text=chosen)]
    return [reading_of(prompt=prompt, completion=chosen) for prompt in prompts]


def single_reading(found: Sequence[Reading], head: Head, name: str) -> Reading:
    """Return the only reading.

    Raises:
        UnclearDataError: there are several, or none.
    """
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", or ".join(map(str, found))
        problem = f"{name}: the columns allow {len(found)} readings: {listed}"
        raise _question(problem, head, found, "Choose one")
    texts = [column for column in head.first if head.is_text(column)]
    options = [reading_of(messages=column) for column in head.first if head.holds_turns(column)]
    if not options and len(texts) > 1:
        options = [reading_of(prompt=texts[0], completion=texts[1]), reading_of(text=texts[0])]
    elif not options and texts:
        options = [reading_of(text=texts[0])]
    known = head.named(PROMPTS)
    what = f"a prompt ({known[0]}), but no response" if known else "no column that is known"
    raise _question(f"{name}: the rows have {what}.", head, options, "Name the columns, such as")


def refuse_unread_columns(reading: Reading, head: Head, ignored: Iterable[str], name: str) -> None:
    """Refuse a reading that ignores columns which may be meant for training.

    Args:
        reading: The reading.
        head: The rows.
        ignored: Columns that the reading does not read.
        name: Name of the data set for messages.

    Raises:
        UnclearDataError: there is such a column, or the texts hold a chat template.
    """
    doubtful = [column for column in ignored if _may_be_meant(column, reading, head)]
    if doubtful:
        raise _question(
            f"{name}: {reading} would be read as {reading.format}, and {', '.join(doubtful)} would "
            "not be read.",
            head,
            [reading, *_with_context(reading, doubtful, head)],
            "To accept that, or to name the columns",
        )
    texts = [text for row in head.rows for text in _read(row, reading)]
    found = [match[0] for text in texts if (match := TEMPLATE.search(text))]
    if reading.format is DataFormat.TEXT and 2 * len(found) >= len(texts):
        raise _question(
            f"{name}: the texts hold a chat template ({found[0].strip().splitlines()[0]}), and "
            "would be trained on whole, with the prompts. Rows with the columns messages, or "
            "prompt and completion, train on the responses alone.",
            head,
            [reading],
            "To train on every token",
        )


def _may_be_meant(column: str, reading: Reading, head: Head) -> bool:
    folded, value = column.strip().lower(), head.first[column]
    if value in ("", [], {}):
        return False
    if folded in unread.COLUMNS or folded in map(str.lower, unread.COLUMNS):
        return folded != "turns" or isinstance(value, list)  # it may be their number
    if reading.format is DataFormat.TEXT and folded in LABELS:
        return True
    if any(field == "messages" for field, _ in reading.named):
        return False  # turns are complete by themselves
    if folded in ("meta", "metadata", "extra_info", "extra", "info"):
        return False
    if isinstance(value, list | dict):
        return True
    is_part = folded in (*PROMPTS, *RESPONSES, *CONTEXTS, *TEXTS)
    if not head.has_words(column, 2 if is_part else PROSE_WORDS):
        return False
    return not all(_is_copy(row.values.get(column, ""), _read(row, reading)) for row in head.rows)


def _read(row: Row, reading: Reading) -> list[str]:
    """Return the texts that a row has in the columns of a reading."""
    values = (row.values.get(column) for _, column in reading.named)
    return [value.strip() for value in values if isinstance(value, str)]


def _is_copy(value: Any, read: list[str]) -> bool:
    """Whether a text is part of a text that is read, or holds all of them."""
    if not isinstance(value, str) or not read:
        return False
    return any(value.strip() in text for text in read) or all(text in value for text in read)


def _with_context(reading: Reading, doubtful: Sequence[str], head: Head) -> Iterator[Reading]:
    """Yield a reading that takes a doubtful text as the input of the task."""
    named = dict(reading.named)
    asked = named.get("prompt", named.get("instruction"))
    response = named.get("completion", named.get("output"))
    texts = [column for column in doubtful if head.is_text(column)]
    if texts and asked and response and "input" not in named:
        yield reading_of(instruction=asked, input=texts[0], output=response)


def _question(problem: str, head: Head, options: Iterable[Reading], lead: str) -> UnclearDataError:
    """Return a question; of the options, those remain that the first row allows."""
    possible = [one.option for one in options if _is_possible(one, head)][:MAX_OPTIONS]
    lines = [f"{problem}{head.shown()}"]
    for number, option in enumerate(possible):
        start = f"{lead}:" if number == 0 else f"{'or:':>{len(lead) + 1}}"
        lines.append(f"{start} --columns {shlex.quote(option)}")
    return UnclearDataError("\n".join(lines), possible)


def _is_possible(reading: Reading, head: Head) -> bool:
    try:
        read_example(head.rows[0], reading.format, reading.columns)
    except DataError:
        return False
    return True


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or (
        isinstance(value, str) and value.lower() in ("true", "false")
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
