"""The observation of an attempt, from its batch Job and the verdicts on its pods."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.backends.base import AttemptPhase
from finetune_operator.backends.kubernetes import observe
from finetune_operator.backends.kubernetes.child_names import AttemptName
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.kube.resources import Object
from finetune_operator.reconcile.failures import verdict
from finetune_trainer.config import FailureClass
from support.kubernetes.pod_objects import (
    batch_job,
    disrupted,
    ended,
    pod,
    report,
    running,
    verdicts,
)

DONE = report(0, FailureClass.COMPLETED)
DATA = report(65, FailureClass.DATA_ERROR, "row 3 has no messages")
PREEMPTED = report(75, FailureClass.PREEMPTED)

SEEN: list[Any] = [
    pytest.param(batch_job(), [], ("Pending", False, 0, None), id="just created"),
    pytest.param(batch_job(), [running(0)], ("Pending", False, 1, None), id="half of the gang"),
    pytest.param(batch_job(), [running(0), running(1)], ("Running", False, 2, None), id="all run"),
    pytest.param(
        batch_job(), [ended(0, 0, DONE), running(1)], ("Running", False, 1, None), id="one is done"
    ),
    pytest.param(
        batch_job(), [ended(0, 0, DONE), ended(1, 0, DONE)], ("Succeeded", True, 0, 0),
        id="all are done before the controller says so",
    ),
    pytest.param(
        batch_job("Complete"), [ended(1, 0, DONE)], ("Succeeded", True, 0, 0), id="complete"
    ),
    pytest.param(
        batch_job("Complete"), [ended(0, 0, DATA), ended(1, 0, DATA)], ("Failed", True, 0, 65),
        id="a shell between hides from the controller that all failed",
    ),
    pytest.param(
        batch_job("Complete"), [ended(0, 0, PREEMPTED), ended(1, 0, PREEMPTED)],
        ("Failed", True, 0, 75), id="a shell between hides that all were preempted",
    ),
    pytest.param(
        batch_job("Complete"), [ended(0, 0), ended(1, 0)], ("Failed", True, 0, 78),
        id="what ran on node 0 was no trainer",
    ),
    pytest.param(
        batch_job("Complete"), [ended(0, 0, DONE), ended(1, 0)], ("Succeeded", True, 0, 0),
        id="a node without rank 0 has nothing to say under another launcher",
    ),
    pytest.param(
        batch_job("Complete"), [ended(0, 1), ended(0, 0, DONE), ended(1, 0, DONE)],
        ("Succeeded", True, 0, 0), id="a pod that failed was replaced, by a limit somebody raised",
    ),
    pytest.param(
        batch_job(), [ended(0, 65, DATA), running(1)], ("Failed", False, 1, 65), id="one failed"
    ),
    pytest.param(
        batch_job(), [ended(0, 1)], ("Failed", False, 0, 1),
        id="the other pod may still be created",
    ),
    pytest.param(
        batch_job("FailureTarget"), [ended(0, 1)], ("Failed", True, 0, 1),
        id="the controller gave up, so no other pod comes",
    ),
    pytest.param(
        batch_job(), [ended(0, 1), ended(1, 65, DATA)], ("Failed", True, 0, 65),
        id="who says what is wrong is the root cause, not who lost a peer",
    ),
    pytest.param(
        batch_job(), [ended(0, 143, is_deleted=True), ended(1, 137, why="OOMKilled")],
        ("Failed", True, 0, 137), id="who was ended with the rest is not the root cause",
    ),
    pytest.param(
        batch_job(), [running(0, is_deleted=True), running(1)], ("Running", False, 2, None),
        id="a pod that is told to leave still saves",
    ),
    pytest.param(
        batch_job(), [pod(0, "Failed", **disrupted("DeletionByTaintManager")), running(1)],
        ("Failed", False, 1, NO_EXIT_CODE),
        id="a node was taken away",
    ),
    pytest.param(
        batch_job("Failed"), [pod(0, "Running", is_deleted=True)], ("Failed", False, 0, None),
        id="a pod on a node that does not answer may still write",
    ),
    pytest.param(batch_job("Failed"), [], ("Failed", True, 0, None), id="nothing is left"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "pods", "expected"), SEEN)
def test_objects_of_the_cluster_become_an_observation(
    made: Object, pods: list[Object], expected: tuple[Any, ...]
) -> None:
    seen = observe.observation_of(made, verdicts(pods))
    code = seen.termination.exit_code if seen.termination else None
    assert (seen.phase.value, seen.all_gone, seen.nodes_ready, code) == expected


def test_an_attempt_whose_batch_job_was_deleted_has_failed_until_its_pods_are_gone() -> None:
    name = AttemptName.parse("default/a-b-12")
    assert (name.job, name.number, name.host) == ("a-b", 12, "a-b-12-0")
    hangs = observe.gone(name, verdicts([running(0), ended(1, 1)]))
    assert (hangs.phase, hangs.all_gone, hangs.nodes_ready) == (AttemptPhase.FAILED, False, 1)
    assert hangs.message == "Job default/a-b-12 no longer exists; 1 of its pods are still ending"
    for pods in ([], [ended(0, 75, PREEMPTED, is_deleted=True)], [running(0, is_deleted=True)]):
        left = [replace(read_pod(one), is_gone=True) for one in pods]
        seen = observe.gone(name, [judge(one) for one in left])
        assert (seen.phase, seen.all_gone) == (AttemptPhase.UNKNOWN, True)
        assert (verdict(seen).failure_class, seen.node) == ("Preempted", "node-0" if pods else "")
        assert verdict(seen).message.startswith("Job default/a-b-12 no longer exists, because")


def test_an_attempt_that_ended_before_its_batch_job_was_deleted_keeps_its_end() -> None:
    name = AttemptName.parse("default/a-b-12")
    failed = observe.gone(name, verdicts([ended(0, 65, DATA), ended(1, 143, is_deleted=True)]))
    assert (verdict(failed).failure_class, failed.node) == ("DataError", "node-0")
    done = observe.gone(name, verdicts([ended(0, 0, DONE), ended(1, 0, DONE)]))
    assert (done.phase, verdict(done).failure_class) == (AttemptPhase.SUCCEEDED, "Completed")
    unknown = observe.gone(name, verdicts([ended(1, 0, DONE)]))
    assert verdict(unknown).failure_class == "Preempted"


def test_a_class_that_the_cluster_decided_is_overridden_by_no_exit_code() -> None:
    pods = [ended(0, 137, reason="Evicted", message="exceeds its limit"), ended(1, 75, PREEMPTED)]
    seen = observe.observation_of(batch_job("FailureTarget"), verdicts(pods))
    found = verdict(seen)
    assert (found.failure_class, found.exit_code, seen.node) == ("Evicted", 137, "node-0")
    lost = pod(0, "Failed", **disrupted("DeletionByPodGC"))
    seen = observe.observation_of(batch_job("FailureTarget"), verdicts([lost, pods[1]]))
    found = verdict(seen)
    assert (found.failure_class, found.exit_code) == ("NodeLost", NO_EXIT_CODE)


def test_a_pod_that_was_deleted_before_it_ran_explains_the_end_of_its_job_alone() -> None:
    left = [judge(replace(read_pod(pod(0, "Pending", is_deleted=True)), is_gone=True))]
    waits = observe.observation_of(batch_job(nodes=1, suspend=True), left)
    assert waits.phase is AttemptPhase.PENDING
    failed = observe.observation_of(batch_job("Failed", nodes=1), left)
    assert (verdict(failed).failure_class, failed.all_gone) == ("Preempted", True)
    assert verdict(failed).exit_code == NO_EXIT_CODE
