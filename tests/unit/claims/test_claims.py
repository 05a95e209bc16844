"""Who comes to have a folder, who leaves it, and what each is told."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, listing_lag_seconds, take
from finetune_trainer.claims.names import CLAIMS, Claim, Listing, Mark
from finetune_trainer.config import JobRef
from finetune_trainer.errors import (
    ClaimLostError,
    FolderTakenError,
    OutputNotWritableError,
    OvertakenError,
)
from support.checkpoint.lagging_layer import lagging_layer

A = JobRef(name="first", uid="uid-a")
B = JobRef(name="second", uid="uid-b")


class WaitedError(Exception):
    """A process waited that should not, or has waited for long enough."""


def wait_never(seconds: float) -> NoReturn:
    raise WaitedError(f"{seconds} s")


class PlayedTime:
    """A clock that only waiting moves on, and what happens to others meanwhile."""

    def __init__(self, *meanwhile: Callable[[], object]) -> None:
        self.now = 0.0
        self._meanwhile = list(meanwhile)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 1000:
            raise WaitedError("for ever")
        if self._meanwhile:
            self._meanwhile.pop(0)()

    def pace(self, lag_seconds: float = 0.0) -> Pace:
        return Pace(lag_seconds, sleep=self.sleep, clock=lambda: self.now)


AT_ONCE = Pace(sleep=wait_never)


def want(folder: Path, job: JobRef = A, *, take_over: bool = False) -> Wanted:
    return Wanted(folder, "spec.checkpoint.uri", job, take_over)


def claim_all(
    *folders: Path, job: JobRef = A, pace: Pace = AT_ONCE, take_over: bool = False
) -> Fence:
    return take([want(one, job, take_over=take_over) for one in folders], lambda _: pace)


def attempt(number: int, job: JobRef = A) -> JobRef:
    return job.model_copy(update={"attempt": number})


def claim_of(fence: Fence, folder: Path) -> Claim:
    return fence.holding(folder).claim


def put(folder: Path, claim: Claim, *marks: Mark, job: JobRef | None = None) -> Claim:
    """Leave what a process with `claim` would have written when it was killed."""
    (folder / CLAIMS).mkdir(parents=True, exist_ok=True)
    for mark in (Mark.CLAIM, *marks):
        text = (job or JobRef(name="killed", uid=claim.uid)).to_json() if mark == "claim" else ""
        claim.path(folder, mark).write_text(text)
    return claim


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "uid",
    [
        pytest.param("3e7c1d5a-0000-4000-8000-0123456789ab", id="as the API gives it"),
        pytest.param("default/tiny", id="with a slash"),
        pytest.param("a.claim.b.held", id="with dots and marks"),
        pytest.param(" 100% ä\n漢", id="with spaces, percents and other letters"),
    ],
)
def test_a_claim_is_read_back_from_its_names(tmp_path: Path, uid: str) -> None:
    claim = put(tmp_path, Claim(2, 13, 4, "0f3a", uid), Mark.DOOR, Mark.HELD)
    seen = Listing.of(tmp_path)
    assert (seen.present, seen.doors, seen.held) == ({claim}, {claim}, {claim})
    assert seen.started == frozenset()


def test_what_is_no_claims_file_is_passed_over(tmp_path: Path) -> None:
    names = [".nfs0001", "0-1-1-aa.claim", "0-1-1-aa.claimed.u", "x-1-1-aa.held.u", "._0-1-1"]
    assert Listing.of_names(names).present == frozenset()
    assert Listing.of(tmp_path / "not there").present == frozenset()


def test_the_higher_attempt_wins_by_number_not_by_text() -> None:
    older, newer = Claim(0, 9, 1, "ff", "u"), Claim(0, 10, 1, "00", "u")
    seen = Listing.of_names(f"{one.tag}.held.u" for one in (older, newer))
    assert seen.overtakes(older) == newer
    assert seen.overtakes(newer) is None
    assert seen.owner == newer


def test_a_new_folder_is_had_at_once_on_a_local_disk(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("run", "checkpoints", "output")]
    fence = claim_all(*folders)
    fence.check()
    assert {claim_of(fence, one) for one in folders} == {claim_of(fence, folders[0])}
    for folder in folders:
        assert Listing.of(folder).owner == claim_of(fence, folder)
        assert JobRef.read(claim_of(fence, folder).path(folder, Mark.CLAIM)) == A


def test_two_names_of_one_folder_are_claimed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fence = claim_all(tmp_path / "link", tmp_path / "real", tmp_path / "x" / ".." / "real")
    fence.check()
    assert claim_of(fence, tmp_path / "link") == claim_of(fence, tmp_path / "real")
    assert len(Listing.of(tmp_path / "real").present) == 1


def test_the_next_attempt_goes_on_at_once_and_the_one_before_leaves(tmp_path: Path) -> None:
    first = claim_all(tmp_path)
    second = claim_all(tmp_path, job=attempt(2))
    second.check()
    with pytest.raises(OvertakenError) as overtaken:
        first.check()
    assert str(overtaken.value) == (
        f"attempt 2 now writes to {tmp_path}, so attempt 1 exited; its committed checkpoints remain"
    )
    assert first.lost is overtaken.value


def test_a_second_start_of_one_attempt_is_the_later_one(tmp_path: Path) -> None:
    first, second = claim_all(tmp_path), claim_all(tmp_path)
    second.check()
    with pytest.raises(OvertakenError) as overtaken:
        first.check()
    assert "a later start of attempt 1 (generation 2)" in str(overtaken.value)


def test_an_attempt_that_comes_after_its_successor_leaves_nothing(tmp_path: Path) -> None:
    claim_all(tmp_path, job=attempt(2))
    before = written(tmp_path)
    with pytest.raises(OvertakenError, match="attempt 2 now writes to"):
        claim_all(tmp_path)
    assert written(tmp_path) == before


def crash(folder: Path) -> None:
    claim_all(folder)


def complete(folder: Path) -> None:
    claim_all(folder, job=attempt(3))
    (folder / "model.safetensors").write_text("finished")


def be_killed_at_the_start(folder: Path) -> None:
    put(folder, Claim(0, 1, 1, "aa", A.uid), Mark.DOOR, Mark.HELD, job=A)


@pytest.mark.parametrize("first", [crash, complete, be_killed_at_the_start])
@pytest.mark.parametrize("take_over", [False, True])
def test_another_job_is_refused_by_name_whatever_became_of_the_first(
    tmp_path: Path, first: Callable[[Path], None], take_over: bool
) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    first(shared)
    before = written(tmp_path)
    with pytest.raises(FolderTakenError) as refused:
        claim_all(other, shared, job=B, take_over=take_over)
    assert str(refused.value) == (
        f"spec.checkpoint.uri {shared} belongs to the job default/first (uid uid-a), which wrote "
        "there before this one (uid uid-b); set another spec.checkpoint.uri"
    )
    assert written(tmp_path) == before
    assert not other.exists()


def test_a_job_made_anew_takes_over_only_when_its_manifest_says_so(tmp_path: Path) -> None:
    old = claim_all(tmp_path)
    anew = A.model_copy(update={"uid": "uid-0"})
    with pytest.raises(FolderTakenError) as refused:
        claim_all(tmp_path, job=anew)
    assert str(refused.value) == (
        f"spec.checkpoint.uri {tmp_path} belongs to the job default/first (uid uid-a), which had "
        "this job's name before it (uid uid-0); delete this job and create it with "
        "spec.takeOver true to continue there, or set another spec.checkpoint.uri"
    )
    new = claim_all(tmp_path, job=anew, take_over=True)
    new.check()
    with pytest.raises(OvertakenError) as overtaken:
        old.check()
    assert str(overtaken.value) == (
        f"the job default/first (uid uid-0) has taken over {tmp_path}; this one (uid uid-a) "
        "stopped writing"
    )
    claim_all(tmp_path, job=attempt(2, anew))


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_that_was_taken_over_never_takes_back(tmp_path: Path, number: int) -> None:
    claim_all(tmp_path)
    anew = A.model_copy(update={"uid": "uid-0"})
    new = claim_all(tmp_path, job=anew, take_over=True)
    with pytest.raises(OvertakenError, match=r"uid-0\) has taken over"):
        claim_all(tmp_path, job=attempt(number), take_over=True)
    new.check()


def test_a_newcomer_lets_a_smaller_uid_go_first_for_a_while(tmp_path: Path) -> None:
    killed = put(tmp_path, Claim(0, 1, 1, "aa", "uid-a"))
    time = PlayedTime()
    fence = claim_all(tmp_path, job=B, pace=time.pace())
    assert 10 <= time.now < 15
    assert Listing.of(tmp_path).owner == claim_of(fence, tmp_path)
    assert killed in Listing.of(tmp_path).present


@pytest.mark.parametrize("uid", ["uid-a", "uid-c"])
def test_one_killed_at_the_door_is_passed_after_a_while(tmp_path: Path, uid: str) -> None:
    put(tmp_path, Claim(0, 1, 1, "aa", uid), Mark.DOOR)
    time = PlayedTime()
    fence = claim_all(tmp_path, job=B, pace=time.pace())
    assert 10 <= time.now < 30
    assert Listing.of(tmp_path).owner == claim_of(fence, tmp_path)


def test_a_rivals_door_that_is_listed_late_is_seen(tmp_path: Path) -> None:
    """It is shown only while the first waits behind its own door."""
    rival = Claim(0, 1, 1, "aa", B.uid)
    time = PlayedTime(lambda: None, lambda: put(tmp_path, rival, Mark.DOOR))
    fence = claim_all(tmp_path, pace=time.pace(lag_seconds=0.1))
    assert time.now > 10, "it went in beside the rival"
    assert Listing.of(tmp_path).owner == claim_of(fence, tmp_path)


def test_a_newcomer_that_stood_still_for_too_long_goes_back(tmp_path: Path) -> None:
    """Until it is at the door once more; the others may be past it by now."""
    seen: list[int] = []

    class Stopped(PlayedTime):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            doors = Listing.of(tmp_path).doors
            seen.append(len(doors))
            if doors and seen.count(1) == 1:
                self.now += 6  # more than half of the others' patience

    fence = claim_all(tmp_path, pace=Stopped().pace(lag_seconds=0.1))
    assert seen == [0, 1, 0, 0, 1, 1]
    assert len(Listing.of(tmp_path).present) == 1
    fence.check()


def test_one_that_comes_back_behind_another_takes_back_what_it_wrote(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    other = Claim(0, 1, 1, "bb", B.uid)
    time = PlayedTime(
        lambda: None, lambda: None, lambda: put(shared, other, Mark.DOOR, Mark.HELD, job=B)
    )
    with pytest.raises(FolderTakenError, match="default/second"):
        claim_all(own, shared, pace=time.pace(lag_seconds=0.1))
    assert Listing.of(shared).present == {other}
    assert Listing.of(own).present == frozenset()


def test_a_refused_job_gives_back_what_it_had_got_elsewhere(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    time = PlayedTime(lambda: put(shared, Claim(0, 1, 1, "bb", B.uid), Mark.HELD, job=B))
    with pytest.raises(FolderTakenError, match="default/second"):
        claim_all(own, shared, pace=time.pace(lag_seconds=0.1))
    assert Listing.of(own).present == frozenset()
    claim_all(own, job=JobRef(name="third", uid="uid-c"))


@pytest.mark.parametrize("waits", range(3))
def test_a_process_told_to_stop_on_its_way_blocks_nobody(tmp_path: Path, waits: int) -> None:
    """It goes without a trace, but for a folder that its job has by then."""

    def stop() -> None:
        raise WaitedError("told to stop")

    time = PlayedTime(*[lambda: None] * waits, stop)
    with pytest.raises(WaitedError):
        claim_all(tmp_path, pace=time.pace(lag_seconds=0.1))
    assert bool(Listing.of(tmp_path).held) is (waits == 2)
    claim_all(tmp_path, job=attempt(2))
    if waits < 2:
        assert len(Listing.of(tmp_path).present) == 1


def together(works: list[Callable[[], Fence]]) -> list[Fence | Exception]:
    """Start all at the same moment, and return what each came to."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Fence]) -> Fence | Exception:
        start.wait()
        try:
            return work()
        except (FolderTakenError, OvertakenError) as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@pytest.mark.parametrize("number", range(20))
def test_of_newcomers_at_the_same_moment_one_goes_on(tmp_path: Path, number: int) -> None:
    """Also where they share two folders: one job has both, the others have neither."""
    folders = [tmp_path / name for name in ("one", "two")]
    jobs = [JobRef(name=name, uid=f"uid-{name}") for name in ("a", "b", "c")]
    pace = Pace(rival_wait_seconds=0.01)

    def enter(job: JobRef) -> Callable[[], Fence]:
        own = tmp_path / job.name
        order = folders if job.name != "b" else folders[::-1]
        return lambda: claim_all(own, *order, job=job, pace=pace)

    outcomes = together([enter(job) for job in jobs])
    winners = [job for job, one in zip(jobs, outcomes, strict=True) if isinstance(one, Fence)]
    assert len(winners) == 1
    (winner,) = winners
    for folder in folders:
        assert {one.uid for one in Listing.of(folder).present} == {winner.uid}
    for job, outcome in zip(jobs, outcomes, strict=True):
        if isinstance(outcome, Fence):
            outcome.check()
        else:
            assert f"belongs to the job default/{winner.name} " in str(outcome)
            assert Listing.of(tmp_path / job.name).present == frozenset()


@pytest.mark.parametrize("number", range(20))
def test_of_starts_of_one_attempt_at_the_same_moment_one_stays(tmp_path: Path, number: int) -> None:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    pace = Pace(rival_wait_seconds=0.01)
    outcomes = together([lambda: claim_all(*folders, pace=pace)] * 3)
    left = []
    for outcome in outcomes:
        if isinstance(outcome, Fence):
            try:
                outcome.check()
            except OvertakenError:
                continue
            left.append(outcome)
    assert len(left) == 1


def test_twins_that_could_not_see_each_other_are_told_apart_everywhere(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    twin = Claim(0, 1, 1, "zz", A.uid)
    time = PlayedTime(lambda: [put(folder, twin, Mark.HELD, job=A) for folder in (one, two)])
    fence = claim_all(one, two, pace=time.pace(lag_seconds=0.1))
    fence.check()
    assert [claim_of(fence, folder).generation for folder in (one, two)] == [2, 2]
    assert {claim.nonce for claim in Listing.of(one).present} == {
        "zz",
        claim_of(fence, one).nonce,
    }


def test_a_folder_that_was_moved_away_is_let_go(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    fence = claim_all(folder)
    folder.rename(tmp_path / "aside")
    with pytest.raises(ClaimLostError) as gone:
        fence.check()
    assert str(gone.value) == (
        f"the claim of attempt 1 on {folder} is gone: the folder was moved, emptied, deleted or "
        "unmounted; another job may write there, so this attempt exited, and the next attempt "
        "resumes from the last remaining checkpoint"
    )
    assert (gone.value.exit_code, fence.lost) == (1, None), "a restart may follow"
    claim_all(folder, job=B)


@pytest.mark.parametrize("waits", range(3))
def test_one_whose_claim_is_moved_away_on_its_way_takes_nothing(tmp_path: Path, waits: int) -> None:
    folder = tmp_path / "checkpoints"
    move = lambda: folder.rename(tmp_path / "aside")  # noqa: E731
    time = PlayedTime(*[lambda: None] * waits, move)
    with pytest.raises(ClaimLostError, match=r"the claim of attempt 1 on .* is gone"):
        claim_all(folder, pace=time.pace(lag_seconds=0.1))
    assert Listing.of(folder).present == frozenset()
    claim_all(folder, job=B)


def test_the_watch_calls_once_when_the_claim_is_overtaken(tmp_path: Path) -> None:
    fence = claim_all(tmp_path)
    ended: list[OvertakenError | ClaimLostError] = []
    done = threading.Event()

    def end(error: OvertakenError | ClaimLostError) -> None:
        ended.append(error)
        done.set()

    fence.watch(end, every_seconds=0.01)
    assert not done.wait(0.1)
    claim_all(tmp_path, job=attempt(2))
    assert done.wait(10)
    assert ended == [fence.lost]


@pytest.mark.parametrize("in_the_way", ["file", "link to nothing", "file/.finetune-claims"])
def test_what_is_in_the_way_is_named(tmp_path: Path, in_the_way: str) -> None:
    path = tmp_path / in_the_way
    path.parent.mkdir(exist_ok=True)
    if in_the_way.startswith("link"):
        path.symlink_to("nowhere")
    else:
        path.write_text("")
    folder = path.parent if path.name == CLAIMS else path / "checkpoints"
    with pytest.raises(OutputNotWritableError) as error:
        claim_all(folder)
    assert str(error.value) == (
        f"{folder} cannot be created: {path} is not a folder; move it away or use another path"
    )


def test_a_folder_that_cannot_be_written_is_named() -> None:
    folder = Path("/proc/sys/checkpoints")
    with pytest.raises(OutputNotWritableError) as error:
        claim_all(folder)
    assert re.fullmatch(
        re.escape(f"{folder} cannot be written (")
        + ".+"
        + re.escape("); use a folder that this user can write, on a disk with free space"),
        str(error.value),
    )


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount tmpfs under a name."""
    made: list[Path] = []

    def mount(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a tmpfs cannot be mounted here: {error}")
        made.append(folder)
        return folder

    yield mount
    for folder in reversed(made):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_only_local_file_systems_are_known_to_list_at_once(
    tmp_path: Path, mount: Callable[[str], Path]
) -> None:
    with lagging_layer(tmp_path / "layer", lag_seconds=0.0) as layer:
        below = layer.root / "not" / "made yet"
        assert listing_lag_seconds(below) > 0
        (tmp_path / "link").symlink_to(layer.root)
        assert listing_lag_seconds(tmp_path / "link") > 0
        inside = layer.root / "disk"
        inside.mkdir()
        assert listing_lag_seconds(layer.root) > 0
        local = mount("a disk\twith spaces")
        assert listing_lag_seconds(local / "checkpoints") == 0
        assert listing_lag_seconds(Path(os.fspath(local) + " not it")) == listing_lag_seconds(
            tmp_path
        )


def test_each_wait_is_longer_than_the_lag(tmp_path: Path) -> None:
    waits: list[float] = []
    claim_all(tmp_path, pace=replace(Pace(lag_seconds=2.0), sleep=waits.append))
    assert waits == [4.0, 4.0, 4.0]  # for the claim, the door and the folder
    waits.clear()
    claim_all(tmp_path, job=attempt(2), pace=replace(Pace(lag_seconds=2.0), sleep=waits.append))
    assert waits == [4.0]
