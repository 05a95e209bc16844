"""What a claim on a folder is called, and what one listing of the folder's claims says.

A claim is a few small files in `FOLDER/.finetune-claims`, one for each thing it has come to:

    0-2-1-9f3c5a1e.claim.UID   it wants the folder; its content names the job, for people
    0-2-1-9f3c5a1e.door.UID    it has seen no rival
    0-2-1-9f3c5a1e.held.UID    it has the folder

The numbers are the claim's epoch, attempt and generation. Each file is written once, under a name
that nobody else uses, so a check needs the names alone and never a changing file's content.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

CLAIMS = ".finetune-claims"


class Mark(StrEnum):
    """What a claim has come to, or what it has written down."""

    CLAIM = "claim"
    DOOR = "door"
    HELD = "held"
    START = "start"
    LOOK = "look"  # written and deleted at once, so that a listing is fresh


class Claim(NamedTuple):
    """One process's claim on one folder; of one job, the highest has it.

    Attributes:
        epoch: How many jobs had the folder before this one.
        attempt: Of the job.
        generation: Which start of the attempt this is, from 1.
        nonce: Distinguishes claims that are equal in everything else.
        uid: Of the job.
    """

    epoch: int
    attempt: int
    generation: int
    nonce: str
    uid: str

    @property
    def tag(self) -> str:
        """The part of a file's name that says whose it is."""
        return f"{self.epoch}-{self.attempt}-{self.generation}-{self.nonce}"

    def path(self, folder: Path, mark: Mark) -> Path:
        """Return where the claim on `folder` has its `mark`."""
        return folder / CLAIMS / f"{self.tag}.{mark}.{quote(self.uid, safe='')}"


TAG = r"(\d+)-(\d+)-(\d+)-([0-9a-z]+)"
_KEPT = tuple(mark for mark in Mark if mark is not Mark.LOOK)
_NAME = re.compile(rf"{TAG}\.({'|'.join(_KEPT)})\.(.+)")


class Listing(NamedTuple):
    """The claims on a folder, as one listing shows them.

    Attributes:
        present: With any mark at all.
        doors: That have seen no rival.
        held: That have the folder, or had it before a later epoch.
        started: That have written down what they started from.
    """

    present: frozenset[Claim]
    doors: frozenset[Claim]
    held: frozenset[Claim]
    started: frozenset[Claim]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """List the claims on `folder` once; there are none where it does not exist.

        Raises:
            OSError: it cannot be listed.
        """
        try:
            return cls.of_names(path.name for path in (folder / CLAIMS).iterdir())
        except FileNotFoundError:
            return cls.of_names(())

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Self:
        """Read the names of a listing; what is no claim's is passed over."""
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
        """The claim whose job has the folder: the highest that is held; None without any."""
        return max(self.held, default=None)

    def overtakes(self, claim: Claim) -> Claim | None:
        """Return the claim that `claim` must give way to: a higher one of its job, or a later job.

        A higher claim of the same job counts from its first mark on, one of another job only when
        it is held: until then it may have to go again.
        """
        own = [one for one in self.present if one.uid == claim.uid and one > claim]
        later = [one for one in self.held if one.uid != claim.uid and one.epoch > claim.epoch]
        return max((*own, *later), default=None)
