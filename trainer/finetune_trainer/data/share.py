"""Divide the rows of a source into training rows and held-out rows by `evalShare`.

Called by `sequences` and the preview. The content of a row alone decides on which side it is: equal
rows are on one side, appended rows move no other row, and every rank and attempt divides alike.
"""

import datetime
import decimal
import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune_trainer.data.source import Row, Rows
from finetune_trainer.errors import DataError

_HASH_BYTES = 8
# Parquet columns that are usually metadata. Their text does not depend on the process, unlike that
# of arbitrary objects, which may contain an address.
_WRITTEN_AS_TEXT = (
    bytes,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
)


class EmptySideError(DataError):
    """`evalShare` leaves no row on one side."""


@dataclass(frozen=True)
class Side:
    """The rows of a source that are on one side of `evalShare`; without a share all rows.

    Attributes:
        rows: All rows of the source.
        share: Share of the rows to hold out; None does not divide them.
        is_held_out: Whether this is the side of the held-out rows.
    """

    rows: Rows
    share: float | None
    is_held_out: bool

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Yield each row with its number in the source, counted from 1.

        Raises:
            DataError: a row cannot be read, or has a value that has no text.
        """
        for number, row in enumerate(self.rows, start=1):
            if self.share is None or (self._position(row) < self.share) == self.is_held_out:
                yield number, row

    @property
    def name(self) -> str:
        """Side, field and path of the rows, for messages."""
        if self.share is None:
            return self._whole
        return f"{'held-out' if self.is_held_out else 'training'} rows of {self._whole}"

    @property
    def _whole(self) -> str:
        return f"{self.rows.field} {self.rows.name}"

    def fingerprint(self) -> str | list[Any]:
        """Return a value for the cache key: bytes of the source, share and side."""
        whole = self.rows.fingerprint()
        return whole if self.share is None else [whole, self.share, self.is_held_out]

    def empty(self) -> DataError:
        """Return the error for a side without rows, with the share that would hold out a row."""
        positions = [self._position(row) for row in self.rows] if self.share else []
        if not positions:
            return DataError(f"{self._whole} holds no rows; give a data set with some")
        rows = f"{len(positions)} row{'s' * (len(positions) > 1)} of {self._whole}"
        field = f"spec.dataset.evalShare {self.share:g}"
        if not self.is_held_out:
            return EmptySideError(
                f"{field} leaves no training row in the {rows}; add rows, or name held-out rows in "
                "spec.dataset.evalSource"
            )
        lowest = min(positions)
        remedy = "add rows" if lowest >= 0.5 else f"raise it to {_above(lowest)}"
        return EmptySideError(
            f"{field} holds out none of the {rows}; {remedy}, or name held-out rows in "
            "spec.dataset.evalSource"
        )

    def _position(self, row: Row) -> float:
        try:
            return position(row.values)
        except TypeError as error:
            raise DataError(
                f"{row.where} cannot be divided by spec.dataset.evalShare: {error}; remove that "
                "column, or name held-out rows in spec.dataset.evalSource"
            ) from error


def position(values: dict[str, Any]) -> float:
    """Return a number from 0 to 1, evenly distributed over rows; below the share is held out.

    Raises:
        TypeError: a value is neither JSON nor a number, date, UUID or bytes of a table.
    """
    text = json.dumps(
        values, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_text
    )
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:_HASH_BYTES]) / float(1 << 8 * _HASH_BYTES)


def _text(value: Any) -> str:
    if isinstance(value, _WRITTEN_AS_TEXT):
        return repr(value)
    raise TypeError(f"a value of type {type(value).__name__} is not text, a number or a list")


def _above(position: float) -> str:
    """Return the smallest share with three decimals above the position."""
    return f"{int(position * 1000) / 1000 + 0.001:g}"
