"""How a process takes its folders: as the only one of those that want them, without any lock.

`take` in `fence` calls it on rank 0, before anything else is written there. It relies only on this:
a file that was written is in every listing made more than the layer's lag later, and in none
before. No rename, no exclusive create, no clock but this process's own, and no wait on local disks.

Between jobs: each of two that write `door`, wait, and then list sees the other's door, unless the
other was so late that it sees this one's; one that sees another's door goes back. So two are never
past it, however slow they are. The one that is past it writes `held`, which stays: the job owns the
folder from then on, and its next attempt needs only a higher claim. Waiting decides only which of
several newcomers comes first: the smallest uid, and one that makes no progress is passed after a
while.

All folders of a run are taken together, step by step. If they were taken one by one, two jobs that
share two folders could get one each, and both be refused; and two starts of one attempt could each
be the later one somewhere, and both leave.
"""

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from finetune_trainer.claims.names import CLAIMS, Claim, Listing, Mark
from finetune_trainer.config import JobRef
from finetune_trainer.errors import (
    ClaimLostError,
    FolderTakenError,
    OutputNotWritableError,
    OvertakenError,
)
from finetune_trainer.files import sync


@dataclass(frozen=True)
class Pace:
    """How long things take on a file layer, and who waits.

    Attributes:
        lag_seconds: Longest time until a new file is in a listing; 0 on a local disk.
        settle_seconds: How long the first of two newcomers waits for one that has not seen it.
        patience_seconds: How long to wait for a newcomer that makes no progress.
        sleep: Waits so many seconds; may raise to break off.
        clock: Seconds of this process's own clock.
    """

    lag_seconds: float = 0.0
    settle_seconds: float = 0.5
    patience_seconds: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def until_listed(self) -> None:
        """Wait until what was written by now is in every listing, and what others had written."""
        if self.lag_seconds:
            self.sleep(2 * self.lag_seconds)


@dataclass(frozen=True)
class Wanted:
    """A folder that a process wants to write into.

    Attributes:
        folder: Which.
        field: What the user calls it.
        job: Whose process it is.
        take_over: The job of this name that had it before is gone, and this one goes on in it.
        left_by: Finds whose work lies in a folder that nobody has claimed: trainers before claims
            made none, and their next attempt must find the folder as it was.
        remedy: How the user has the job use another one, if not by that field.
    """

    folder: Path
    field: str
    job: JobRef
    take_over: bool = False
    left_by: Callable[[Path], JobRef | None] = lambda folder: None
    remedy: str = ""

    def refuse(self, owner: JobRef) -> FolderTakenError:
        """Return the error for a folder that another job has."""
        whose = f"the job {owner.namespace}/{owner.name} (uid {owner.uid})"
        remedy = self.remedy or f"set another {self.field}"
        if (owner.namespace, owner.name) == (self.job.namespace, self.job.name):
            return FolderTakenError(
                f"{self.field} {self.folder} belongs to {whose}, which had this job's name before "
                f"it (uid {self.job.uid}); delete this job and create it with spec.takeOver true "
                f"to go on there, or {remedy}"
            )
        return FolderTakenError(
            f"{self.field} {self.folder} belongs to {whose}, which wrote there before this one "
            f"(uid {self.job.uid}); {remedy}"
        )

    def may_follow(self, owner: JobRef) -> bool:
        """Whether this job may write where `owner` has written: it is the same, or takes over."""
        if owner.identity == self.job.identity:
            return True
        is_namesake = (owner.namespace, owner.name) == (self.job.namespace, self.job.name)
        return self.take_over and is_namesake


def refuse_taken(wanted: Wanted) -> int:
    """Return the epoch that a claim on the folder would have.

    Raises:
        FolderTakenError: another job has it.
        OvertakenError: a later job has it, which took it over from this one.
    """
    seen = Listing.of(wanted.folder)
    owner, uid = seen.owner, wanted.job.identity
    if owner is not None and owner.uid == uid:
        return owner.epoch
    if owner is not None and any(one.uid == uid and one.epoch < owner.epoch for one in seen.held):
        # Both manifests may allow it, as copies do: it goes from the older to the newer one only.
        raise taken_over(wanted.folder, uid, owner)
    job = wanted.left_by(wanted.folder) if owner is None else read_job(wanted.folder, owner)
    if job is not None and not wanted.may_follow(job):
        raise wanted.refuse(job)
    return 0 if owner is None else owner.epoch + 1


def read_job(folder: Path, claim: Claim) -> JobRef:
    """Return whose claim it is; of a claim that cannot be read, only the uid is known."""
    try:
        return JobRef.read(claim.path(folder, Mark.CLAIM))
    except (OSError, ValidationError):
        return JobRef(namespace="?", name="?", uid=claim.uid, attempt=max(1, claim.attempt))


def enter(
    wanted: Sequence[Wanted], pace: Pace, *, nonce: Callable[[], str] | None = None
) -> list[Claim]:
    """Claim all folders, and return the claims once the job has every one.

    Raises:
        FolderTakenError: another job has one, or got it first.
        OvertakenError: there is a higher claim of the same job.
        OutputNotWritableError: one cannot be written or listed.
    """
    return _Newcomer(wanted, pace, nonce or (lambda: secrets.token_hex(4))).enter()


class _Bid(NamedTuple):
    """A claim on its way."""

    wanted: Wanted
    claim: Claim

    def mark(self, mark: Mark, text: str = "") -> None:
        """Write down what the claim has come to.

        Raises:
            ClaimLostError: the claim itself was moved away meanwhile, with all that was there.
        """
        if mark is not Mark.CLAIM:
            self.expect_claim()
        with _naming(self.wanted):
            path = self.claim.path(self.wanted.folder, mark)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def expect_claim(self) -> None:
        """Return if the claim is still there."""
        if not self.claim.path(self.wanted.folder, Mark.CLAIM).exists():
            raise gone(self.wanted.folder, self.claim)

    def make_durable(self) -> None:
        """Sync the claim to disk, which says whose it is."""
        with _naming(self.wanted):
            try:
                sync(self.claim.path(self.wanted.folder, Mark.CLAIM))
            except FileNotFoundError:
                raise gone(self.wanted.folder, self.claim) from None

    def listing(self) -> Listing:
        """List the claims.

        Raises:
            FolderTakenError: another job has taken the folder.
        """
        with _naming(self.wanted):
            seen = Listing.of(self.wanted.folder)
        for one in seen.held:
            if one.uid != self.claim.uid and one.epoch >= self.claim.epoch:
                raise self.wanted.refuse(read_job(self.wanted.folder, one))
        return seen

    def unmark(self, mark: Mark) -> None:
        """Remove a mark; a claim whose mark cannot be removed makes no progress."""
        with suppress(OSError):
            self.claim.path(self.wanted.folder, mark).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the claim, unless its job owns the folder by it already.

        A later attempt may have seen that it does, and relies on it.
        """
        if not self.claim.path(self.wanted.folder, Mark.HELD).exists():
            self.unmark(Mark.DOOR)
            self.unmark(Mark.CLAIM)


class _Newcomer:
    """One process on its way into its folders."""

    def __init__(self, wanted: Sequence[Wanted], pace: Pace, nonce: Callable[[], str]) -> None:
        self._wanted = wanted
        self._pace = pace
        self._nonce = nonce
        # Rivals, by our own clock.
        self._first_seen: dict[tuple[Path, Claim, Mark], float] = {}

    def enter(self) -> list[Claim]:
        while True:
            bids = self._bids()
            are_in = False
            try:
                for bid in bids:
                    bid.mark(Mark.CLAIM, bid.wanted.job.to_json())
                if are_in := self._are_in(bids):
                    return [bid.claim for bid in bids]
            finally:
                if not are_in:
                    for bid in bids:
                        bid.withdraw()
            # After going back, come again at another time than the rival does.
            self._pace.sleep(random.uniform(0.1, 1.0) * self._pace.settle_seconds)

    def _bids(self) -> list[_Bid]:
        """List every folder before anything is written into one, and return what to claim.

        Generation and nonce are the same everywhere, so that of two starts of one attempt the same
        one is the later everywhere.
        """
        epochs, generation = [], 1
        for one in self._wanted:
            with _naming(one):
                epochs.append(refuse_taken(one))
                present = Listing.of(one.folder).present
            for seen in present:
                if (seen.uid, seen.attempt) == (one.job.identity, one.job.attempt):
                    generation = max(generation, seen.generation + 1)
        nonce = self._nonce()
        return [
            _Bid(one, Claim(epoch, one.job.attempt, generation, nonce, one.job.identity))
            for one, epoch in zip(self._wanted, epochs, strict=True)
        ]

    def _are_in(self, bids: list[_Bid]) -> bool:
        """Go on as far as the claims come; False where they have to be made again."""
        self._pace.until_listed()
        seen = [(bid, bid.listing()) for bid in bids]
        if any(_has_later_twin(claim, listing) for (_, claim), listing in seen):
            return False
        for (wanted, claim), listing in seen:
            if (higher := listing.overtakes(claim)) is not None:
                raise overtaken(wanted.folder, claim, higher)
        new = [bid for bid, listing in seen if not _has(bid.claim, listing)]
        if not new:
            return True
        self._let_others_go_first(new)
        return self._are_past_the_doors(new)

    def _let_others_go_first(self, bids: list[_Bid]) -> None:
        """Return when no newcomer is left that comes before this one."""
        while True:
            rivals = self._rivals(bids, Mark.CLAIM)
            if not any(one.uid < bids[0].claim.uid for one in rivals):
                break
            self._pace.sleep(min(0.05, self._pace.settle_seconds))
        if rivals:  # one that listed before our claims were there may be at a door now
            self._pace.sleep(self._pace.settle_seconds)
            self._pace.until_listed()

    def _are_past_the_doors(self, bids: list[_Bid]) -> bool:
        """Go through the doors and take the folders; False where another one did the same."""
        began = self._pace.clock()
        for bid in bids:
            bid.listing()
        self._mark(bids, Mark.DOOR)
        if self._rivals(bids, Mark.DOOR):
            return False
        if self._pace.clock() - began > self._pace.patience_seconds / 2:
            return False  # the others may have given up on this one
        for bid in bids:  # whose folder it is must be known also after a power loss
            bid.make_durable()
        self._mark(bids, Mark.HELD)
        try:
            for bid in bids:
                bid.listing()
                bid.expect_claim()
        except (FolderTakenError, ClaimLostError):  # others gave up on it, and went ahead
            for bid in bids:
                bid.unmark(Mark.HELD)
            raise
        return True

    def _mark(self, bids: list[_Bid], mark: Mark) -> None:
        for bid in bids:
            bid.mark(mark)
        self._pace.until_listed()

    def _rivals(self, bids: list[_Bid], mark: Mark) -> list[Claim]:
        """Return claims of other jobs of the same epoch that still make progress."""
        found = []
        for bid in bids:
            seen = bid.listing()
            now = self._pace.clock()
            for one in seen.doors if mark is Mark.DOOR else seen.present:
                if one.uid == bid.claim.uid or one.epoch != bid.claim.epoch:
                    continue
                since = self._first_seen.setdefault((bid.wanted.folder, one, mark), now)
                if now - since < self._pace.patience_seconds:
                    found.append(one)
        return found


def _has_later_twin(claim: Claim, seen: Listing) -> bool:
    """Whether there is a later start of the same attempt, neither of which could see the other."""
    own = (one for one in seen.present if one.uid == claim.uid and one[:3] == claim[:3])
    return any(one > claim for one in own)


def _has(claim: Claim, seen: Listing) -> bool:
    """Whether the job has the folder already."""
    return any(one.uid == claim.uid and one.epoch == claim.epoch for one in seen.held)


@contextmanager
def _naming(wanted: Wanted) -> Iterator[None]:
    """Name the folder where something cannot be done in it."""
    folder = wanted.folder
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        places = [folder / CLAIMS, folder, *folder.parents]
        files = [path for path in places if os.path.lexists(path) and not path.is_dir()]
        file = (files or places)[0]
        raise OutputNotWritableError(
            f"{folder} cannot be a folder: {file} is no folder; move it away or name another one"
        ) from None
    except OSError as error:
        raise OutputNotWritableError(
            f"{folder} cannot be written ({error.strerror}); name a folder that this user may "
            "write, with room on it"
        ) from error


def overtaken(folder: Path, claim: Claim, by: Claim) -> OvertakenError:
    """Return the error of a process that must leave."""
    if by.uid != claim.uid:
        return taken_over(folder, claim.uid, by)
    whose = f"attempt {by.attempt}"
    if by.attempt == claim.attempt:
        whose = f"a later start of attempt {by.attempt} (generation {by.generation})"
    return OvertakenError(
        f"{whose} writes into {folder} by now, so attempt {claim.attempt} left; what it had "
        "committed until then stays"
    )


def gone(folder: Path, claim: Claim) -> ClaimLostError:
    """Return the error of a process whose claim is not there any more."""
    return ClaimLostError(
        f"the claim of attempt {claim.attempt} on {folder} is gone, as the folder was moved, "
        "emptied, deleted or unmounted; another job may write there, so this attempt left, and the "
        "next one goes on from the last checkpoint that is still there"
    )


def taken_over(folder: Path, uid: str, by: Claim) -> OvertakenError:
    """Return the error of a job whose folder a later one has."""
    job = read_job(folder, by)
    return OvertakenError(
        f"the job {job.namespace}/{job.name} (uid {job.uid}) has taken over {folder}; this one "
        f"(uid {uid}) wrote no further"
    )
