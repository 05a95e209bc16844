"""Play a fault in virtual time, and compare the status of the job with the expected effects."""

from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.kube.resources import Object
from support.chaos.case import (
    LAST_STEP,
    NO_ATTEMPT_ENDS,
    THE_START,
    Budget,
    Case,
    Outcome,
    Truth,
)

RECOVERY_SECONDS = 1800
"""Longest time until the job trains again, or has its final phase."""

_BUDGETS = {
    Budget.COUNTED: {"counted": 1, "disruptions": 0},
    Budget.FREE: {"counted": 0, "disruptions": 1},
    Budget.NEITHER: {"counted": 0, "disruptions": 0},
}


async def play(case: Case, cluster: Any) -> Outcome:
    """Cause the fault in a cluster that acts by itself, and check the truth about it.

    Args:
        case: The fault.
        cluster: A `PlayedCluster` or a `PlayedWorkspace`.

    Raises:
        AssertionError: The status is not the truth.
    """
    assert case.inject is not None
    truth, outcome = case.truth, Outcome()
    if case.at_step is None:
        await case.inject(cluster)
        await cluster.apply(**case.spec)
        await cluster.reconcile()
    else:
        await cluster.apply(**case.spec)
        await cluster.reconcile()
        await cluster.until(lambda: cluster.step >= case.at_step, case.at_step + 60)
        await case.inject(cluster)
    begun = cluster.now
    if truth.reason:
        outcome.named_seconds = await cluster.until(
            lambda: ready(cluster.status)["reason"] == truth.reason, truth.within + 1
        )
        outcome.seen = ready(cluster.status)["message"]
        for part in truth.meanwhile:
            assert part in outcome.seen, f"{part!r} is not in {outcome.seen!r}"
    if case.repair is not None:
        await case.repair(cluster)
        begun = cluster.now
    await cluster.until(lambda: is_recovered(case, cluster), RECOVERY_SECONDS, case.stride)
    if truth.phase is JobPhase.RUNNING:
        outcome.recovery_seconds = (cluster.now - begun).total_seconds()
    if case.check is not None:
        await case.check(cluster)
    check_attempt(truth, cluster, outcome)
    check_end(truth, cluster, outcome)
    outcome.seen = cluster.without_port(outcome.seen)
    return outcome


def is_recovered(case: Case, cluster: Any) -> bool:
    """Whether the job has its final phase; a job that runs has also trained a step."""
    status, truth = cluster.status, case.truth
    if status.get("phase") != truth.phase:
        return False
    if truth.phase is not JobPhase.RUNNING:
        return True
    has_restarted = truth.failure is None or status["attempt"] > 1
    newest = max(status["attempts"], key=lambda one: int(one["number"]))
    is_heard = newest.get("lastStep", 0) > newest.get("resumedStep", 0)
    return bool(has_restarted and is_heard) and ready(status)["reason"] == "Training"


def ready(status: Object) -> dict[str, str]:
    """Return the condition Ready; an empty reason before the first status."""
    found = (one for one in status.get("conditions", ()) if one["type"] == "Ready")
    return dict(next(found, {"reason": "", "message": ""}))


def check_attempt(truth: Truth, cluster: Any, outcome: Outcome) -> None:
    """Check class, budget and resumed step of the attempt that the fault ended."""
    status = cluster.status
    attempts = sorted(status["attempts"], key=lambda one: int(one["number"]))
    ended = [one for one in attempts if "endTime" in one]
    classes = [one["failureClass"] for one in ended]
    assert classes == [truth.failure] * (truth.failure is not None), attempts
    assert status["restarts"] == _BUDGETS[truth.budget], status["restarts"]
    if not ended:
        outcome.seen = outcome.seen or ready(status)["message"]
        assert truth.resumes == NO_ATTEMPT_ENDS
        return
    seen = ended[0]["message"]
    outcome.seen = f"{outcome.seen}. Then: {seen}" if outcome.seen else seen
    if truth.phase is not JobPhase.RUNNING:
        return
    resumed = attempts[1].get("resumedStep", 0)
    outcome.lost_steps = cluster.lost_steps
    if truth.resumes == LAST_STEP:
        assert cluster.lost_steps == 0 < resumed
        return
    wanted = 0 if truth.resumes == THE_START else truth.resumes
    assert resumed == wanted, f"resumes from step {resumed}, not {wanted}"


def check_end(truth: Truth, cluster: Any, outcome: Outcome) -> None:
    """Check the words, and that each Failed and Stalled has a cause and a remedy."""
    status = cluster.status
    if truth.final:
        failed = next(one for one in status["conditions"] if one["type"] == "Failed")
        assert (failed["status"], failed["reason"]) == ("True", truth.final)
        outcome.seen = failed["message"]
    assert truth.words, "a case states the words that the user reads"
    for part in truth.words:
        assert part in outcome.seen, f"{part!r} is not in {outcome.seen!r}"
    assert bool(cluster.troubles) == bool(truth.remedy), cluster.troubles
    for reason, message in cluster.troubles:
        assert any(part in message for part in truth.cause or truth.words), (
            f"{reason} has no cause: {message}"
        )
        assert truth.remedy in message, f"{reason} has no remedy: {message}"
    assert cluster.most_alive <= 1
