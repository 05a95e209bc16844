"""Hold the claims of one attempt on all its folders, and check that they are still in force.

`launch.worker` takes the claims on rank 0 before any file is written, telemetry included. Code that
commits, deletes or publishes checks the claims immediately before. A thread checks them for all
other writes. A check lists each folder once.
"""

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.claims.enter import Pace, Wanted, enter, gone, overtaken
from finetune_trainer.claims.names import Claim, Listing, Mark
from finetune_trainer.errors import ClaimLostError, OvertakenError

SECONDS_BETWEEN_CHECKS = 4.0
# File systems that list a new file at once. Others, such as remote ones, may list it later.
_LOCAL_FILE_SYSTEMS = frozenset(
    [
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuse.fuse-overlayfs"),
        *("fuseblk", "jfs", "ntfs3", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"),
    ]
)
_REMOTE_LAG_SECONDS = 2.0
_OCTAL = re.compile(r"\\([0-7]{3})")  # a space in a mount point is written \040


class Holding(NamedTuple):
    """A folder that this process owns, with the claim and the timing of its file system."""

    wanted: Wanted
    claim: Claim
    pace: Pace


class Fence:
    """Checks whether this process may still write into the folders that it has claimed.

    Args:
        holdings: One per folder.
        clock: Seconds of this process's own clock.

    Attributes:
        lost: The error of the check that found a higher claim; None before.
    """

    def __init__(
        self, holdings: Sequence[Holding], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._holdings = {_real_path(one.wanted.folder): one for one in holdings}
        self._clock = clock
        self._checked_at = float("-inf")
        self.lost: OvertakenError | None = None

    def holding(self, folder: Path) -> Holding:
        """Return the holding of `folder`."""
        return self._holdings[_real_path(folder)]

    def check(self) -> None:
        """Return if every claim is in force.

        Raises:
            OvertakenError: there is a higher claim.
            ClaimLostError: the files of a claim are gone.
            OSError: a folder cannot be written or listed, so the state is unknown.
        """
        began = self._clock()
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
        self._checked_at = began

    def check_if_older(self, seconds: float) -> None:
        """Check unless a check that began less than `seconds` ago has succeeded.

        While `watch` checks, only a process that was stopped meanwhile has an older check.

        Raises:
            OvertakenError, ClaimLostError, OSError: as `check`.
        """
        if self._clock() - self._checked_at >= seconds:
            self.check()

    def watch(
        self,
        end: Callable[[OvertakenError | ClaimLostError], None],
        every_seconds: float = SECONDS_BETWEEN_CHECKS,
    ) -> None:
        """Check in a thread until a claim is no longer in force, then call `end`."""

        def watch() -> None:
            pause = threading.Event()
            while True:
                pause.wait(every_seconds)
                try:
                    with suppress(OSError):  # storage that fails now may recover
                        self.check()
                except (OvertakenError, ClaimLostError) as error:
                    end(error)
                    return

        threading.Thread(target=watch, name="fence", daemon=True).start()


def take(wanted: Sequence[Wanted], pace: Callable[[Path], Pace]) -> Fence:
    """Claim all folders together, and return when the job owns every one.

    `pace` returns the timing of a folder's file system; the slowest applies to all.

    Raises:
        FolderTakenError: another job owns a folder; claims on the others were not written, or are
            withdrawn.
        OvertakenError: a later attempt of the job was faster, or a later job took over.
        OutputNotWritableError: a folder cannot be written.
    """
    distinct = list({_real_path(one.folder): one for one in wanted}.values())
    slowest = max((pace(one.folder) for one in distinct), key=lambda one: one.lag_seconds)
    claims = enter(distinct, slowest)
    fence = Fence([Holding(*one, slowest) for one in zip(distinct, claims, strict=True)])
    fence.check()
    return fence


def listing_lag_seconds(folder: Path) -> float:
    """Return the longest delay until a new file is listed, by the type of the file system."""
    place = os.path.realpath(folder)
    found, longest = "", -1
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, layer = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split()[4])
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= longest:  # a later mount hides an earlier one
            found, longest = layer.split()[0], len(point)
    return 0.0 if found in _LOCAL_FILE_SYSTEMS else _REMOTE_LAG_SECONDS


def _refresh(folder: Path, claim: Claim) -> None:
    """Create and delete a file: an NFS client lists a folder again after its own change.

    Without a change, it may return a stale listing for up to a minute.
    """
    try:
        look = claim.path(folder, Mark.LOOK).with_suffix(f".{secrets.token_hex(4)}")
        look.write_text("", encoding="utf-8")
        look.unlink()
    except FileNotFoundError:
        raise gone(folder, claim) from None


def _real_path(folder: Path) -> str:
    """Return the real path: a process must not overtake itself through another name."""
    return os.path.realpath(folder)
