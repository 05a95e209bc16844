"""How a process comes to have a folder: alone among all that want it, without any lock.

`take` in `fence` calls it on rank 0, before anything else is written there. Only this is relied
upon: a file that was written is in every listing made more than the layer's lag later, and in none
before. No rename, no exclusive create, no clock but this process's own, and no wait on local disks.

Between jobs: each of two that write `door`, wait, and then list sees the other's door, unless the
other was so late that it sees this one's; whoever sees one goes back. So two are never past it,
however slow they are. Whoever is past it writes `held`, which stays: the job has the folder from
then on, and its next attempt needs no more than a higher claim. Only who comes first among
newcomers is decided by waiting: the smallest uid goes ahead, and one that stands still is passed
after a while.
"""

import random
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer.claims.names import Claim, Listing, Mark
from finetune_trainer.config import JobRef
from finetune_trainer.errors import FolderTakenError, OvertakenError


@dataclass(frozen=True)
class Pace:
    """How long things take on a file layer, and who waits.

    Attributes:
        lag_seconds: Longest time until a new file is in a listing; 0 on a local disk.
        settle_seconds: How long the first of two newcomers waits for one that has not seen it.
        patience_seconds: How long a newcomer that does not get on is waited for.
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
    """

    folder: Path
    field: str
    job: JobRef
    take_over: bool = False
    left_by: Callable[[Path], JobRef | None] = lambda folder: None

    def refuse(self, owner: JobRef) -> FolderTakenError:
        """Return the error for a folder that another job has."""
        whose = f"the job {owner.namespace}/{owner.name} (uid {owner.uid})"
        if (owner.namespace, owner.name) == (self.job.namespace, self.job.name):
            return FolderTakenError(
                f"{self.field} {self.folder} belongs to {whose}, which had this job's name before "
                f"it (uid {self.job.uid}); set spec.takeOver true to go on there, or set another "
                f"{self.field}"
            )
        return FolderTakenError(
            f"{self.field} {self.folder} belongs to {whose}, which wrote there before this one "
            f"(uid {self.job.uid}); set another {self.field}"
        )

    def may_follow(self, owner: JobRef) -> bool:
        """Whether this job may write where `owner` has written: it is the same, or takes over."""
        if owner.uid == self.job.uid:
            return True
        is_namesake = (owner.namespace, owner.name) == (self.job.namespace, self.job.name)
        return self.take_over and is_namesake


def refuse_taken(wanted: Wanted) -> int:
    """Return the epoch that a claim on the folder would have.

    Raises:
        FolderTakenError: another job has it.
    """
    owner = Listing.of(wanted.folder).owner
    if owner is not None and owner.uid == wanted.job.uid:
        return owner.epoch
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


def enter(wanted: Wanted, pace: Pace, *, nonce: Callable[[], str] | None = None) -> Claim:
    """Claim the folder, and return the claim once its job has it.

    Raises:
        FolderTakenError: another job has it, or got it first.
        OvertakenError: there is a higher claim of the same job.
        OSError: the folder cannot be written or listed.
    """
    return _Newcomer(wanted, pace, nonce or (lambda: secrets.token_hex(4))).enter()


class _Newcomer:
    """One process on its way into one folder."""

    def __init__(self, wanted: Wanted, pace: Pace, nonce: Callable[[], str]) -> None:
        self._wanted = wanted
        self._folder = wanted.folder
        self._pace = pace
        self._nonce = nonce
        self._first_seen: dict[tuple[Claim, Mark], float] = {}  # rivals, by our own clock

    def enter(self) -> Claim:
        while True:
            claim = self._claim()
            is_in = False
            try:
                if is_in := self._is_in(claim):
                    return claim
            finally:
                if not is_in:
                    self._withdraw(claim)
            # Whoever had to go back comes again at another time than the one it met.
            self._pace.sleep(random.uniform(0.1, 1.0) * self._pace.settle_seconds)

    def _claim(self) -> Claim:
        job, epoch = self._wanted.job, refuse_taken(self._wanted)
        seen = Listing.of(self._folder)
        before = (
            one.generation
            for one in seen.present
            if (one.uid, one.epoch, one.attempt) == (job.uid, epoch, job.attempt)
        )
        claim = Claim(epoch, job.attempt, max(before, default=0) + 1, self._nonce(), job.uid)
        path = claim.path(self._folder, Mark.CLAIM)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(job.to_json(), encoding="utf-8")
        return claim

    def _is_in(self, claim: Claim) -> bool:
        """Go on as far as the claim comes; False where it has to be made anew."""
        self._pace.until_listed()
        seen = self._look(claim)
        if any(
            one > claim and one[:3] == claim[:3] for one in seen.present if one.uid == claim.uid
        ):
            return False  # two starts of one attempt, neither of which could see the other
        if (higher := seen.overtakes(claim)) is not None:
            raise overtaken(self._folder, claim, higher)
        if any(one.epoch == claim.epoch for one in seen.held if one.uid == claim.uid):
            return True
        self._let_others_go_first(claim)
        return self._is_past_the_door(claim)

    def _let_others_go_first(self, claim: Claim) -> None:
        """Return when no newcomer is left that comes before this one."""
        while True:
            rivals = self._rivals(self._look(claim).present, claim, Mark.CLAIM)
            if not any(one.uid < claim.uid for one in rivals):
                break
            self._pace.sleep(min(0.05, self._pace.settle_seconds))
        if rivals:  # who listed before our claim was there may be at the door by now
            self._pace.sleep(self._pace.settle_seconds)
            self._pace.until_listed()

    def _is_past_the_door(self, claim: Claim) -> bool:
        """Go through the door and take the folder; False where another one did likewise."""
        began = self._pace.clock()
        self._look(claim)
        self._mark(claim, Mark.DOOR)
        if self._rivals(self._look(claim).doors, claim, Mark.DOOR):
            return False
        if self._pace.clock() - began > self._pace.patience_seconds / 2:
            return False  # the others may have given this one up
        self._mark(claim, Mark.HELD)
        try:
            self._look(claim)
        except FolderTakenError:  # it was given up all the same, and came back only now
            claim.path(self._folder, Mark.HELD).unlink(missing_ok=True)
            raise
        return True

    def _mark(self, claim: Claim, mark: Mark) -> None:
        claim.path(self._folder, mark).write_text("", encoding="utf-8")
        self._pace.until_listed()

    def _look(self, claim: Claim) -> Listing:
        """List the claims.

        Raises:
            FolderTakenError: another job has the folder by now.
        """
        seen = Listing.of(self._folder)
        for one in seen.held:
            if one.uid != claim.uid and one.epoch >= claim.epoch:
                raise self._wanted.refuse(read_job(self._folder, one))
        return seen

    def _rivals(self, claims: Iterable[Claim], claim: Claim, mark: Mark) -> list[Claim]:
        """Return those of other jobs for the same epoch that have not stood still for too long."""
        now, found = self._pace.clock(), []
        for one in claims:
            if one.uid == claim.uid or one.epoch != claim.epoch:
                continue
            if now - self._first_seen.setdefault((one, mark), now) < self._pace.patience_seconds:
                found.append(one)
        return found

    def _withdraw(self, claim: Claim) -> None:
        """Take back what the claim has come to, unless its job has the folder by it already.

        A later attempt may have seen that, and would believe that the job has what it has not.
        """
        if claim.path(self._folder, Mark.HELD).exists():
            return
        for mark in (Mark.DOOR, Mark.CLAIM):
            with suppress(OSError):  # what stays is a claim that does not get on
                claim.path(self._folder, mark).unlink(missing_ok=True)


def overtaken(folder: Path, claim: Claim, by: Claim) -> OvertakenError:
    """Return the error of a process that must leave."""
    if by.uid != claim.uid:
        job = read_job(folder, by)
        return OvertakenError(
            f"the job {job.namespace}/{job.name} (uid {job.uid}) has taken over {folder}; this one "
            f"(uid {claim.uid}) wrote no further"
        )
    whose = f"attempt {by.attempt}"
    if by.attempt == claim.attempt:
        whose = f"a later start of attempt {by.attempt} (generation {by.generation})"
    return OvertakenError(
        f"{whose} writes into {folder} by now, so attempt {claim.attempt} left; what it had "
        "committed until then stays"
    )
