"""Detect the format and the columns of a data set, or ask.

Called by `inspection` for `ftctl init`. Column names suggest a reading (`shapes`), and the reader
that a run uses judges every row. Rows are streamed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from finetune_trainer.data.doubts import (
    UnclearDataError,
    refuse_other_data,
    refuse_unread_columns,
    single_reading,
)
from finetune_trainer.data.formats import Conversation, read_example, unread_columns
from finetune_trainer.data.shapes import Head, Reading, readings
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError

HEAD_ROWS = 64  # rows whose columns decide


@dataclass(frozen=True)
class Detected:
    """A data set that a run can read.

    Attributes:
        reading: Its format and columns.
        rows: Number of rows.
        rows_without_labels: Rows without a turn or a text to learn.
        turns: Smallest and largest number of turns; (0, 0) for texts.
        unread: Columns that are not read.
        prompts: First user turns of the first rows.
    """

    reading: Reading
    rows: int
    rows_without_labels: int
    turns: tuple[int, int]
    unread: tuple[str, ...]
    prompts: tuple[str, ...]


def detect(rows: Iterable[Row], *, name: str, chosen: Reading | None = None) -> Detected:
    """Return the only reading of the rows.

    Args:
        rows: All rows.
        name: Name of the data set for messages.
        chosen: The reading that the user asks for; then no question is raised.

    Raises:
        UnclearDataError: the columns allow several readings or none, or a column that may be meant
            for training would not be read.
        DataError: there are no rows, or the reader refuses one.
    """
    waiting = iter(rows)
    head = Head(list(islice(waiting, HEAD_ROWS)))
    if not head.rows:
        raise DataError(f"{name} holds no rows; give a data set with some")
    if chosen is None:
        refuse_other_data(head, name)
    reading = chosen or single_reading(readings(head), head, name)
    examples = _judged(head, reading)
    ignored = _ignored(head, reading)
    if chosen is None:
        refuse_unread_columns(reading, head, ignored, name)
    else:
        _refuse_unread_choice(reading, ignored)
    count = _Count(head, ignored)
    for example in examples:
        count.add(example)
    for row in waiting:
        count.add(_judge(row, reading, count.rows))
        if not row.values.keys() <= count.known:
            late = Head([row])
            added = _ignored(late, reading)
            if chosen is None:
                refuse_other_data(late, row.where)
                refuse_unread_columns(reading, late, added, row.where)
            count.note(row, added)
    if count.without_labels == count.rows:
        raise DataError(
            f"{name}: none of the {count.rows} rows has a text or an assistant turn to learn; "
            "check the columns, or name others with --columns"
        )
    return count.detected(reading, examples)


class _Count:
    """Counts of the rows that were read."""

    def __init__(self, head: Head, ignored: Iterable[str]) -> None:
        self.rows = 0
        self.without_labels = 0
        self.known = set(head.first)
        self.ignored = dict.fromkeys(ignored)
        self._turns = (0, 0)

    def note(self, row: Row, ignored: Iterable[str]) -> None:
        self.known.update(row.values)
        self.ignored |= dict.fromkeys(ignored)

    def add(self, example: Conversation | str) -> None:
        self.rows += 1
        if isinstance(example, str):
            self.without_labels += not example.strip()
            return
        self.without_labels += not example.learned
        turns = sum(message["role"] != "system" for message in example.messages)
        least, most = self._turns if self.rows > 1 else (turns, turns)
        self._turns = (min(least, turns), max(most, turns))

    def detected(self, reading: Reading, examples: Iterable[Conversation | str]) -> Detected:
        prompts = dict.fromkeys(prompt for example in examples if (prompt := _prompt(example)))
        return Detected(
            reading,
            self.rows,
            self.without_labels,
            self._turns,
            tuple(self.ignored),
            tuple(prompts),
        )


def _judged(head: Head, reading: Reading) -> list[Conversation | str]:
    """Read the first rows.

    Raises:
        DataError: a row cannot be read; the message counts the rows that can.
    """
    columns, kind = reading.columns, reading.format
    read: list[Conversation | str] = []
    refused: tuple[Row, DataError] | None = None
    for row in head.rows:
        try:
            read.append(read_example(row, kind, columns))
        except DataError as error:
            refused = refused or (row, error)
    if refused is not None:
        raise _explained(*refused, reading, len(read), len(head.rows))
    return read


def _judge(row: Row, reading: Reading, num_read: int) -> Conversation | str:
    try:
        return read_example(row, reading.format, reading.columns)
    except DataError as error:
        raise _explained(row, error, reading, num_read, num_read + 1) from error


def _explained(
    row: Row, error: DataError, reading: Reading, num_read: int, num_rows: int
) -> DataError:
    """Return the error of a row that differs from the others."""
    if not num_read:
        return error
    missing = [column for _, column in reading.named if column not in row.values]
    sentence = str(error)
    if missing:
        found = ", ".join(row.values) or "no column with a value"
        sentence = f"{row.where} has no column {' and '.join(missing)}; it has {found}"
    return UnclearDataError(
        f"{sentence}.\n{num_read} of {num_rows} rows are {reading.format} ({reading}). Correct the "
        "row, or leave it out"
    )


def _ignored(head: Head, reading: Reading) -> list[str]:
    """Return the columns that are not read in any of the rows."""
    names = dict.fromkeys(head.first)
    for row in head.rows:
        unread = unread_columns(row, reading.format, reading.columns)
        for name in row.values.keys() - unread:
            names.pop(name, None)
    return list(names)


def _refuse_unread_choice(reading: Reading, ignored: Iterable[str]) -> None:
    named = [f"{field}={column}" for field, column in reading.named if column in ignored]
    if named:
        raise DataError(
            f"--columns {','.join(named)} has no effect: rows with a column messages or "
            "conversations are read by that column; use instruction=A,output=B, or leave it out"
        )


def _prompt(example: Conversation | str) -> str:
    if isinstance(example, str) or not example.learned:
        return ""
    asked = (message for message in example.messages if message["role"] == "user")
    first = next(asked, None)
    return first["content"].strip() if first else ""
