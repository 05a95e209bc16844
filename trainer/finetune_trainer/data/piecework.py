"""Group rows into batches and encode each batch as the bytes that the token cache stores.

Called by `sequences` and, in separate processes, by `crew`. The result depends only on the rows of
the batch, not on the process that encodes it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune_trainer.config import DataConfig, LongRows
from finetune_trainer.data.encoding import ROWS_PER_BATCH, Encoded, RowEncoder
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.data.special import texts_of
from finetune_trainer.data.token_store import ARRAYS, Sequence
from finetune_trainer.data.unread import unread_fields

# Characters of a batch: a third of a second of work, so processes finish at about the same time.
# Each process holds two batches in memory, as text and as tokens.
CHARACTERS_PER_BATCH = 2**20
SPECIAL_TEXT = "rows_with_special_text"  # counted, but not part of the report
UNREAD = "unread "  # begins the count of rows that have a field which is not read


@dataclass(frozen=True)
class Batch:
    """Successive rows of a source.

    Attributes:
        numbers: Number of each row in its source, counted from 1.
    """

    numbers: list[int]
    rows: list[Row]


@dataclass(frozen=True)
class EncodedBatch:
    """The encoding of a batch.

    Attributes:
        arrays: Bytes to append to each array of the cache.
        tally: Counts of the report, for these rows.
        stops: How many learned turns each special token ends.
    """

    arrays: Mapping[str, bytes]
    tally: Counter[str]
    stops: Counter[int]


def batches(rows: Iterable[tuple[int, Row]]) -> Iterator[Batch]:
    """Divide numbered rows into batches; a row above the size of a batch closes its batch."""
    held = Batch([], [])
    characters = 0
    for number, row in rows:
        held.numbers.append(number)
        held.rows.append(row)
        characters += sum(map(len, texts_of(row.values)))
        if len(held.rows) == ROWS_PER_BATCH or characters >= CHARACTERS_PER_BATCH:
            yield held
            held, characters = Batch([], []), 0
    if held.rows:
        yield held


class BatchEncoder:
    """Encodes batches of one source with one tokenizer.

    Raises:
        ConfigError: the format is chat and the model has no chat template.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, rules: Rules = Rules.CURRENT) -> None:
        self._config = config
        self._template = tokenizer.chat_template
        self._is_current = rules is not Rules.RELEASE_0_1_0
        self._encoder = RowEncoder(config, tokenizer, rules)

    def encode(self, batch: Batch) -> EncodedBatch:
        """Encode a batch and count its rows, sequences and tokens.

        Raises:
            DataError: a row cannot be used.
        """
        config, tally, stops = self._config, Counter[str](), Counter[int]()
        long = "split_rows" if config.long_rows is LongRows.SPLIT else "truncated_rows"
        sequences: list[Sequence] = []
        for number, row in zip(batch.numbers, self._encoder.encode(batch.rows), strict=True):
            pieces = [
                piece
                for part in row.parts
                for piece in fit(part, config.max_seq_len, config.long_rows, number)
            ]
            tally["rows"] += 1
            stops.update(row.stops)
            tally[SPECIAL_TEXT] += row.has_special_text
            tally["sequences"] += len(pieces)
            tally["tokens"] += sum(len(piece.tokens) for piece in pieces)
            tally["label_tokens"] += sum(int(piece.is_label.sum()) for piece in pieces)
            tally["rows_without_labels"] += not pieces
            tally[long] += any(len(part.tokens) > config.max_seq_len for part in row.parts)
            sequences += pieces
        if self._is_current:
            for one in batch.rows:
                fields = unread_fields(one, config, self._template)
                tally.update(UNREAD + name for name in fields)
        return EncodedBatch(_arrays(sequences), tally, stops)


def fit(encoded: Encoded, max_seq_len: int, long_rows: LongRows, row: int = 1) -> list[Sequence]:
    """Cut a row into sequences of at most `max_seq_len` tokens; drop sequences without a label.

    Truncating keeps the head. When splitting, each sequence begins with the last token of the
    previous sequence as context, so every label token is predicted exactly once.
    """
    tokens = np.asarray(encoded.tokens, dtype=np.int32)
    is_label = np.asarray(encoded.is_label, dtype=np.bool_)
    starts = range(0, max(1, len(tokens) - 1), max_seq_len - 1)
    pieces = []
    for start in starts if long_rows is LongRows.SPLIT else starts[:1]:
        labels = is_label[start : start + max_seq_len].copy()
        labels[:1] = False
        if labels.any():
            pieces.append(Sequence(tokens[start : start + max_seq_len], labels, row))
    return pieces


def _arrays(sequences: list[Sequence]) -> dict[str, bytes]:
    columns = {
        "tokens": b"".join(one.tokens.tobytes() for one in sequences),
        "is_label": b"".join(one.is_label.tobytes() for one in sequences),
        "lengths": [len(one.tokens) for one in sequences],
        "label_counts": [int(one.is_label.sum()) for one in sequences],
        "rows": [one.row for one in sequences],
    }
    return {
        name: column if isinstance(column, bytes) else np.asarray(column, ARRAYS[name]).tobytes()
        for name, column in columns.items()
    }
