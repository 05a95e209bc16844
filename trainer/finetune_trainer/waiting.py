"""Wait for other ranks as long as they need, and notice when one of them is gone.

A collective that some rank does not come to ends with a time-out, however busy that rank is with
what it does alone: tokenising, verifying, hashing, answering, exporting. So before ranks meet in
one for the sake of such work, they meet here: each notes in the store that it has come and looks
whether the others have. A thread of each rank counts up a number there as long as its process
lives; where the number of a missing rank stands still, or the store itself is gone, that rank is.

`world` makes it, with the groups; `control.Agreement` and the checkpoint store meet in it. Nothing
else may use its keys.
"""

import threading
import time
from typing import TYPE_CHECKING

from finetune_trainer.errors import LostRankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# After which a rank that counts up no more is gone. A thread of Python counts, so it must be longer
# than anything that holds the interpreter lock.
SILENT_SECONDS = 120.0
_BEATS = 6  # in that time
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.25
_SOMEBODY_LEFT = "left"


class Waiting:
    """The meetings of one rank; each place of meeting belongs to one thread."""

    def __init__(
        self,
        store: "Store",
        *,
        rank: int,
        world_size: int,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        """Begin to count up; `store` must be a connection that nobody else uses."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._silent_seconds = silent_seconds
        self._meetings: dict[str, int] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def meet(self, place: str = "control") -> None:
        """Return when every rank has come to this meeting of `place`; a collective without end.

        Raises:
            LostRankError: a rank that has not come is gone; names it.
        """
        number = self._meetings[place] = self._meetings.get(place, 0) + 1
        here = f"{place}/{number}"
        try:
            self._store.set(f"{here}/{self._rank}", "")
            num_here = self._store.add(here, 1)
            self._forget(place, number - 2)  # which all have left that came to the one before this
            if num_here < self._world_size:
                self._wait(here)
        except LostRankError:
            raise
        except RuntimeError as error:  # torch's, of whatever kind the connection ended in
            raise LostRankError(
                f"the store of the ranks does not answer ({_first_line(error)}); rank 0 holds it, "
                "so see that rank's log"
            ) from error

    def leave(self) -> None:
        """Tell those who wait that this rank will not come, as it ends with an error."""
        self._closed.set()
        try:
            self._store.compare_set(_SOMEBODY_LEFT, "", str(self._rank))
        except RuntimeError:
            return  # with the store everybody else has noticed

    def close(self) -> None:
        """Count up no more."""
        self._closed.set()

    def _wait(self, here: str) -> None:
        pulses = _Pulses(self._store, self._silent_seconds)
        looked_at, pause = time.monotonic(), _FIRST_POLL_SECONDS
        while self._store.add(here, 0) < self._world_size:
            if self._store.check([_SOMEBODY_LEFT]):
                rank = self._store.get(_SOMEBODY_LEFT).decode()
                raise LostRankError(f"rank {rank} has ended with an error; see its log")
            now = time.monotonic()
            if now - looked_at >= self._silent_seconds / _BEATS:
                looked_at = now
                pulses.look(self._missing(here))
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
                return  # the store is gone, which whoever waits finds out, and says
            if self._closed.wait(self._silent_seconds / _BEATS):
                return


class _Pulses:
    """Since when the numbers of ranks stand still, on this rank's own clock."""

    def __init__(self, store: "Store", silent_seconds: float) -> None:
        self._store, self._silent_seconds = store, silent_seconds
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, ranks: list[int]) -> None:
        """Look at the numbers of `ranks` once more.

        Raises:
            LostRankError: one has not changed for too long.
        """
        now = time.monotonic()
        for rank in ranks:
            pulse = self._store.add(_pulse(rank), 0)
            known, since = self._seen.get(rank, (-1, now))
            if pulse != known:
                self._seen[rank] = pulse, now
            elif now - since > self._silent_seconds:
                raise LostRankError(
                    f"rank {rank} has not been heard of for {now - since:.0f} s, and the others "
                    "wait for it; see that rank's log and node"
                )


def _pulse(rank: int) -> str:
    return f"pulse/{rank}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
