"""The claims of one attempt on all its folders, and the check whether they still hold.

`launch.worker` takes them on rank 0 before the first file is written, telemetry's included. Who
commits, deletes or publishes checks directly before; a thread checks for all that is written
besides. A check is one listing for each folder.
"""

import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.claims.enter import Pace, Wanted, enter, gone, overtaken
from finetune_trainer.claims.names import Claim, Listing, Mark
from finetune_trainer.errors import ClaimLostError, OvertakenError

SECONDS_BETWEEN_CHECKS = 4.0
# Of these, one that is written is listed at once; of every other, remote ones, nobody knows.
_LOCAL_FILE_SYSTEMS = frozenset(
    [
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs"),
        *("fuseblk", "jfs", "ntfs3", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"),
    ]
)
_REMOTE_LAG_SECONDS = 2.0
_OCTAL = re.compile(r"\\([0-7]{3})")  # a space in a mount point is written \040


class Holding(NamedTuple):
    """A folder that this process has, by which claim, and how long things take there."""

    wanted: Wanted
    claim: Claim
    pace: Pace


class Fence:
    """Says whether this process may still write into the folders it has claimed.

    Args:
        holdings: One for each folder.

    Attributes:
        lost: The higher claim that was found, once a check has found one.
    """

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = {_place(one.wanted.folder): one for one in holdings}
        self.lost: OvertakenError | None = None

    def holding(self, folder: Path) -> Holding:
        """Return how this process has `folder`."""
        return self._holdings[_place(folder)]

    def check(self) -> None:
        """Return if every claim holds.

        Raises:
            OvertakenError: there is a higher one.
            ClaimLostError: it is not there any more.
            OSError: a folder cannot be written or listed, so nobody knows.
        """
        for wanted, claim, pace in self._holdings.values():
            folder = wanted.folder
            if pace.lag_seconds:
                _refresh(folder, claim)
            seen = Listing.of(folder)
            if (higher := seen.overtakes(claim)) is not None:
                self.lost = overtaken(folder, claim, higher)
                raise self.lost
            if claim not in seen.present:
                raise gone(folder, claim)

    def watch(
        self,
        end: Callable[[OvertakenError | ClaimLostError], None],
        every_seconds: float = SECONDS_BETWEEN_CHECKS,
    ) -> None:
        """Check from a thread until a claim does not hold any more, then call `end`."""

        def watch() -> None:
            pause = threading.Event()
            while True:
                pause.wait(every_seconds)
                try:
                    with suppress(OSError):  # a layer that does not answer now may do so later
                        self.check()
                except (OvertakenError, ClaimLostError) as error:
                    end(error)
                    return

        threading.Thread(target=watch, name="fence", daemon=True).start()


def take(wanted: Sequence[Wanted], pace: Callable[[Path], Pace]) -> Fence:
    """Claim all folders at once, and return when the job has every one.

    `pace` says what is known of the file layer a folder is on; the slowest one counts for all.

    Raises:
        FolderTakenError: another job has one; nothing of the others was written, or is given back.
        OvertakenError: a later attempt of the job was faster, or a later job took over.
        OutputNotWritableError: one cannot be written.
    """
    distinct = list({_place(one.folder): one for one in wanted}.values())
    slowest = max((pace(one.folder) for one in distinct), key=lambda one: one.lag_seconds)
    claims = enter(distinct, slowest)
    fence = Fence([Holding(*one, slowest) for one in zip(distinct, claims, strict=True)])
    fence.check()
    return fence


def listing_lag_seconds(folder: Path) -> float:
    """Return how long a new file may be missing from a listing, by the type of the file system."""
    place = os.path.realpath(folder)
    found, longest = "", -1
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, layer = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split()[4])
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:  # of two on one place, the later one counts
            found, longest = layer.split()[0], len(point)
    return 0.0 if found in _LOCAL_FILE_SYSTEMS else _REMOTE_LAG_SECONDS


def _refresh(folder: Path, claim: Claim) -> None:
    """Create and delete a file, as an NFS client lists a folder again after it has changed it.

    Otherwise it may return an old listing for a minute.
    """
    try:
        look = claim.path(folder, Mark.LOOK).with_suffix(f".{secrets.token_hex(4)}")
        look.write_text("", encoding="utf-8")
        look.unlink()
    except FileNotFoundError:
        raise gone(folder, claim) from None


def _place(folder: Path) -> str:
    """Return what is the same for a folder by all its names: nobody overtakes himself."""
    return os.path.realpath(folder)
