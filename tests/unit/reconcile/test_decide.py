"""What is decided about a job in each situation."""

from dataclasses import replace

import pytest

from finetune_operator.api.v1alpha1.status import JobPhase, TrackerStatus
from finetune_operator.backends.base import AttemptPhase, Effect, Observation, Obstacle
from finetune_operator.reconcile.conditions import rfc3339
from finetune_operator.reconcile.decide import Collect, Rejection, Submit
from finetune_trainer.config import CheckpointRef, FailureClass, Phase, TrackerRun
from support.kernel.fake_backend import PREEMPTED, ended
from support.reconcile.decisions import PENDING, START, Life, lives, running

KILLED = ended(137, FailureClass.WORKER_LOST, "node 0 was killed")


def started(**overrides: object) -> Life:
    life = Life(**overrides)
    assert life.see() == (Submit(1),)
    return life


def test_a_new_job_opens_attempt_1_and_submits_it() -> None:
    life = started()
    assert (life.status.attempt, life.status.phase) == (1, JobPhase.STARTING)
    assert life.condition("Ready") == ("False", "Provisioning")
    assert life.condition("Accepted") == ("True", "Accepted")
    assert life.status.plan.strategy == "ddp"


def test_an_attempt_without_a_handle_is_submitted_again_and_nothing_else_changes() -> None:
    life = Life()
    first = life.decide()
    life.job = life.job.model_copy(update={"status": first.status})  # killed before submitting
    life.wait(60)
    again = life.decide()
    assert again.actions == (Submit(1),)
    assert again.status == first.status


def test_a_job_runs_once_rank_0_is_past_loading() -> None:
    life = started()
    life.see(PENDING)
    assert life.condition("ResourcesReady") == ("False", "Provisioning")
    life.see(running(0, Phase.LOADING))
    assert life.status.phase is JobPhase.STARTING
    assert life.see(running(1)) == ()
    assert life.status.phase is JobPhase.RUNNING
    assert life.condition("Running") == ("True", "Training")
    ready = next(one for one in life.status.conditions if one.type == "Ready")
    assert (ready.status, ready.message) == ("True", "attempt 1 trains on 1 rank")
    assert life.requeue == 0.5


def test_a_job_that_trains_stays_running_while_nothing_is_heard_of_rank_0() -> None:
    life = started()
    life.see(running(1))
    before = life.status
    life.see(Observation(AttemptPhase.RUNNING, nodes_ready=1))
    assert life.status == before
    life.see(running(1, Phase.LOADING))  # its ranks were started again in place
    assert life.condition("Running") == ("False", "Starting")


def test_an_attempt_that_lacks_what_somebody_must_mend_stalls_until_it_is_mended() -> None:
    life = started()
    lacks = Observation(
        AttemptPhase.RUNNING,
        obstacle=Obstacle("CreationFailed", "Service x is in the way", Effect.STALLED),
    )
    assert life.see(lacks) == ()
    assert life.condition("Stalled") == ("True", "CreationFailed")
    life.see(running(1))
    assert life.condition("Stalled")[0] == "False"
    assert life.condition("Running")[0] == "True"


IN_THE_WAY = Obstacle("QuotaExceeded", "no space is left; raise the quota", Effect.STALLED)


def test_an_obstacle_that_stalls_is_told_of_an_attempt_that_trains_and_of_one_that_ends() -> None:
    life = started()
    stalled = ("True", "QuotaExceeded")
    life.see(replace(running(3), obstacle=IN_THE_WAY))
    assert life.condition("Stalled") == stalled
    assert life.said("Stalled") == "no space is left; raise the quota"
    assert life.condition("Running") == ("True", "Training")
    life.suspend(True)
    assert life.see(replace(running(4), obstacle=IN_THE_WAY)) == life.cancel_in(120.0)
    assert life.condition("Stalled") == stalled
    life.see(running(4))
    assert life.condition("Stalled")[0] == "False"


def test_an_obstacle_that_takes_only_time_is_told_in_its_words_and_is_no_reason() -> None:
    life = started()
    pulls = Obstacle("PullsImage", "the image is pulled", Effect.NONE)
    life.see(Observation(AttemptPhase.PENDING, obstacle=pulls))
    assert life.condition("ResourcesReady") == ("False", "Provisioning")
    assert life.said("ResourcesReady") == "the image is pulled"


def test_a_backend_may_know_that_an_attempt_trains_though_it_has_no_step_of_it() -> None:
    life = started()
    life.see(Observation(AttemptPhase.RUNNING, nodes_ready=1, is_training=True))
    assert life.condition("Running") == ("True", "Training")
    life.see(Observation(AttemptPhase.RUNNING, nodes_ready=1, is_training=False))
    assert life.condition("Running")[0] == "False"


def test_the_pending_deadline_of_what_went_back_to_waiting_counts_from_then() -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(running(3))
    life.wait(3600)
    assert life.see(PENDING) == ()
    life.wait(59)
    assert life.see(PENDING) == ()
    life.wait(1)
    assert life.see(PENDING) == life.cancel_in(120.0)
    assert life.condition("Failed") == ("False", "PendingDeadlineExceeded")


def test_exit_code_0_completes_the_job_only_when_every_process_is_gone() -> None:
    life = started()
    assert life.see(lives(ended())) == ()
    assert life.status.phase is not JobPhase.SUCCEEDED
    assert life.see(ended()) == (Collect(),)
    assert life.status.phase is JobPhase.SUCCEEDED
    assert life.condition("Complete") == ("True", "Completed")
    assert life.status.completion_time == rfc3339(START)


def test_a_finished_job_is_left_alone() -> None:
    life = started()
    life.see(ended())
    before = life.status
    life.wait(1000)
    life.suspend(True)
    for seen in (None, running(3), KILLED):
        assert life.see(seen) == ()
        assert life.status == before
        assert life.requeue is None


def test_the_next_attempt_waits_until_the_lost_one_is_gone() -> None:
    life = started()
    life.see(running(3))
    assert life.see(lives(KILLED)) == life.cancel_in(10.0)
    assert life.status.phase is JobPhase.RESTARTING
    assert life.status.attempt == 1
    assert life.see(KILLED) == (Submit(2),)
    assert life.status.attempts[0].failure_class == "WorkerLost"
    assert life.status.attempts[0].exit_code == 137
    assert life.status.restarts.counted == 1


def test_nodes_that_stop_together_after_a_preemption_keep_the_whole_grace() -> None:
    life = started(deadlines__termination_grace_seconds=90)
    assert life.see(lives(PREEMPTED)) == life.cancel_in(90.0)


def test_counted_restarts_end_at_their_limit_with_the_last_message() -> None:
    life = started(restart_policy__max_restarts=2)
    assert life.see(KILLED) == (Submit(2),)
    assert life.see(KILLED) == ()
    life.wait(10)
    assert life.see() == (Submit(3),)
    assert life.see(KILLED) == ()
    assert life.status.phase is JobPhase.FAILED
    assert life.condition("Failed") == ("True", "RestartLimitExceeded")
    assert life.condition("Stalled")[0] == "True"
    assert life.status.restarts.counted == 2


def test_preemptions_restart_free_of_charge_until_max_disruptions() -> None:
    life = started(restart_policy={"maxRestarts": 0, "maxDisruptions": 1})
    assert life.see(PREEMPTED) == (Submit(2),)
    assert (life.status.restarts.counted, life.status.restarts.disruptions) == (0, 1)
    assert life.see(PREEMPTED) == ()
    assert life.condition("Failed") == ("True", "DisruptionLimitExceeded")


@pytest.mark.parametrize(
    ("code", "name"),
    [(65, "DataError"), (78, "ConfigError"), (93, "DoNotRestart"), (93, "Overtaken")],
)
def test_permanent_failures_fail_at_once_with_their_class(code: int, name: str) -> None:
    life = started()
    assert life.see(ended(code, FailureClass(name), "row 3 has no text")) == ()
    assert life.condition("Failed") == ("True", name)
    assert life.status.attempts[0].message == "row 3 has no text"


def test_counted_restarts_back_off_doubling_up_to_the_longest_wait() -> None:
    policy = {"maxRestarts": 9, "backoff": {"baseSeconds": 10, "maxSeconds": 30}}
    life = started(restart_policy=policy)
    for number, wait in enumerate((10, 20, 30, 30), 1):
        life.see(running(number, attempt=number))
        assert life.see(KILLED) == ()
        assert life.requeue == wait
        life.wait(wait - 1)
        assert life.see() == ()
        assert life.requeue == 1
        life.wait(1)
        assert life.see() == (Submit(life.status.attempt),)


def gone(failure: FailureClass) -> Observation:
    """An attempt that left no termination, and of which the backend knows why."""
    return Observation(
        AttemptPhase.FAILED, all_gone=True, failure_class=failure, message="the service says so"
    )


def test_a_failure_of_the_service_restarts_free_of_charge_and_backs_off() -> None:
    policy = {"maxRestarts": 0, "maxDisruptions": 3, "backoff": {"baseSeconds": 10}}
    life = started(restart_policy=policy)
    for count, wait in ((1, 10), (2, 20), (3, 40)):
        assert life.see(gone(FailureClass.SERVICE_FAILED)) == ()
        assert (life.status.restarts.counted, life.status.restarts.disruptions) == (0, count)
        assert life.requeue == wait
        life.wait(wait)
        assert life.see() == (Submit(count + 1),)
    life.see(gone(FailureClass.SERVICE_FAILED))
    assert life.condition("Failed") == ("True", "DisruptionLimitExceeded")


def test_a_past_attempt_keeps_its_url_and_how_often_its_service_moved_it() -> None:
    life = started()
    life.set_url("https://ml.azure.example/runs/1")
    life.see(replace(running(3), disruptions=2))
    assert life.status.attempts[0].disruptions == 2
    life.see(replace(KILLED, disruptions=2))
    first, second = life.status.attempts
    assert (first.url, first.disruptions) == ("https://ml.azure.example/runs/1", 2)
    assert (second.url, second.disruptions) == (None, None)


def test_what_nobody_can_explain_restarts_counted_under_its_own_class() -> None:
    life = started()
    assert life.see(gone(FailureClass.UNKNOWN)) == (Submit(2),)
    assert life.status.restarts.counted == 1
    (first, _) = life.status.attempts
    assert (first.failure_class, first.message) == ("Unknown", "the service says so")


def test_what_others_cancelled_is_not_restarted() -> None:
    life = started()
    assert life.see(gone(FailureClass.DO_NOT_RESTART)) == ()
    assert life.condition("Failed") == ("True", "DoNotRestart")


def test_a_preemption_does_not_back_off() -> None:
    life = started(restart_policy__backoff={"baseSeconds": 10})
    assert life.see(PREEMPTED) == (Submit(2),)


def test_suspending_stops_with_the_grace_and_counts_nothing() -> None:
    life = started(deadlines__termination_grace_seconds=33)
    life.see(running(3))
    life.suspend(True)
    assert life.see(running(4)) == life.cancel_in(33.0)
    assert life.status.phase is JobPhase.SUSPENDING
    life.wait(10)
    assert life.see(running(4)) == life.cancel_in(23.0)
    assert life.see(PREEMPTED) == ()
    assert life.status.phase is JobPhase.SUSPENDED
    assert life.condition("Suspended") == ("True", "SuspendedByUser")
    assert life.status.restarts.disruptions == 0
    life.suspend(False)
    assert life.see() == (Submit(2),)
    assert life.condition("Suspended") == ("False", "Resumed")
    assert life.status.restarts.counted == life.status.restarts.disruptions == 0


GRACE = "; processes that still run after 120 s are killed"
NO_NODE = Observation(AttemptPhase.PENDING)
LOADS = Observation(AttemptPhase.RUNNING, nodes_ready=1)
LOST = Observation(
    AttemptPhase.FAILED, nodes_ready=1, termination=KILLED.termination, message="pod x was killed"
)


@pytest.mark.parametrize(
    ("before", "seen", "says"),
    [
        pytest.param(
            running(3), running(4),
            "attempt 1 saves a checkpoint of its newest step and stops" + GRACE, id="it trains",
        ),
        pytest.param(
            NO_NODE, NO_NODE, "attempt 1 is stopped before it starts to train", id="it has no node"
        ),
        pytest.param(
            LOADS, LOADS, "attempt 1 has not trained yet and stops without a checkpoint" + GRACE,
            id="it loads",
        ),
        pytest.param(
            running(3), LOST,
            "attempt 1 has lost a node and stops without another checkpoint" + GRACE,
            id="it has lost a node",
        ),
    ],
)  # fmt: skip
def test_what_an_attempt_does_that_is_stopped_is_told_as_it_is(
    before: Observation, seen: Observation, says: str
) -> None:
    suspended, late = started(), started(deadlines__active_seconds=60)
    for life in (suspended, late):
        life.see(before)
    suspended.suspend(True)
    suspended.see(seen)
    assert suspended.said("Suspended") == suspended.said("Ready") == says
    late.wait(60)
    late.see(seen)
    limit = "the job was active for deadlines.activeSeconds 60"
    why = f"{limit}; raise the limit, then create the job again"
    assert (late.said("Failed"), late.said("Ready")) == (why, f"{why}; {says}")


def test_resuming_while_it_stops_waits_for_the_end_and_goes_on_uncounted() -> None:
    life = started()
    life.suspend(True)
    life.see(running(3))
    life.suspend(False)
    assert life.see(running(3)) == life.cancel_in(120.0)
    assert life.see(KILLED) == (Submit(2),)
    assert life.status.restarts.counted == life.status.restarts.disruptions == 0


def test_a_job_that_ends_while_it_is_suspended_is_complete() -> None:
    life = started()
    life.suspend(True)
    life.see(running(9))
    assert life.see(ended()) == (Collect(),)
    assert life.status.phase is JobPhase.SUCCEEDED


def test_a_permanent_failure_while_suspending_is_not_hidden() -> None:
    life = started()
    life.suspend(True)
    life.see(running(1))
    life.see(ended(65, FailureClass.DATA_ERROR, "no rows"))
    assert life.condition("Failed") == ("True", "DataError")


def test_a_suspended_new_job_starts_nothing() -> None:
    life = Life(suspend=True)
    assert life.see() == ()
    assert life.status.phase is JobPhase.SUSPENDED
    assert life.status.attempt == 0


def test_a_job_that_is_resumed_and_refused_is_not_told_to_resume_it() -> None:
    life = started()
    life.see(running(3))
    life.suspend(True)
    life.see(running(3))
    life.see(PREEMPTED)
    life.rejection = Rejection("InvalidSpec", "spec.topology.nodes 9 is more than 4; lower it")
    life.suspend(False)
    assert life.see() == ()
    text = (
        "resumed, but the job cannot continue yet: spec.topology.nodes 9 is more than 4; lower it"
    )
    assert life.said("Suspended") == text
    assert life.condition("Stalled") == ("True", "InvalidSpec")
    life.suspend(True)
    life.see()
    assert life.said("Suspended") == "suspended by spec.suspend; set it to false to resume"
    life.rejection = None
    life.suspend(False)
    assert life.see() == (Submit(2),)
    assert life.condition("Suspended") == ("False", "Resumed")


def test_the_active_deadline_stops_the_job_and_fails_it_when_it_is_gone() -> None:
    life = started(deadlines={"activeSeconds": 100, "terminationGraceSeconds": 30})
    life.wait(99)
    assert life.see(running(3)) == ()
    assert life.requeue == 0.5
    life.wait(1)
    assert life.see(running(3)) == life.cancel_in(30.0)
    assert life.condition("Failed") == ("False", "ActiveDeadlineExceeded")
    assert life.see(PREEMPTED) == ()
    assert life.condition("Failed") == ("True", "ActiveDeadlineExceeded")


def test_the_pending_deadline_counts_only_while_nothing_runs() -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(PENDING)
    life.wait(61)
    assert life.see(running(1)) == ()
    life = started(deadlines__pending_seconds=60)
    life.wait(60)
    assert life.see(PENDING) == life.cancel_in(120.0)
    life.see(Observation(AttemptPhase.FAILED, all_gone=True))
    assert life.condition("Failed") == ("True", "PendingDeadlineExceeded")


IN_QUEUE = Obstacle("Queued", "waits in queue team", Effect.QUEUED)
QUEUED = Observation(AttemptPhase.PENDING, obstacle=IN_QUEUE)


def test_the_pending_deadline_does_not_count_the_time_in_a_queue() -> None:
    life = started(deadlines__pending_seconds=60, queue={"name": "team"})
    life.see(QUEUED)
    assert life.requeue is None
    life.wait(3600)
    assert life.see(QUEUED) == ()
    life.wait(1)
    assert life.see(PENDING) == ()
    life.wait(59)
    assert life.see(PENDING) == ()
    life.see(QUEUED)  # another job of more importance takes its place
    life.wait(3600)
    assert life.see(PENDING) == ()
    life.wait(60)
    assert life.see(PENDING) == life.cancel_in(120.0)
    assert life.condition("Failed") == ("False", "PendingDeadlineExceeded")


NO_ANSWER = Observation(AttemptPhase.UNKNOWN, message="no answer", requeue_seconds=1.0)


@pytest.mark.parametrize("before", [running(3), lives(KILLED)], ids=["trains", "ends"])
def test_an_attempt_that_had_its_nodes_meets_no_pending_deadline(before: Observation) -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(before)
    life.wait(3600)
    assert life.see(NO_ANSWER) == ()
    assert life.requeue == 1.0


def test_looks_that_fail_for_long_are_told_of_an_attempt_that_does_not_run_yet() -> None:
    life = started(deadlines__pending_seconds=60)
    life.see(PENDING)
    fails = replace(NO_ANSWER, obstacle=Obstacle("BackendFailed", NO_ANSWER.message))
    assert life.see(fails) == ()
    assert life.condition("ResourcesReady") == ("False", "BackendFailed")
    assert life.said("Ready") == "no answer"
    life.wait(60)
    assert life.see(fails) == life.cancel_in(120.0)


@pytest.mark.parametrize(
    "seen", [PENDING, running(3), lives(KILLED), lives(ended())], ids=lambda seen: seen.phase
)
def test_the_same_sight_later_changes_nothing(seen: Observation) -> None:
    life = started()
    life.see(seen)
    before = life.status
    life.wait(3600)
    life.see(seen)
    assert life.status == before


def test_a_deadline_wakes_the_job_when_no_event_would() -> None:
    life = started(deadlines__active_seconds=100)
    life.wait(40)
    life.see(Observation(AttemptPhase.RUNNING, nodes_ready=1))
    assert life.requeue == 60


def test_a_suspended_job_has_no_running_deadline() -> None:
    life = started(deadlines__active_seconds=100)
    life.suspend(True)
    life.see(running(3))
    life.see(PREEMPTED)
    life.wait(1000)
    life.suspend(False)
    assert life.see() == (Submit(2),)
    life.wait(99)
    assert life.see(running(4)) == ()
    life.wait(1)
    assert life.see(running(4)) == life.cancel_in(120.0)


def test_progress_is_written_at_most_once_an_interval_unless_the_phase_changes() -> None:
    life = started(observability__status_interval_seconds=15)
    life.see(running(1))
    life.wait(14)
    before = life.status
    life.see(running(5))
    assert life.status == before
    life.wait(1)
    life.see(running(6))
    assert life.status.progress.step == 6
    life.wait(1)
    life.suspend(True)
    life.see(running(7))
    assert life.status.progress.step == 7


def test_progress_carries_no_digits_that_mean_nothing() -> None:
    life = started()
    life.see(running(2, loss=6.1461639404296875, eta_seconds=57.92001718224111, epoch=1 / 3))
    told = life.status.progress
    assert (told.loss, told.eta_seconds, told.epoch) == (6.1462, 58.0, 0.33333)


def test_the_pages_of_the_trackers_outlast_the_attempt_that_reported_them() -> None:
    life = started()
    page = TrackerRun(type="mlflow", url="https://mlflow.test/#/experiments/1/runs/a")
    life.see(running(2, trackers=(page,)))
    life.wait(60)
    life.see(running(3))
    assert life.status.trackers == [TrackerStatus(type=page.type, url=page.url)]


def test_the_transport_of_the_ranks_is_in_the_status_at_most_as_long_as_its_schema() -> None:
    life = started()
    life.see(running(2, transport="NET/IB,P2P"))
    assert life.status.progress.transport == "NET/IB,P2P"
    life.wait(60)
    life.see(running(3, transport="x" * 300))
    assert life.status.progress.transport == "x" * 256


def test_the_last_progress_is_never_lost() -> None:
    life = started()
    life.see(running(1))
    life.see(ended(progress=running(10).progress))
    assert life.status.progress.step == 10


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("", "file:///run/checkpoints/step-4"),
        ("pvc://claim/saved/", "pvc://claim/saved/step-4"),
    ],
)
def test_the_ledger_names_checkpoints_so_that_others_find_them(folder: str, expected: str) -> None:
    ref = CheckpointRef(step=4, path="/run/checkpoints/step-4", time=0.0, world_size=2)
    life = started()
    life.see(replace(running(4, checkpoint=ref, resumed_step=2), checkpoints=folder))
    last = life.status.checkpoint.last
    assert (last.uri, last.time) == (expected, "1970-01-01T00:00:00Z")
    assert life.condition("CheckpointReady") == ("True", "Committed")
    assert life.status.attempts[0].resumed_step == 2


def test_a_vanished_attempt_is_a_lost_worker() -> None:
    life = started()
    seen = Observation(AttemptPhase.UNKNOWN, all_gone=True, message="its folder is gone")
    assert life.see(seen) == (Submit(2),)
    assert life.status.attempts[0].message == "its folder is gone"


def test_what_is_left_of_a_vanished_attempt_is_told_and_stopped() -> None:
    life = started()
    life.see(running(3))
    left = Observation(AttemptPhase.FAILED, message="Job tiny-1 does not exist any more")
    assert life.see(left) == life.cancel_in(10.0)
    assert life.status.phase is JobPhase.RESTARTING
    assert life.condition("Running") == ("False", "Restarting")
    assert life.said("Ready").startswith("Job tiny-1 does not exist any more; waiting until")


def test_a_look_that_failed_changes_nothing() -> None:
    life = started()
    life.see(running(3))
    seen = Observation(AttemptPhase.UNKNOWN, message="no answer", requeue_seconds=1.0)
    before = life.status
    assert life.see(seen) == ()
    assert life.status == before
    assert life.requeue == 1.0


def test_only_the_newest_ten_attempts_are_kept_and_numbers_go_on() -> None:
    life = started(restart_policy__max_restarts=100)
    for _ in range(14):
        life.see(KILLED)
        life.wait(300)
        life.see()
    assert [attempt.number for attempt in life.status.attempts] == list(range(6, 16))


def test_what_others_do_to_an_attempt_is_told_beside_what_it_does() -> None:
    life = Life()
    life.see()
    life.see(replace(running(), warning="somebody deletes its Service"))
    assert life.said("Running").endswith("; somebody deletes its Service")
    life.see(running())
    assert "Service" not in life.said("Running")


def test_a_job_without_checkpoints_is_suspended_without_one_and_says_that_it_begins_anew() -> None:
    life = started(checkpoint__enabled=False)
    life.see(running(3))
    life.suspend(True)
    life.see(running(3))
    assert "stops without a checkpoint (spec.checkpoint.enabled)" in life.said("Suspended")
    life.see(PREEMPTED)
    assert "set spec.suspend to false to restart from step 0" in life.said("Suspended")
    life.suspend(False)
    assert life.see() == (Submit(2),)


@pytest.mark.parametrize(
    ("end", "kind", "reason"),
    [
        pytest.param(ended(0, FailureClass.COMPLETED, "done"), "Complete", "Completed", id="done"),
        pytest.param(ended(65, FailureClass.DATA_ERROR, "bad"), "Failed", "DataError", id="failed"),
    ],
)
def test_a_finished_job_whose_conditions_were_removed_is_finished_again(
    end: Observation, kind: str, reason: str
) -> None:
    life = started()
    life.see(end)
    before = life.status
    left = [one for one in before.conditions if one.type not in ("Complete", "Failed")]
    life.job = life.job.model_copy(
        update={"status": before.model_copy(update={"conditions": left})}
    )
    life.wait(3600)
    assert life.see() == ()
    assert life.condition(kind) == ("True", reason)
    assert (life.status.attempt, life.status.completion_time) == (1, before.completion_time)
    assert life.see() == ()
