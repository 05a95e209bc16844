"""Each state of an Azure ML job as an observation: one row of the table, one test."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.azureml.names import NO_REPORT, Report
from finetune_operator.backends.azureml.runs import GONE, NO_END, RunEnd
from finetune_operator.backends.azureml.states import (
    STATES,
    observation_of,
    row_of,
    updated_view,
)
from finetune_operator.backends.base import AttemptPhase, Effect, Observation
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.reconcile.failures import verdict
from finetune_trainer.config import ExitCode, FailureClass, Heard, Progress, Termination
from support.azureml.azureml_looks import (
    ALIVE,
    NOW,
    STEP_7,
    TRAINS,
    UNTIL,
    URL,
    after,
    error,
    look,
    seen,
    words,
)
from support.reconcile.decisions import Life

P, E, C = AttemptPhase, Effect, FailureClass

WAITS = {
    "NotStarted": ("Submitted", E.NONE, 15),
    "Starting": ("Submitted", E.NONE, 15),
    "Provisioning": ("Submitted", E.NONE, 15),
    "Preparing": ("PreparingEnvironment", E.NONE, 120),
    "Queued": ("Queued", E.QUEUED, 24 * 60),
}
RUNS_ON = {"Finalizing": ("Finalizing", E.NONE, 60)}
KEEPS = {
    "CancelRequested": ("Cancelling", E.NONE, 15),
    "NotResponding": ("NotResponding", E.DELAYED, 15),
    "Paused": ("Paused", E.DELAYED, 60),
    "Hibernating": ("UnknownState", E.DELAYED, 60),
}
ENDS = {"Completed": P.SUCCEEDED, "Failed": P.FAILED, "Canceled": P.FAILED, GONE: P.UNKNOWN}


def test_every_state_of_the_table_has_a_test() -> None:
    assert {*WAITS, *RUNS_ON, *KEEPS, *ENDS, "Running"} - {"Hibernating"} == set(STATES)


@pytest.mark.parametrize("state", [*WAITS, *RUNS_ON, *KEEPS])
def test_a_state_on_the_way_has_its_phase_and_its_obstacle(state: str) -> None:
    reason, effect, _ = (WAITS | RUNS_ON | KEEPS)[state]
    found = observation_of(look(state), NOW)
    assert found.phase is (P.PENDING if state in WAITS else P.RUNNING)
    assert not found.all_gone
    assert found.obstacle is not None
    assert (found.obstacle.reason, found.obstacle.effect) == (reason, effect)


@pytest.mark.parametrize("state", KEEPS)
def test_a_state_that_says_nothing_of_the_work_keeps_the_phase(state: str) -> None:
    found = observation_of(look("Running", state, report=TRAINS), NOW)
    is_heard = state != "NotResponding"
    progress = STEP_7 if is_heard else None
    assert (found.phase, found.nodes_ready, found.progress) == (P.RUNNING, 2, progress)
    assert bool(found.unheard) != is_heard


@pytest.mark.parametrize("state", [*WAITS, *RUNS_ON, *KEEPS])
def test_a_state_that_lasts_past_its_limit_is_stalled_with_the_page(state: str) -> None:
    reason, _, minutes = (WAITS | RUNS_ON | KEEPS)[state]
    known, limit = look("Running", state), timedelta(minutes=minutes)
    before = observation_of(known, NOW + limit - timedelta(seconds=1))
    assert before.obstacle is not None
    assert before.obstacle.effect is not E.STALLED
    assert before.requeue_seconds == 1.0
    stalled = observation_of(known, NOW + limit)
    assert stalled.obstacle is not None
    assert (stalled.obstacle.reason, stalled.obstacle.effect) == (reason, E.STALLED)
    assert URL in stalled.obstacle.message
    assert stalled == observation_of(known, NOW + 2 * limit)


def test_running_lasts_as_long_as_it_likes() -> None:
    known = look("Running", report=TRAINS)
    found = observation_of(known, NOW + timedelta(days=30))
    assert (found.phase, found.obstacle, found.requeue_seconds) == (P.RUNNING, None, None)
    assert (found.nodes_ready, found.progress) == (2, STEP_7)


def test_a_run_that_goes_on_long_after_it_was_to_have_ended_is_stalled() -> None:
    known = replace(look("Running", report=TRAINS), stop_until=UNTIL)
    found = observation_of(known, NOW)
    assert (found.obstacle, found.requeue_seconds) == (None, 16 * 60.0)
    stalled = observation_of(known, UNTIL + timedelta(minutes=15)).obstacle
    assert stalled is not None
    assert (stalled.reason, stalled.effect) == ("NotStopped", E.STALLED)
    assert URL in stalled.message


@pytest.mark.parametrize("state", [*WAITS, "NotResponding", "Paused", "Invented"])
def test_what_was_stopped_and_never_ran_is_stalled_as_soon(state: str) -> None:
    known = replace(look(state), stop_until=NOW)
    before = observation_of(known, after(15 * 60 - 1))
    assert before.obstacle is not None
    assert before.obstacle.effect is not E.STALLED
    assert before.requeue_seconds == 1.0
    stalled = observation_of(known, after(15 * 60)).obstacle
    assert stalled is not None
    assert stalled.effect is E.STALLED


@pytest.mark.parametrize("state", [*RUNS_ON, "CancelRequested"])
def test_what_ends_after_a_stop_has_the_time_that_an_end_takes(state: str) -> None:
    _, _, minutes = (RUNS_ON | KEEPS)[state]
    known = replace(look("Running", state), stop_until=after(-3600))
    assert observation_of(known, NOW).requeue_seconds == 60.0 * minutes


def test_a_limit_that_passes_before_that_of_a_stop_is_told_first() -> None:
    known = replace(look("Starting"), stop_until=after(60))
    assert observation_of(known, NOW).requeue_seconds == 15 * 60.0
    stalled = observation_of(known, after(15 * 60)).obstacle
    assert stalled is not None
    assert stalled.reason == "Submitted"


@pytest.mark.parametrize("state", ENDS)
def test_a_state_at_the_end_is_the_end(state: str) -> None:
    found = observation_of(look("Running", state), NOW)
    assert (found.phase, found.all_gone, found.obstacle) == (ENDS[state], True, None)


def test_a_new_state_is_named_and_cut() -> None:
    found = observation_of(look("Z" * 500), NOW)
    assert found.obstacle is not None
    assert "Z" * 40 in found.obstacle.message
    assert "Z" * 41 not in found.obstacle.message


def test_how_long_a_state_lasts_counts_from_its_first_look_or_the_creation() -> None:
    old = updated_view(None, seen("Queued", NO_REPORT, created=after(-3600)), NOW)
    assert old.since == after(-3600)
    again = updated_view(old, seen("Queued", NO_REPORT), after(30))
    assert again.since == after(-3600)
    assert updated_view(again, seen("Running"), after(60)).since == after(60)
    has_run = updated_view(None, seen("Queued", TRAINS, created=after(-3600)), NOW)
    assert has_run.since == NOW


@pytest.mark.parametrize("state", [*RUNS_ON, *KEEPS])
def test_what_follows_the_start_is_not_too_late_because_the_job_is_old(state: str) -> None:
    known = updated_view(None, seen(state, NO_REPORT, created=after(-48 * 3600)), NOW)
    found = observation_of(known, NOW)
    assert found.phase is P.RUNNING
    assert found.obstacle is not None
    assert found.obstacle.effect is not E.STALLED


def test_tags_of_the_job_that_are_older_than_its_runs_take_nothing_back() -> None:
    newer = Report(STEP_7.model_copy(update={"step": 9, "time": STEP_7.time + 30}), ALIVE)
    old = Report(STEP_7, Heard(time=ALIVE.time - 30))
    known = look("Running", report=newer)
    for seconds in range(0, 91, 30):
        known = updated_view(known, seen("Running", old), after(seconds))
        assert known.progress == newer.progress
    assert not known.is_listening
    again = Report(STEP_7, Heard(time=ALIVE.time - 3600, starts=2))  # on a node with another clock
    assert updated_view(known, seen("Running", again), after(100)).is_listening


def test_the_same_run_queued_again_is_a_disruption_and_waits() -> None:
    found = observation_of(look("Running", "Queued", "Preparing", report=TRAINS), NOW)
    assert (found.phase, found.disruptions, found.nodes_ready) == (P.PENDING, 1, 0)
    assert found.progress == STEP_7
    twice = observation_of(look("Running", "Queued", "Running", "Queued", "Running"), NOW)
    assert (twice.phase, twice.disruptions) == (P.RUNNING, 2)


def test_a_move_between_two_looks_or_processes_is_told_by_the_trainer() -> None:
    second = Report(STEP_7, Heard(time=NOW.timestamp(), starts=2))
    assert look("Running", "Running", report=second).disruptions == 1
    assert look("Queued", report=TRAINS).disruptions == 1
    seen_and_told = updated_view(look("Running", "Queued"), seen("Running", second), NOW)
    assert seen_and_told.disruptions == 1


def test_who_is_over_stays_over() -> None:
    known = look("Running", "Failed")
    assert updated_view(known, seen("Running"), after(1)) is known


def test_the_reporter_listens_while_its_sign_of_life_changes_whatever_its_clock_says() -> None:
    wrong = NOW.timestamp() - 4000.0
    known = updated_view(None, seen("Running", Report(heard=Heard(time=wrong))), NOW)
    assert not known.is_listening
    known = updated_view(known, seen("Running", Report(heard=Heard(time=wrong + 15))), after(30))
    assert known.is_listening
    without_tags = updated_view(known, seen("Running", NO_REPORT), after(45))
    assert without_tags.is_listening
    silent = updated_view(
        without_tags, seen("Running", Report(heard=Heard(time=wrong + 15))), after(91)
    )
    assert not silent.is_listening
    assert updated_view(None, seen("Running"), NOW).is_listening


def test_looks_that_say_the_same_are_equal() -> None:
    later = Report(STEP_7, Heard(time=ALIVE.time + 15))
    assert updated_view(look("Running", report=TRAINS), seen("Running", later), after(30)) == look(
        "Running", report=TRAINS
    )


DONE = words(ExitCode.DONE, C.COMPLETED, "done")
SAVED = words(ExitCode.PREEMPTED, C.PREEMPTED, "saved at step 7")
LOST_OTHERS = words(ExitCode.ERROR, C.WORKER_LOST, "see the other nodes")
BROKEN = words(ExitCode.ERROR, C.ERROR, "it broke")
KILLED = words(ExitCode.KILLED, C.OUT_OF_MEMORY, "out of memory")
BAD_DATA = words(ExitCode.DATA, C.DATA_ERROR, "row 3 is empty")
PREEMPTION = "PreemptionError: Nodes of this job got pre-empted. Check if it has restarted."


def ended(
    state: str, end: RunEnd = NO_END, *said: Termination | None, **fields: object
) -> tuple[FailureClass, int, str]:
    """Return class, exit code and sentence of an attempt that has ended."""
    last = {node: one for node, one in enumerate(said) if one is not None}
    known = replace(look("Running", state), end=end, last_words=last, **fields)  # type: ignore[arg-type]
    found = observation_of(known, NOW)
    assert found.all_gone
    told = verdict(found)
    return told.failure_class, told.exit_code, told.message


@pytest.mark.parametrize(
    ("end", "said", "expected"),
    [
        pytest.param(error("x"), [BROKEN], C.ERROR, id="its last words"),
        pytest.param(error("x"), [SAVED, SAVED], C.PREEMPTED, id="both nodes saved"),
        pytest.param(error("x"), [LOST_OTHERS, BROKEN], C.ERROR, id="who broke before who saw it"),
        pytest.param(error("x"), [BROKEN, KILLED], C.OUT_OF_MEMORY, id="who was killed first"),
        pytest.param(error("x"), [SAVED, BAD_DATA], C.DATA_ERROR, id="who can work nowhere first"),
        pytest.param(error("x"), [LOST_OTHERS, None], C.WORKER_LOST, id="a node without words"),
        pytest.param(error(PREEMPTION), [], C.PREEMPTED, id="preempted without a word"),
        pytest.param(error("nodes were preempted"), [], C.PREEMPTED, id="preempted in other words"),
        pytest.param(error(PREEMPTION), [LOST_OTHERS], C.PREEMPTED, id="preempted beats its peers"),
        pytest.param(
            error(PREEMPTION), [BAD_DATA], C.DATA_ERROR, id="preempted and could not work"
        ),
        pytest.param(error("log: preemption.py"), [BROKEN], C.ERROR, id="a log that is quoted"),
        pytest.param(error("exited with status code 137"), [], C.WORKER_LOST, id="killed silently"),
        pytest.param(error("Exit code: 75."), [], C.PREEMPTED, id="75 silently"),
        pytest.param(error("exit code 143"), [], C.PREEMPTED, id="ended before it could say so"),
        pytest.param(error("exited with code 42"), [], C.ERROR, id="another code silently"),
        pytest.param(error("x", "ServiceError"), [], C.SERVICE_FAILED, id="the service's fault"),
        pytest.param(error("x", "SystemError"), [], C.SERVICE_FAILED, id="the system's fault"),
        pytest.param(error("x", "ServiceError"), [BROKEN], C.ERROR, id="it spoke before that"),
        pytest.param(error("x", "ServiceError"), [DONE], C.SERVICE_FAILED, id="after its work"),
        pytest.param(error("x"), [], C.UNKNOWN, id="the user's fault it says"),
        pytest.param(NO_END, [], C.UNKNOWN, id="nothing is told"),
    ],
)
def test_why_a_run_failed(
    end: RunEnd, said: list[Termination | None], expected: FailureClass
) -> None:
    assert ended("Failed", end, *said)[0] is expected


def test_a_failure_that_nobody_explains_says_what_azure_says_and_where_to_look() -> None:
    _, _, message = ended("Failed", error("the image is missing"))
    assert "the image is missing" in message
    assert URL in message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("User process '/bin/python' exited with status code 42. Please check", 42),
        ("Failed to run \n Exit code 250 \nDetails", 250),
        ("exit code: 1", 1),
        ("returned non-zero exit status 3.", 3),
        ("return code -9", 137),
        ("Reason: Job failed with non-zero exit Code.", None),
        ("the registry answers with status code 403", None),
        ("exit code 4096", None),
        ("exit code 0", None),
        ("", None),
    ],
)
def test_an_exit_code_is_found_in_azures_sentences(text: str, code: int | None) -> None:
    end = ended("Failed", error(text))
    assert end[1] == (NO_EXIT_CODE if code is None else code)
    assert (end[0] is C.UNKNOWN) == (code is None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param([], C.PREEMPTED, id="without a word"),
        pytest.param([SAVED, SAVED], C.PREEMPTED, id="saved"),
        pytest.param([DONE], C.PREEMPTED, id="done a moment before"),
        pytest.param([BAD_DATA], C.DATA_ERROR, id="failed a moment before"),
    ],
)
def test_a_run_that_was_cancelled_by_us(said: list[Termination], expected: FailureClass) -> None:
    assert ended("Canceled", NO_END, *said, stop_until=UNTIL)[0] is expected


def test_a_run_that_was_cancelled_in_studio_is_not_restarted_and_says_by_whom() -> None:
    end = RunEnd(cancelled_by="Ada Lovelace", cancel_reason="too expensive")
    failure, _, message = ended("Canceled", end, SAVED)
    assert failure is C.DO_NOT_RESTART
    assert message.startswith("Ada Lovelace cancelled the job in Azure ML (too expensive)")
    assert ended("Canceled")[2].startswith("a user cancelled the job in Azure ML; ")


@pytest.mark.parametrize("reason", ["Job timed out", "timeout", "reached maximum run duration"])
def test_a_run_that_was_cancelled_at_a_limit_of_the_service_is_started_again(reason: str) -> None:
    assert ended("Canceled", RunEnd(cancel_reason=reason))[0] is C.SERVICE_FAILED


def test_the_end_of_a_run_keeps_the_newest_progress_and_rank_0s_words() -> None:
    step_9 = STEP_7.model_copy(update={"step": 9, "time": 9.0})
    done = DONE.model_copy(update={"progress": step_9})
    known = replace(look("Running", "Completed", report=TRAINS), last_words={0: done, 1: BROKEN})
    found = observation_of(known, NOW)
    assert (found.phase, found.termination, found.progress) == (P.SUCCEEDED, done, step_9)
    assert found.checkpoints == "azureml://datastores/d/paths/c"
    assert ended("Completed")[0] is C.COMPLETED


STATE = st.sampled_from([*STATES, "Hibernating", "", "Running", "Queued"]) | st.text(max_size=60)
REPORT = st.builds(
    Report,
    st.none() | st.builds(Progress, step=st.integers(0, 9), time=st.floats(0, 2e9)),
    st.none() | st.builds(Heard, time=st.floats(), starts=st.none() | st.integers(-1, 5)),
    st.none() | st.just(UNTIL),
)
END = st.builds(
    RunEnd,
    st.sampled_from(["", "UserError", "ServiceError"]),
    st.text(max_size=30) | st.sampled_from([PREEMPTION, "exit code 1", "exit code 65"]),
    st.text(max_size=9),
    st.text(max_size=9) | st.just("timeout"),
)
SAID = st.dictionaries(
    st.integers(0, 1), st.sampled_from([DONE, SAVED, LOST_OTHERS, BROKEN, KILLED, BAD_DATA])
)


@given(st.lists(st.tuples(STATE, REPORT, st.floats(0, 90_000)), min_size=1, max_size=12), END, SAID)
@example(
    [("NotResponding", NO_REPORT, 960.0), ("Hibernating", Report(stop_until=UNTIL), 0.0)],
    NO_END,
    {},
)
def test_any_sequence_of_states_ends_in_a_legal_status(
    answers: list[tuple[str, Report, float]], end: RunEnd, said: dict[int, Termination]
) -> None:
    life, known, now = Life(), None, NOW
    life.now = now
    life.see()
    moves = 0
    for state, report, seconds in answers:
        now += timedelta(seconds=seconds)
        known = updated_view(known, seen(state, report), now)
        if known.is_finished:
            known = replace(known, end=end, last_words=said)
        found = observation_of(known, now)
        assert found.all_gone == row_of(known.state).is_finished
        assert found.disruptions >= moves
        moves = found.disruptions
        if found.all_gone:
            assert found.phase in (P.SUCCEEDED, P.FAILED, P.UNKNOWN)
        else:
            assert found.phase in (P.PENDING, P.RUNNING)
            assert found.requeue_seconds is None or found.requeue_seconds > 0
        life.now = now
        life.see(found)
        _check_legal(life.status, found)
        if found.all_gone:
            break
        assert life.decide(found).status == life.status


def _check_legal(status: FineTuneJobStatus, found: Observation) -> None:
    assert FineTuneJobStatus.model_validate(status.model_dump(by_alias=True)) == status
    told = {one.type: one.status for one in status.conditions}
    assert len(told) == len(status.conditions)
    assert (told["Ready"], told["Reconciling"]) != ("True", "True")
    is_stalled = found.obstacle is not None and found.obstacle.effect is E.STALLED
    has_failed = told.get("Failed") == "True"
    assert (told["Stalled"] == "True") == (is_stalled or has_failed)
    assert (status.attempts[-1].end_time is not None) == found.all_gone or status.attempt > 1
