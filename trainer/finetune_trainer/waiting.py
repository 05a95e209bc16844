"""Wait for other ranks without a time limit, and detect ranks that are gone.

A collective times out if a rank does not enter it, even if that rank is busy with work of its own:
tokenising, verifying, hashing, generating, exporting. Before a collective that follows such work,
the ranks therefore meet here: each records its arrival in the store and polls for the others. A
thread of each rank increments a counter in the store while its process lives. If the counter of a
missing rank stops, or the store itself is gone, that rank is lost.

`world` creates it with the groups; `control.Agreement` and the checkpoint store use it. No other
code may use its keys.
"""

import threading
import time
from typing import TYPE_CHECKING

from finetune_trainer.errors import LostRankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# A rank whose counter has not changed for so long is lost. A Python thread increments it, so the
# limit must exceed any time for which the interpreter lock is held.
SILENT_SECONDS = 120.0
_BEATS = 6  # heartbeats in that time
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.25
_LEFT_KEY = "left"


class Waiting:
    """Barriers of one rank. Each barrier has a number, its place, and belongs to one thread."""

    def __init__(
        self,
        store: "Store",
        *,
        rank: int,
        world_size: int,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Start the heartbeat; `store` must be a connection used by no other code."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._silent_seconds = silent_seconds
        self._meetings: dict[str, int] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def liveness_barrier(
        self, place: str = "control", *, silent_seconds: float | None = None
    ) -> None:
        """Wait until every rank has arrived at barrier `place`; a collective without timeout.

        `silent_seconds` replaces the limit of this object.

        Raises:
            LostRankError: A rank that has not arrived is gone; names it.
        """
        number = self._meetings[place] = self._meetings.get(place, 0) + 1
        here = f"{place}/{number}"
        try:
            self._store.set(f"{here}/{self._rank}", "")
            num_here = self._store.add(here, 1)
            self._forget(place, number - 2)  # all ranks have left that barrier
            if num_here < self._world_size:
                self._wait(here, silent_seconds or self._silent_seconds)
        except LostRankError:
            raise
        except RuntimeError as error:  # raised by torch for any failure of the connection
            raise LostRankError(
                f"the store of the ranks does not respond ({_first_line(error)}); rank 0 serves "
                "it, so see that rank's log"
            ) from error

    def leave(self) -> None:
        """Announce that this rank ends with an error and will not arrive."""
        self._closed.set()
        try:
            self._store.compare_set(_LEFT_KEY, "", str(self._rank))
        except RuntimeError:
            return  # the store is gone, which the other ranks detect

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()

    def _wait(self, here: str, silent_seconds: float) -> None:
        pulses = _Pulses(self._store, silent_seconds)
        checked_at, pause = time.monotonic(), _FIRST_POLL_SECONDS
        while self._store.add(here, 0) < self._world_size:
            if self._store.check([_LEFT_KEY]):
                rank = self._store.get(_LEFT_KEY).decode()
                raise LostRankError(f"rank {rank} has ended with an error; see its log")
            now = time.monotonic()
            if now - checked_at >= silent_seconds / _BEATS:
                checked_at = now
                pulses.check(self._missing(here))
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)

    def _missing(self, here: str) -> list[int]:
        ranks = range(self._world_size)
        return [rank for rank in ranks if not self._store.check([f"{here}/{rank}"])]

    def _forget(self, place: str, number: int) -> None:
        if number < 1:
            return
        self._store.delete_key(f"{place}/{number}/{self._rank}")
        if self._rank == 0:
            self._store.delete_key(f"{place}/{number}")

    def _beat(self) -> None:
        while True:
            try:
                self._store.add(_pulse(self._rank), 1)
            except RuntimeError:
                return  # the store is gone; waiting ranks report it
            if self._closed.wait(self._silent_seconds / _BEATS):
                return


class _Pulses:
    """Times since which the counters of ranks have not changed, on this rank's clock."""

    def __init__(self, store: "Store", silent_seconds: float) -> None:
        self._store, self._silent_seconds = store, silent_seconds
        self._seen: dict[int, tuple[int, float]] = {}

    def check(self, ranks: list[int]) -> None:
        """Check the counters of `ranks`.

        Raises:
            LostRankError: A counter has not changed for too long.
        """
        now = time.monotonic()
        for rank in ranks:
            pulse = self._store.add(_pulse(rank), 0)
            known, since = self._seen.get(rank, (-1, now))
            if pulse != known:
                self._seen[rank] = pulse, now
            elif now - since > self._silent_seconds:
                raise LostRankError(
                    f"rank {rank} has not responded for {now - since:.0f} s, and the "
                    "others wait for it; see that rank's log and node"
                )


def _pulse(rank: int) -> str:
    return f"pulse/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
