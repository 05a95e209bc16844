"""How the ends of several ranks become the one end of an attempt."""

import signal
from pathlib import Path

import pytest

from finetune_trainer.config import (
    CheckpointRef,
    ExitCode,
    FailureClass,
    Progress,
    SampleAnswer,
    Termination,
)
from finetune_trainer.launch.rank_report import RankReport
from finetune_trainer.launch.termination_message import (
    MAX_TERMINATION_BYTES,
    EndedBy,
    RankExit,
    choose_termination,
    with_published,
    write_termination,
)

CLASSES = {
    0: FailureClass.COMPLETED,
    1: FailureClass.ERROR,
    65: FailureClass.DATA_ERROR,
    75: FailureClass.PREEMPTED,
    78: FailureClass.CONFIG_ERROR,
    93: FailureClass.DO_NOT_RESTART,
    137: FailureClass.OUT_OF_MEMORY,
}


def reported(rank: int, code: int, *, time: float = 1.0, collateral: bool = False) -> RankExit:
    """Return the end of a rank that said `code` itself."""
    termination = Termination(
        failure_class=CLASSES[code], exit_code=code, message=f"rank {rank} said {code}", rank=rank
    )
    report = RankReport(rank=rank, time=time, termination=termination, is_collateral=collateral)
    return RankExit(rank=rank, code=code, time=time, report=report)


def died(rank: int, number: signal.Signals = signal.SIGKILL, *, time: float = 1.0) -> RankExit:
    """Return the end of a rank that a signal from outside killed."""
    return RankExit(rank=rank, code=-number, time=time)


def ended(rank: int, by: EndedBy) -> RankExit:
    """Return the end of a rank that the supervisor killed."""
    return RankExit(rank=rank, code=-signal.SIGKILL, time=9.0, ended_by=by)


def outcome(*exits: RankExit, stop: str | None = None, oom: bool = False) -> tuple[int, str]:
    """Return exit code and failure class."""
    termination = choose_termination(exits, stop_reason=stop, is_out_of_memory=oom)
    return termination.exit_code, termination.failure_class


@pytest.mark.parametrize("code", [0, 65, 75, 78, 93, 137, 1])
def test_a_code_that_all_ranks_agree_on_is_kept(code: int) -> None:
    assert outcome(reported(0, code), reported(1, code)) == (code, CLASSES[code])


@pytest.mark.parametrize("failed", [65, 78, 93, 137, 1])
@pytest.mark.parametrize("other", [0, 75])
def test_a_rank_that_failed_decides_before_one_that_is_done_or_preempted(
    failed: int, other: int
) -> None:
    exits = [reported(0, other), reported(1, failed, time=5.0)]
    assert outcome(*exits, stop="SIGTERM") == (failed, CLASSES[failed])


def test_a_preempted_rank_decides_before_a_finished_one() -> None:
    assert outcome(reported(0, 0), reported(1, 75)) == (75, "Preempted")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(reported(0, 1, collateral=True), id="it lost the connection"),
        pytest.param(ended(0, EndedBy.FAILURE_OF_ANOTHER), id="the supervisor ended it"),
        pytest.param(reported(0, 1, time=0.5), id="it failed in a way nobody knows"),
    ],
)
def test_the_killed_rank_is_named_and_not_those_it_took_along(other: RankExit) -> None:
    termination = choose_termination([other, died(1)], stop_reason=None, is_out_of_memory=False)
    assert termination == Termination(
        failure_class=FailureClass.WORKER_LOST,
        exit_code=137,
        message="rank 1 was killed from outside (SIGKILL)",
        rank=1,
    )


def test_the_earliest_of_two_failed_ranks_decides() -> None:
    assert outcome(reported(0, 78, time=2.0), reported(1, 65, time=1.0)) == (65, "DataError")


def test_a_killed_rank_is_out_of_memory_when_the_kernel_says_so() -> None:
    assert outcome(reported(0, 0), died(1), oom=True) == (137, "OutOfMemory")


def test_a_crash_by_another_signal_is_an_error() -> None:
    assert outcome(reported(0, 0), died(1, signal.SIGSEGV)) == (1, "Error")


@pytest.mark.parametrize(("code", "expected"), [(65, 65), (78, 78), (93, 93), (3, 1), (255, 1)])
def test_an_exit_without_last_words_keeps_a_known_code_and_becomes_1_otherwise(
    code: int, expected: int
) -> None:
    assert outcome(RankExit(rank=0, code=code, time=1.0)) == (expected, CLASSES[expected])


def test_a_rank_that_outlives_the_grace_period_is_to_blame_for_it() -> None:
    termination = choose_termination(
        [reported(0, 75), ended(1, EndedBy.END_OF_GRACE)],
        stop_reason="SIGTERM",
        is_out_of_memory=False,
    )
    assert (termination.exit_code, termination.rank) == (137, 1)
    assert "grace" in termination.message


def test_ranks_stopped_before_they_could_save_anything_are_preempted() -> None:
    exits = [RankExit(rank, -signal.SIGTERM, 1.0) for rank in (0, 1)]
    termination = choose_termination(exits, stop_reason="SIGTERM", is_out_of_memory=False)
    assert (termination.exit_code, termination.rank) == (75, None)
    assert "no work is lost" in termination.message


def test_a_rank_too_young_to_hear_sigterm_was_told_to_stop_all_the_same() -> None:
    exits = [RankExit(0, -signal.SIGTERM, 1.0), reported(1, 1, collateral=True)]
    assert outcome(*exits) == (75, "Preempted")


def test_the_words_of_rank_0_are_used_when_all_left_together() -> None:
    exits = [reported(1, 75, time=0.5), reported(0, 75, time=2.0)]
    termination = choose_termination(exits, stop_reason="SIGTERM", is_out_of_memory=False)
    assert termination.message == "rank 0 said 75"


def test_a_node_whose_ranks_only_lost_their_peers_blames_another_node() -> None:
    exits = [reported(2, 1, collateral=True), ended(3, EndedBy.FAILURE_OF_ANOTHER)]
    termination = choose_termination(exits, stop_reason=None, is_out_of_memory=False)
    assert (termination.exit_code, termination.message) == (1, "rank 2 said 1")


def test_a_report_counts_more_than_an_abort_after_it() -> None:
    done = reported(0, 0)
    aborted = RankExit(rank=0, code=-signal.SIGABRT, time=2.0, report=done.report)
    assert outcome(aborted, reported(1, 0)) == (0, "Completed")


def test_last_words_fit_into_a_termination_message_whatever_they_hold(tmp_path: Path) -> None:
    long = "ü€😀" * 2000
    progress = Progress(
        samples=tuple(SampleAnswer(prompt=long, before=long, after=long) for _ in range(4)),
        warnings=tuple(f"{i} {long}" for i in range(20)),
    )
    full = Termination(
        failure_class=FailureClass.ERROR,
        exit_code=1,
        message=long,
        step=7,
        checkpoint=CheckpointRef(step=7, path=long, time=1.0, world_size=2),
        artifacts=(long,) * 10,
        progress=progress,
    )
    path = tmp_path / "termination.json"
    write_termination(path, full)
    assert len(path.read_bytes()) <= MAX_TERMINATION_BYTES
    read = Termination.read(path)
    assert (read.failure_class, read.exit_code, read.step) == (FailureClass.ERROR, 1, 7)
    assert read.message.startswith("ü€😀")


def test_samples_are_shortened_before_they_are_left_out(tmp_path: Path) -> None:
    progress = Progress(samples=(SampleAnswer(prompt="Why?", before="a" * 5000, after="because"),))
    full = Termination(
        failure_class=FailureClass.COMPLETED, exit_code=0, message="finished", progress=progress
    )
    path = tmp_path / "termination.json"
    write_termination(path, full)
    read = Termination.read(path)
    assert read.progress is not None
    (sample,) = read.progress.samples
    assert (sample.prompt, sample.after) == ("Why?", "because")
    assert sample.before is not None
    assert sample.before.endswith("a…")


def test_last_words_are_written_in_place_where_no_file_can_be_made_beside(tmp_path: Path) -> None:
    path = tmp_path / ("t" * 250)  # any name beside it would be too long
    done = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="finished")
    write_termination(path, done)
    assert Termination.read(path) == done


def test_a_killed_ranks_last_words_take_step_and_checkpoint_from_progress(tmp_path: Path) -> None:
    checkpoint = CheckpointRef(step=8, path="step-8", time=1.0, world_size=2)
    progress = Progress(attempt=2, step=9, checkpoint=checkpoint)
    (tmp_path / "progress.json").write_text(progress.to_json())
    killed = Termination(
        failure_class=FailureClass.WORKER_LOST, exit_code=ExitCode.KILLED, message="killed"
    )
    told = with_published(killed, tmp_path, attempt=2)
    assert (told.step, told.checkpoint, told.progress) == (9, checkpoint, progress)
    assert with_published(killed, tmp_path, attempt=3) == killed
    assert with_published(killed, tmp_path / "nowhere", attempt=2) == killed
