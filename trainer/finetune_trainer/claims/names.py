"""Names of the files of a claim, and the claims found in one listing of a folder.

A claim consists of a few small files in `FOLDER/.finetune-claims`, one for each state that it has
reached:

    0-2-1-9f3c5a1e.claim.UID   a process requests the folder; the content names the job for people
    0-2-1-9f3c5a1e.door.UID    the process has seen no rival
    0-2-1-9f3c5a1e.held.UID    the job owns the folder

The numbers are the claim's epoch, attempt and generation. Each file is written once, under a unique
name, so a check needs only the names and never the content of a changing file.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

CLAIMS = ".finetune-claims"


class Mark(StrEnum):
    """A state that a claim has reached, or a record that it has written."""

    CLAIM = "claim"
    DOOR = "door"
    HELD = "held"
    START = "start"
    LOOK = "look"  # written and deleted at once to force a fresh listing


class Claim(NamedTuple):
    """The claim of one process on one folder; the highest claim of a job is in force.

    Attributes:
        epoch: Number of jobs that owned the folder before this one.
        attempt: Number of the job's attempt.
        generation: Number of this start of the attempt, from 1.
        nonce: Distinguishes claims that are otherwise equal.
        uid: Uid of the job.
    """

    epoch: int
    attempt: int
    generation: int
    nonce: str
    uid: str

    @property
    def tag(self) -> str:
        """The part of a file's name that identifies the process."""
        return f"{self.epoch}-{self.attempt}-{self.generation}-{self.nonce}"

    def path(self, folder: Path, mark: Mark) -> Path:
        """Return the path of the claim's `mark` on `folder`."""
        return folder / CLAIMS / f"{self.tag}.{mark}.{quote(self.uid, safe='')}"


TAG = r"(\d+)-(\d+)-(\d+)-([0-9a-z]+)"
_KEPT = tuple(mark for mark in Mark if mark is not Mark.LOOK)
_NAME = re.compile(rf"{TAG}\.({'|'.join(_KEPT)})\.(.+)")


class Listing(NamedTuple):
    """The claims on a folder in one listing.

    Attributes:
        present: Claims with any mark.
        doors: Claims that have seen no rival.
        held: Claims that own the folder, or owned it before a later epoch.
        started: Claims that have recorded their starting point.
    """

    present: frozenset[Claim]
    doors: frozenset[Claim]
    held: frozenset[Claim]
    started: frozenset[Claim]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """List the claims on `folder` once; a missing folder has no claims.

        Raises:
            OSError: the folder cannot be listed.
        """
        try:
            return cls.of_names(path.name for path in (folder / CLAIMS).iterdir())
        except FileNotFoundError:
            return cls.of_names(())

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Self:
        """Parse the names of a listing; other files are skipped."""
        found: dict[str, set[Claim]] = {mark: set() for mark in Mark}
        for name in names:
            if match := _NAME.fullmatch(name):
                epoch, attempt, generation, nonce, mark, uid = match.groups()
                claim = Claim(int(epoch), int(attempt), int(generation), nonce, unquote(uid))
                found[mark].add(claim)
        return cls(
            frozenset().union(*found.values()),
            frozenset(found[Mark.DOOR]),
            frozenset(found[Mark.HELD]),
            frozenset(found[Mark.START]),
        )

    @property
    def owner(self) -> Claim | None:
        """The highest held claim, whose job owns the folder; None if no claim is held."""
        return max(self.held, default=None)

    def overtakes(self, claim: Claim) -> Claim | None:
        """Return a claim of the same job or a later job that supersedes `claim`; None without one.

        A higher claim of the same job supersedes with its first mark. A claim of another job must
        be held, because it may still withdraw before that.
        """
        own = [one for one in self.present if one.uid == claim.uid and one > claim]
        later = [one for one in self.held if one.uid != claim.uid and one.epoch > claim.epoch]
        return max((*own, *later), default=None)
