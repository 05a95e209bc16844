"""Faults that other tests cause and judge: real processes, a real control plane, real nodes."""

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_trainer.config import FailureClass
from support.chaos.case import LAST_STEP, THE_START, Budget, Case, Place, Truth

C = FailureClass
LAST_COMMIT = "the last checkpoint"
GANGS = "tests/unit/backends/kubernetes/test_partial_gangs.py"
FAILOVER = "tests/unit/backends/kubernetes/test_failover.py"
ON_THAT_NODE = "test_a_job_with_folders_on_the_lost_node_stalls_and_is_not_started_again"
COMMITS = "tests/integration/checkpoint/test_09_crash_safe_commit.py"
ON_API_SERVER = "tests/integration/backends/kubernetes"
OUTAGES = "tests/integration/kernel"
E2E = "tests/e2e"

VIRTUAL = (
    Case(
        "pods always fail",
        "each pod ends with 137 for an hour, from the start and after 500 good steps",
        Truth(
            C.WORKER_LOST,
            budget=Budget.FREE,
            words=("at most 20 attempts in an hour",),
            resumes=LAST_COMMIT,
        ),
        shown_by="tests/chaos/test_always_failing.py",
        is_starred=True,
    ),
    Case(
        "half a gang waits for 15 minutes",
        "room for a single pod, without a queue",
        Truth(reason="Unschedulable", words=("0/2 nodes are available",)),
        shown_by=f"{GANGS}::test_half_a_gang_alone_waits_for_15_minutes_and_gives_way_to_no_job",
        is_starred=True,
    ),
    Case(
        "two gangs hold a part of their nodes each",
        "room for two of four pods, without a queue",
        Truth(
            C.PREEMPTED,
            words=("gave way to job older",),
            resumes=THE_START,
        ),
        shown_by=(
            f"{GANGS}::test_the_younger_of_two_gangs_gives_way_and_runs_when_the_older_has_ended"
        ),
        is_starred=True,
    ),
    Case(
        "most nodes are silent together",
        "condition Ready is False without a reason on three of five nodes",
        Truth(reason="ControlPlaneCutOff", words=("no other attempt is started",)),
        shown_by=f"{FAILOVER}::test_no_job_fails_over_while_most_nodes_are_silent_together",
        is_starred=True,
    ),
    Case(
        "a node whose disk has the checkpoints is silent",
        "the profile's volume is a hostPath",
        Truth(
            reason="NodeNotResponding",
            words=("the folders of the job may be on that node alone", "out-of-service"),
        ),
        shown_by=f"{FAILOVER}::{ON_THAT_NODE}",
        is_starred=True,
    ),
    Case(
        "a node only seems lost",
        "flaps, a silent kubelet, readiness gates, a blocked page, long evaluations and steps, and "
        "restarts of the operator",
        Truth(words=("attempt 1 trains",)),
        shown_by=f"{FAILOVER}::test_a_node_that_only_seems_lost_costs_no_attempt",
        is_starred=True,
    ),
    Case(
        "the clock of the operator is wrong by an hour",
        "the job is suspended meanwhile",
        Truth(C.PREEMPTED, words=("no pod counts as lost",), resumes=LAST_COMMIT),
        shown_by=f"{FAILOVER}::test_a_clock_that_is_wrong_makes_no_pod_lost",
    ),
    Case(
        "the operator is killed at each write of a job's life",
        "the same life is repeated with a crash before or after each write",
        Truth(words=("the status and all children are as without crashes",)),
        shown_by="tests/unit/backends/kubernetes/test_crashes.py",
    ),
)

PROCESSES = (
    Case(
        "ranks are killed, and the next attempt trains to the end",
        "SIGKILL of real trainers",
        Truth(
            C.WORKER_LOST,
            words=("the final loss is the same as without a kill",),
            budget=Budget.COUNTED,
            resumes=LAST_COMMIT,
        ),
        Place.PROCESSES,
        shown_by=(
            "tests/integration/checkpoint/test_kill_and_resume.py"
            "::test_workers_that_are_killed_lose_no_step_beyond_the_last_commit"
        ),
    ),
    Case(
        "a rank is killed while it saves",
        "SIGKILL at each named point of a checkpoint",
        Truth(C.WORKER_LOST, budget=Budget.COUNTED, words=("killed",), resumes=LAST_COMMIT),
        Place.PROCESSES,
        shown_by=f"{COMMITS}::test_a_kill_while_saving_loses_no_step_beyond_the_last_commit",
    ),
    Case(
        "an attempt is frozen, and wakes beside the next attempt",
        "SIGSTOP of all its processes while it tokenises, saves or restores, and SIGCONT",
        Truth(
            C.OVERTAKEN,
            words=("attempt 2 now writes to the folder", "its end is as without the freeze"),
            resumes=LAST_COMMIT,
        ),
        Place.PROCESSES,
        shown_by=(
            "tests/integration/checkpoint/test_failover_series.py"
            "::test_an_attempt_that_was_frozen_wakes_and_the_next_attempt_is_not_disturbed"
        ),
    ),
    Case(
        "the newest checkpoint is damaged",
        "each of its files is cut, changed or removed",
        Truth(words=("the checkpoint before is restored",), resumes="the checkpoint before"),
        Place.PROCESSES,
        shown_by=f"{COMMITS}::test_a_damaged_file_makes_restore_take_the_checkpoint_before",
    ),
    Case(
        "the disk of checkpoints is full",
        "a file system of 4 MiB",
        Truth(words=("training continues, and saves again once there is room",)),
        Place.PROCESSES,
        shown_by=(
            "tests/integration/checkpoint/test_disk_full.py"
            "::test_training_survives_a_full_disk_and_saves_again_when_there_is_room"
        ),
    ),
    Case(
        "a rank hangs",
        "a rank that never joins a collective",
        Truth(C.HUNG, budget=Budget.COUNTED, words=("stacks of all ranks",), resumes=LAST_COMMIT),
        Place.PROCESSES,
        shown_by=(
            "tests/integration/launch/test_watchdog.py"
            "::test_when_one_rank_hangs_all_write_their_stacks_and_end"
        ),
    ),
)

CONTROL_PLANE = (
    Case(
        "the operator is killed after each of its writes",
        "SIGKILL of a real operator beside played pods",
        Truth(words=("one attempt at a time",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{ON_API_SERVER}/test_kills.py"
            "::test_killed_after_each_of_its_writes_it_trains_on_with_one_attempt_at_a_time"
        ),
    ),
    Case(
        "a job is deleted after each of the operator's writes",
        "DELETE of the FineTuneJob during creation",
        Truth(words=("no object is left",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{ON_API_SERVER}/test_deletions.py"
            "::test_deleted_after_each_of_the_operators_writes_a_job_leaves_nothing"
        ),
    ),
    Case(
        "a scheduler of the profile does not exist",
        "`schedulerName` of no scheduler",
        Truth(reason="SchedulerNotResponding", words=("the scheduler and the profile's field",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{ON_API_SERVER}/test_backend.py"
            "::test_a_scheduler_that_ignores_the_pods_is_named_by_the_status"
        ),
        is_starred=True,
    ),
    Case(
        "a quota admits no pods",
        "a ResourceQuota of the namespace",
        Truth(reason="PodsNotCreated", words=("exceeded quota",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{ON_API_SERVER}/test_bad_input.py"
            "::test_a_quota_is_told_in_the_conditions_and_is_no_obstacle_once_it_is_gone"
        ),
        is_starred=True,
    ),
    Case(
        "the API server is away",
        "the API server is stopped and started",
        Truth(words=("the operator stops leading, and continues by itself",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{OUTAGES}/test_faults.py"
            "::test_without_the_api_server_it_stops_leading_and_comes_back_by_itself"
        ),
    ),
    Case(
        "etcd hangs, the API server restarts, a watch expires",
        "SIGSTOP of etcd, restart, compaction",
        Truth(words=("no attempt ends",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{OUTAGES}/test_outages.py"
            "::test_one_process_outlives_a_hanging_etcd_a_restart_and_an_expired_watch"
        ),
    ),
    Case(
        "a leader is stopped for longer than its Lease",
        "SIGSTOP, then SIGCONT",
        Truth(words=("one writer at a time",)),
        Place.CONTROL_PLANE,
        shown_by=(
            f"{OUTAGES}/test_faults.py"
            "::test_a_leader_that_stood_still_past_its_lease_writes_nothing_when_it_goes_on"
        ),
    ),
)

NODE = (
    Case(
        "a pod on a node is deleted",
        "DELETE of a pod that trains",
        Truth(C.PREEMPTED, budget=Budget.FREE, words=("saved a checkpoint",), resumes=LAST_STEP),
        Place.NODE,
        shown_by=f"{E2E}/test_failures.py::test_a_pod_that_is_deleted_costs_no_step_that_was_saved",
        is_starred=True,
    ),
    Case(
        "a pod on a node is killed",
        "DELETE of a pod without a grace period",
        Truth(C.WORKER_LOST, words=("killed",), resumes=LAST_COMMIT),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_failures.py"
            "::test_a_pod_that_is_killed_without_a_word_goes_on_from_the_last_checkpoint"
        ),
        is_starred=True,
    ),
    Case(
        "the data set is not on the volume",
        "a path that does not exist",
        Truth(
            C.DATA_ERROR,
            words=("the path",),
            remedy="the path",
            phase=JobPhase.FAILED,
            final="DataError",
            resumes=THE_START,
        ),
        Place.NODE,
        shown_by=f"{E2E}/test_failures.py::test_what_a_failed_job_said_last_outlives_its_pods",
    ),
    Case(
        "no node, no image or no volume for the pods",
        "a node selector, an image and a ConfigMap that do not exist",
        Truth(
            reason="Unschedulable, ImagePullFailed or VolumeNotReady",
            words=("the cluster's sentence",),
        ),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_failures.py"
            "::test_what_keeps_a_job_from_starting_is_told_in_words_within_five_seconds"
        ),
    ),
    Case(
        "a batch Job on nodes is suspended and resumed by another client",
        "PATCH of `spec.suspend` of the batch Job",
        Truth(C.PREEMPTED, budget=Budget.FREE, words=("one attempt at a time",), resumes=LAST_STEP),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_given_up.py"
            "::test_a_batch_job_that_others_suspend_and_resume_trains_beside_no_other"
        ),
    ),
    Case(
        "an injected init container fails on a node",
        "a MutatingAdmissionPolicy adds an init container that ends with 3",
        Truth(
            C.NOT_STARTED,
            budget=Budget.FREE,
            words=("init container", "exit code 3"),
            resumes=THE_START,
        ),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_chaos.py::test_a_failing_init_container_is_named_and_the_restart_is_free"
        ),
    ),
    Case(
        "a pod on a node exceeds its own disk limit",
        "a MutatingAdmissionPolicy adds a container that fills the disk, with `maxRestarts: 0`",
        Truth(
            C.EVICTED,
            words=("ephemeral",),
            remedy="create the job again",
            phase=JobPhase.FAILED,
            final="RestartLimitExceeded",
        ),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_chaos.py"
            "::test_a_pod_that_exceeds_its_own_disk_limit_is_evicted_and_counted"
        ),
    ),
    Case(
        "an injected sidecar on a node never ends",
        "a MutatingAdmissionPolicy adds a container that ignores SIGTERM",
        Truth(
            C.COMPLETED,
            reason="Completing",
            words=("the job is Complete, and trains once",),
            phase=JobPhase.SUCCEEDED,
        ),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_chaos.py"
            "::test_a_job_with_an_endless_sidecar_is_complete_and_never_trained_again"
        ),
    ),
    Case(
        "children of a job on nodes are deleted",
        "DELETE of NetworkPolicy, Service and EndpointSlice, and later of the batch Job",
        Truth(
            C.PREEMPTED,
            budget=Budget.FREE,
            words=("another client has deleted it",),
            resumes=LAST_STEP,
        ),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_chaos.py"
            "::test_deleted_children_are_restored_and_a_deleted_batch_job_is_a_free_restart"
        ),
    ),
    Case(
        "a rank on a node is stopped",
        "SIGSTOP of a rank",
        Truth(words=("the rank, its node and the state of its process",)),
        Place.NODE,
        shown_by=(
            f"{E2E}/test_stuck_rank.py"
            "::test_a_stopped_rank_of_the_other_pod_is_named_with_its_node_and_the_state_of_its_process"
        ),
    ),
)

CASES = (*VIRTUAL, *PROCESSES, *CONTROL_PLANE, *NODE)
