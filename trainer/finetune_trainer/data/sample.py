"""Sample the rows of a data set for `ftctl init` while another function reads all of them.

Called by `inspection`. The sample is evenly spaced, deterministic and bounded, so that equal rows
lead to an equal manifest.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from finetune_trainer.data.share import position
from finetune_trainer.data.source import Row
from finetune_trainer.data.special import texts_of

MAX_ROWS = 1_000
MAX_CHARACTERS = 1 << 22  # a second of tokenising
SHARES = (0.05, 0.1, 0.15, 0.2)
ENOUGH_HELD_OUT = 10
MOST_HELD_OUT = 1_000
_THOUSANDTHS = 1_000


class Sample:
    """Counts rows and retains some of them.

    Attributes:
        rows: Every n-th row; n doubles as the sample becomes full.
        count: Number of rows that were read.
        characters: Characters of all texts in these rows.
        is_complete: Whether there were no more rows.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.count = 0
        self.characters = 0
        self.is_complete = False
        self._sizes: list[int] = []
        self._every = 1
        self._positions: Counter[int] | None = Counter()

    def watch(self, rows: Iterable[Row], limit: int) -> Iterator[Row]:
        """Yield the first `limit` rows, and sample them."""
        waiting = iter(rows)
        for row in islice(waiting, limit):
            self._add(row)
            yield row
        self.is_complete = next(waiting, None) is None

    def _add(self, row: Row) -> None:
        size = sum(map(len, texts_of(row.values)))
        if self.count % self._every == 0:
            self.rows.append(row)
            self._sizes.append(size)
            while len(self.rows) > MAX_ROWS or (
                sum(self._sizes) > MAX_CHARACTERS and len(self.rows) > 1
            ):
                self.rows, self._sizes = self.rows[::2], self._sizes[::2]
                self._every *= 2
        self.count += 1
        self.characters += size
        if self._positions is not None:
            try:
                self._positions[int(position(row.values) * _THOUSANDTHS)] += 1
            except TypeError:  # a column of a table without a text, such as an array
                self._positions = None

    def held_out(self, share: float) -> int:
        """Return how many rows `evalShare` would hold out among the rows that were read."""
        below = round(share * _THOUSANDTHS)
        found = self._positions or Counter[int]()
        return sum(number for place, number in found.items() if place < below)

    def share(self, total: int) -> float | None:
        """Return the share to hold out: about 5 %, 10 to 1,000 rows; None below 2 rows.

        `total` is the number of rows of the data set.
        """
        if total * SHARES[0] > MOST_HELD_OUT:
            return float(f"{max(1 / _THOUSANDTHS, MOST_HELD_OUT / total):.1g}")
        found = next((one for one in SHARES if self.held_out(one) >= ENOUGH_HELD_OUT), SHARES[-1])
        return found if 2 <= self.held_out(found) < self.count else None
