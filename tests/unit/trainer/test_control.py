"""Signals, votes of one process, and what each exception means for the attempt."""

import signal
from collections.abc import Iterator

import pytest
import torch

from finetune_trainer.config import ExitCode, FailureClass, Termination
from finetune_trainer.control import (
    Agreed,
    Agreement,
    StopSignal,
    classify,
    guard,
    unless_stopped,
)
from finetune_trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OutputNotWritableError,
    Preempted,
    WorldSizeError,
)
from finetune_trainer.world import World

FINISHED = Termination(
    failure_class=FailureClass.COMPLETED, exit_code=ExitCode.DONE, message="finished"
)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    installed = StopSignal()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stop_is_not_requested_before_a_signal_comes(stop: StopSignal) -> None:
    assert (stop.requested, stop.reason) == (False, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop_and_interrupts_nothing(
    stop: StopSignal, number: signal.Signals
) -> None:
    signal.raise_signal(number)
    assert (stop.requested, stop.reason) == (True, number.name)


def test_the_first_reason_to_stop_is_kept(stop: StopSignal) -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    stop.request("deadline")
    assert stop.reason == "SIGTERM"


def test_one_process_sees_its_own_votes_at_once() -> None:
    agreement = Agreement(World(0, 0, 1, torch.device("cpu")))
    assert agreement.exchange(stop=False, save=True) == Agreed(False, True)
    assert agreement.exchange(stop=True) == Agreed(True, False)
    assert agreement.finish_vote() is None


@pytest.mark.parametrize(
    ("error", "code", "failure_class"),
    [
        pytest.param(DataError("x"), 65, "DataError", id="bad data"),
        pytest.param(ConfigError("x"), 78, "ConfigError", id="bad configuration"),
        pytest.param(OutputNotWritableError("x"), 78, "ConfigError", id="output not writable"),
        pytest.param(Preempted("x"), 75, "Preempted", id="preempted"),
        pytest.param(CheckpointError("x"), 1, "Error", id="checkpoint failed"),
        pytest.param(WorldSizeError("x"), 93, "DoNotRestart", id="wrong world"),
        pytest.param(MemoryError(), 137, "OutOfMemory", id="host memory"),
        pytest.param(torch.OutOfMemoryError("x"), 137, "OutOfMemory", id="device memory"),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            137,
            "OutOfMemory",
            id="torch's CPU allocator",
        ),
        pytest.param(
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:17"),
            1,
            "WorkerLost",
            id="peer gone",
        ),
        pytest.param(
            ConnectionRefusedError("hub.example: Connection refused"), 1, "Error", id="host gone"
        ),
        pytest.param(KeyError("x"), 1, "Error", id="a bug"),
        pytest.param(SystemExit(0), 1, "Error", id="sys.exit in a library"),
    ],
)
def test_each_error_has_its_class_and_exit_code(
    error: BaseException, code: int, failure_class: str
) -> None:
    verdict = classify(error)
    assert (verdict.exit_code, verdict.failure_class) == (code, failure_class)
    assert classify(error).exit_code == code


def test_a_rank_that_lost_its_peers_is_not_to_blame() -> None:
    lost = classify(RuntimeError("Connection reset by peer"))
    assert (lost.is_collateral, lost.is_own_fault) == (True, False)
    assert classify(DataError("Connection reset by peer")).is_own_fault
    assert not classify(Preempted("stopped")).is_own_fault


def test_an_unexpected_error_becomes_one_sentence_without_a_full_stop() -> None:
    error = RuntimeError("shapes do not match.\nException raised from run at /pytorch/x.cpp:1")
    expected = "RuntimeError: shapes do not match; the traceback is in the rank's log"
    assert classify(error).message == expected


def test_guard_returns_the_termination_of_work_that_succeeds() -> None:
    assert guard(lambda: FINISHED) == (FINISHED, None)


def test_guard_turns_an_error_into_last_words_and_hands_out_the_traceback() -> None:
    traces: list[str] = []

    def work() -> Termination:
        raise DataError("data.train x.jsonl has no rows; add some")

    termination, verdict = guard(work, on_error=lambda _, trace: traces.append(trace))
    assert termination == Termination(
        failure_class=FailureClass.DATA_ERROR,
        exit_code=65,
        message="data.train x.jsonl has no rows; add some",
    )
    assert verdict is not None
    assert "in work" in traces[0]


def test_a_signal_breaks_off_work_that_needs_no_saving(stop: StopSignal) -> None:
    agreement, done = Agreement(World(0, 0, 1, torch.device("cpu"))), []

    def work() -> None:
        signal.raise_signal(signal.SIGTERM)
        done.append("the rest")

    with pytest.raises(Preempted, match="stopped by SIGTERM without new state to save"):
        unless_stopped(agreement, stop, work)
    with pytest.raises(Preempted):
        unless_stopped(agreement, stop, lambda: done.append("the next work"))
    assert done == []


def test_work_that_nobody_stops_is_done(stop: StopSignal) -> None:
    agreement = Agreement(World(0, 0, 1, torch.device("cpu")))
    assert unless_stopped(agreement, stop, lambda: "done") == "done"
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested, "and a signal behind it breaks off nothing"


def test_a_save_that_was_voted_for_waits_for_the_next_boundary() -> None:
    agreement = Agreement(World(0, 0, 1, torch.device("cpu")))
    assert agreement.is_stopping(False) is False
    assert agreement.exchange(stop=False).save is False
    assert agreement.is_stopping(True) is True


def test_the_time_left_is_the_shorter_of_grace_and_notice() -> None:
    stop = StopSignal()
    assert stop.seconds_left(10) == float("inf")
    stop.request("an event", notice_seconds=500)
    assert 400 < stop.seconds_left(1000) <= 500
    assert 100 < stop.seconds_left(200) <= 200
