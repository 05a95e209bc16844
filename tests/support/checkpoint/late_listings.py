"""Folders' listings that lag behind what is there; `lagging_server` shows them."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple


class Entry(NamedTuple):
    """What a listing says of one name: its inode, and its file type as in `st_mode >> 12`."""

    ino: int
    type: int


class Listings:
    """What listings show: each change only after a time of its own, from 0 to the lag.

    That time depends upon the seed, the path and how often it changed, not upon what else happens:
    a run whose names are the same sees the same times. Changes of one name keep their order.
    """

    def __init__(
        self, lag_seconds: float, seed: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lag_seconds = lag_seconds
        self._seed = seed
        self._clock = clock
        self._num_changes: dict[bytes, int] = {}
        # By folder and name, the states that are yet to be shown, after the one that is.
        self._late: dict[bytes, dict[bytes, list[tuple[float, Entry | None]]]] = {}

    def change(self, folder: bytes, name: bytes, old: Entry | None, new: Entry | None) -> float:
        """Note that an entry came (or went, with no `new`); return when listings show it."""
        path = folder + b"/" + name
        count = self._num_changes[path] = self._num_changes.get(path, 0) + 1
        delay = random.Random(f"{self._seed} {count} {path!r}").uniform(0, self._lag_seconds)
        states = self._late.setdefault(folder, {}).setdefault(name, [(0.0, old)])
        shown_at = max(self._clock() + delay, states[-1][0])
        states.append((shown_at, new))
        return shown_at

    def show(self, folder: bytes, entries: dict[bytes, Entry]) -> dict[bytes, Entry]:
        """Return what a listing shows while `entries` are there."""
        late = self._late.get(folder)
        if not late:
            return entries
        now = self._clock()
        shown = dict(entries)
        for name, states in list(late.items()):
            while len(states) > 1 and states[1][0] <= now:
                del states[0]
            if len(states) == 1:
                del late[name]
            elif states[0][1] is None:
                shown.pop(name, None)
            else:
                shown[name] = states[0][1]
        return shown

    def forget(self, folder: bytes) -> None:
        """Drop what is yet to be shown of a folder that is gone."""
        self._late.pop(folder, None)
