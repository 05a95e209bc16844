"""Acquire the folders of a run exclusively, without locks.

`fence.take` calls it on rank 0, before any other write to the folders. It relies on one property: a
written file is in every listing that starts more than the file system's lag later, and in none that
ended before the write. It uses neither rename nor exclusive create, only this process's own clock,
and does not wait on local disks.

Mutual exclusion between jobs: a process writes `door`, waits, and lists. Of two processes, at least
the later one sees the `door` file of the other, and a process that sees such a file withdraws. At
most one process therefore continues, however slow both are. It then writes `held`, which is
permanent: the job owns the folder, and its next attempt needs only a higher claim. Waiting only
determines the order of newcomers: the smallest uid is first, and a newcomer without progress is
overtaken after a while.

All folders of a run are acquired together, step by step. Otherwise two jobs that share two folders
could acquire one each and both be refused, and two starts of one attempt could each be the later
one in a different folder and both exit.
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
    """Timing of a file system, and the clock to wait with.

    Attributes:
        lag_seconds: Longest time until a new file is in a listing; 0 on a local disk.
        rival_wait_seconds: Time that the first of two newcomers waits for a rival that has not seen
            it yet.
        patience_seconds: Time to wait for a newcomer that does not progress.
        sleep: Waits for a number of seconds; may raise to abort.
        clock: Seconds of this process's own clock.
    """

    lag_seconds: float = 0.0
    rival_wait_seconds: float = 0.5
    patience_seconds: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def until_listed(self) -> None:
        """Wait until every file that any process has written by now is in every listing."""
        if self.lag_seconds:
            self.sleep(2 * self.lag_seconds)


@dataclass(frozen=True)
class Wanted:
    """A folder that a process requests for writing.

    Attributes:
        folder: Path of the folder.
        field: Field of the spec that names the folder.
        job: Job of the process.
        take_over: Whether this job continues the work of a deleted job of its name.
        left_by: Finds the owner of an unclaimed folder by its content, because older trainers did
            not write claims and the next attempt of their job must be admitted.
        remedy: Advice for selecting another folder, if that is not done with `field`.
    """

    folder: Path
    field: str
    job: JobRef
    take_over: bool = False
    left_by: Callable[[Path], JobRef | None] = lambda folder: None
    remedy: str = ""

    def refuse(self, owner: JobRef) -> FolderTakenError:
        """Return the error for a folder that another job owns."""
        whose = f"the job {owner.namespace}/{owner.name} (uid {owner.uid})"
        remedy = self.remedy or f"set another {self.field}"
        if (owner.namespace, owner.name) == (self.job.namespace, self.job.name):
            return FolderTakenError(
                f"{self.field} {self.folder} belongs to {whose}, which had this job's name before "
                f"it (uid {self.job.uid}); delete this job and create it with spec.takeOver true "
                f"to continue there, or {remedy}"
            )
        return FolderTakenError(
            f"{self.field} {self.folder} belongs to {whose}, which wrote there before this one "
            f"(uid {self.job.uid}); {remedy}"
        )

    def may_follow(self, owner: JobRef) -> bool:
        """Whether this job may write to a folder of `owner`: it is the same job or takes over."""
        if owner.identity == self.job.identity:
            return True
        is_namesake = (owner.namespace, owner.name) == (self.job.namespace, self.job.name)
        return self.take_over and is_namesake


def refuse_taken(wanted: Wanted) -> int:
    """Return the epoch that a claim on the folder would have.

    Raises:
        FolderTakenError: another job owns the folder.
        OvertakenError: a later job took the folder over from this one.
    """
    seen = Listing.of(wanted.folder)
    owner, uid = seen.owner, wanted.job.identity
    if owner is not None and owner.uid == uid:
        return owner.epoch
    if owner is not None and any(one.uid == uid and one.epoch < owner.epoch for one in seen.held):
        # Two copied manifests may both allow a takeover, so ownership moves only from the older to
        # the newer job.
        raise taken_over(wanted.folder, uid, owner)
    job = wanted.left_by(wanted.folder) if owner is None else read_job(wanted.folder, owner)
    if job is not None and not wanted.may_follow(job):
        raise wanted.refuse(job)
    return 0 if owner is None else owner.epoch + 1


def read_job(folder: Path, claim: Claim) -> JobRef:
    """Return the job of a claim; if its file cannot be read, only the uid is known."""
    try:
        return JobRef.read(claim.path(folder, Mark.CLAIM))
    except (OSError, ValidationError):
        return JobRef(namespace="?", name="?", uid=claim.uid, attempt=max(1, claim.attempt))


def enter(
    wanted: Sequence[Wanted], pace: Pace, *, nonce: Callable[[], str] | None = None
) -> list[Claim]:
    """Claim all folders, and return the claims once the job owns every one.

    Raises:
        FolderTakenError: another job owns a folder, or was first.
        OvertakenError: there is a higher claim of the same job.
        OutputNotWritableError: a folder cannot be written or listed.
    """
    return _Newcomer(wanted, pace, nonce or (lambda: secrets.token_hex(4))).enter()


class _Bid(NamedTuple):
    """A claim whose job does not own the folder yet."""

    wanted: Wanted
    claim: Claim

    def mark(self, mark: Mark, text: str = "") -> None:
        """Write a mark of the claim.

        Raises:
            ClaimLostError: the claim is gone because the folder was moved or emptied.
        """
        if mark is not Mark.CLAIM:
            self.expect_claim()
        with _errors_named(self.wanted):
            path = self.claim.path(self.wanted.folder, mark)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def expect_claim(self) -> None:
        """Raise an error if the file of the claim no longer exists."""
        if not self.claim.path(self.wanted.folder, Mark.CLAIM).exists():
            raise gone(self.wanted.folder, self.claim)

    def make_durable(self) -> None:
        """Sync the file of the claim, which names the job, to disk."""
        with _errors_named(self.wanted):
            try:
                sync(self.claim.path(self.wanted.folder, Mark.CLAIM))
            except FileNotFoundError:
                raise gone(self.wanted.folder, self.claim) from None

    def listing(self) -> Listing:
        """List the claims.

        Raises:
            FolderTakenError: another job has acquired the folder.
        """
        with _errors_named(self.wanted):
            seen = Listing.of(self.wanted.folder)
        for one in seen.held:
            if one.uid != self.claim.uid and one.epoch >= self.claim.epoch:
                raise self.wanted.refuse(read_job(self.wanted.folder, one))
        return seen

    def unmark(self, mark: Mark) -> None:
        """Remove a mark. If that fails, other jobs see a claim without progress."""
        with suppress(OSError):
            self.claim.path(self.wanted.folder, mark).unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Remove the claim unless its job already owns the folder by it.

        A later attempt may have seen the `held` mark and rely on it.
        """
        if not self.claim.path(self.wanted.folder, Mark.HELD).exists():
            self.unmark(Mark.DOOR)
            self.unmark(Mark.CLAIM)


class _Newcomer:
    """A process that acquires its folders."""

    def __init__(self, wanted: Sequence[Wanted], pace: Pace, nonce: Callable[[], str]) -> None:
        self._wanted = wanted
        self._pace = pace
        self._nonce = nonce
        # When each mark of a rival was first seen, by this process's clock.
        self._first_seen: dict[tuple[Path, Claim, Mark], float] = {}

    def enter(self) -> list[Claim]:
        while True:
            bids = self._bids()
            is_owner = False
            try:
                for bid in bids:
                    bid.mark(Mark.CLAIM, bid.wanted.job.to_json())
                if is_owner := self._acquire(bids):
                    return [bid.claim for bid in bids]
            finally:
                if not is_owner:
                    for bid in bids:
                        bid.withdraw()
            # Retry after a random delay, so that the rival retries at another time.
            self._pace.sleep(random.uniform(0.1, 1.0) * self._pace.rival_wait_seconds)

    def _bids(self) -> list[_Bid]:
        """List every folder before the first write, and return the claims to make.

        Generation and nonce are the same in every folder, so that of two starts of an attempt the
        same one is the later in every folder.
        """
        epochs, generation = [], 1
        for one in self._wanted:
            with _errors_named(one):
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

    def _acquire(self, bids: list[_Bid]) -> bool:
        """Acquire the folders; return False if the claims must be made again."""
        self._pace.until_listed()
        seen = [(bid, bid.listing()) for bid in bids]
        if any(_has_later_start(claim, listing) for (_, claim), listing in seen):
            return False
        for (wanted, claim), listing in seen:
            if (higher := listing.overtakes(claim)) is not None:
                raise overtaken(wanted.folder, claim, higher)
        new = [bid for bid, listing in seen if not _is_held(bid.claim, listing)]
        if not new:
            return True
        self._wait_for_earlier(new)
        return self._pass_doors(new)

    def _wait_for_earlier(self, bids: list[_Bid]) -> None:
        """Return when no newcomer precedes this one."""
        while True:
            rivals = self._rivals(bids, Mark.CLAIM)
            if not any(one.uid < bids[0].claim.uid for one in rivals):
                break
            self._pace.sleep(min(0.05, self._pace.rival_wait_seconds))
        if (
            rivals
        ):  # a rival that listed the folder before our claims existed may have a door mark now
            self._pace.sleep(self._pace.rival_wait_seconds)
            self._pace.until_listed()

    def _pass_doors(self, bids: list[_Bid]) -> bool:
        """Write door marks, then hold the folders; return False if a rival has a door mark, too."""
        began = self._pace.clock()
        for bid in bids:
            bid.listing()
        self._mark(bids, Mark.DOOR)
        if self._rivals(bids, Mark.DOOR):
            return False
        if self._pace.clock() - began > self._pace.patience_seconds / 2:
            return False  # the others may no longer wait for this process
        for bid in bids:  # the owner must be known even after a power loss
            bid.make_durable()
        self._mark(bids, Mark.HELD)
        try:
            for bid in bids:
                bid.listing()
                bid.expect_claim()
        except (
            FolderTakenError,
            ClaimLostError,
        ):  # a rival stopped waiting and overtook this process
            for bid in bids:
                bid.unmark(Mark.HELD)
            raise
        return True

    def _mark(self, bids: list[_Bid], mark: Mark) -> None:
        for bid in bids:
            bid.mark(mark)
        self._pace.until_listed()

    def _rivals(self, bids: list[_Bid], mark: Mark) -> list[Claim]:
        """Return the claims of other jobs in the same epoch that still make progress."""
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


def _has_later_start(claim: Claim, seen: Listing) -> bool:
    """Whether there is a later start of the same attempt that was concurrent with this one."""
    own = (one for one in seen.present if one.uid == claim.uid and one[:3] == claim[:3])
    return any(one > claim for one in own)


def _is_held(claim: Claim, seen: Listing) -> bool:
    """Whether the job already owns the folder."""
    return any(one.uid == claim.uid and one.epoch == claim.epoch for one in seen.held)


@contextmanager
def _errors_named(wanted: Wanted) -> Iterator[None]:
    """Name the folder in the error of a failed file operation."""
    folder = wanted.folder
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        places = [folder / CLAIMS, folder, *folder.parents]
        files = [path for path in places if os.path.lexists(path) and not path.is_dir()]
        file = (files or places)[0]
        raise OutputNotWritableError(
            f"{folder} cannot be created: {file} is not a folder; move it away or use another path"
        ) from None
    except OSError as error:
        raise OutputNotWritableError(
            f"{folder} cannot be written ({error.strerror}); use a folder that this user can "
            "write, on a disk with free space"
        ) from error


def overtaken(folder: Path, claim: Claim, by: Claim) -> OvertakenError:
    """Return the error of a process that must exit because of a higher claim."""
    if by.uid != claim.uid:
        return taken_over(folder, claim.uid, by)
    whose = f"attempt {by.attempt}"
    if by.attempt == claim.attempt:
        whose = f"a later start of attempt {by.attempt} (generation {by.generation})"
    return OvertakenError(
        f"{whose} now writes to {folder}, so attempt {claim.attempt} exited; its committed "
        "checkpoints remain"
    )


def gone(folder: Path, claim: Claim) -> ClaimLostError:
    """Return the error of a process whose claim no longer exists."""
    return ClaimLostError(
        f"the claim of attempt {claim.attempt} on {folder} is gone: the folder was moved, emptied, "
        "deleted or unmounted; another job may write there, so this attempt exited, and the next "
        "attempt resumes from the last remaining checkpoint"
    )


def taken_over(folder: Path, uid: str, by: Claim) -> OvertakenError:
    """Return the error of a job whose folder a later job owns."""
    job = read_job(folder, by)
    return OvertakenError(
        f"the job {job.namespace}/{job.name} (uid {job.uid}) has taken over {folder}; this one "
        f"(uid {uid}) stopped writing"
    )
