"""From a termination message to a class, and from a class to what follows."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.api.paths import show_path
from finetune_operator.api.v1alpha1.lifecycle import RestartAction, RestartPolicy
from finetune_operator.api.validation import check_object, defaulted
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.failures import action_for, verdict
from finetune_trainer.config import FailureClass, Termination
from support.api.builders import manifest
from support.kernel.fake_backend import ended
from support.kernel.kernel_world import World, happen

C = FailureClass


@pytest.mark.parametrize(
    ("code", "claimed", "expected"),
    [
        pytest.param(65, C.ERROR, C.DATA_ERROR, id="65 is bad data whatever it says"),
        pytest.param(78, C.COMPLETED, C.CONFIG_ERROR, id="78 is a bad configuration"),
        pytest.param(75, C.ERROR, C.PREEMPTED, id="75 is a preemption"),
        pytest.param(93, C.ERROR, C.DO_NOT_RESTART, id="93 is not restarted"),
        pytest.param(93, C.OVERTAKEN, C.OVERTAKEN, id="93 that says overtaken"),
        pytest.param(1, C.OVERTAKEN, C.ERROR, id="1 cannot claim to be overtaken"),
        pytest.param(137, C.COMPLETED, C.WORKER_LOST, id="137 is a lost worker"),
        pytest.param(137, C.OUT_OF_MEMORY, C.OUT_OF_MEMORY, id="137 that says out of memory"),
        pytest.param(1, C.OUT_OF_MEMORY, C.OUT_OF_MEMORY, id="1 says what it was"),
        pytest.param(1, C.PREEMPTED, C.ERROR, id="1 cannot claim a preemption"),
        pytest.param(139, C.ERROR, C.ERROR, id="another signal"),
        pytest.param(143, C.PREEMPTED, C.PREEMPTED, id="143 that was told to stop"),
        pytest.param(130, C.PREEMPTED, C.PREEMPTED, id="130 that was told to stop"),
        pytest.param(143, C.OUT_OF_MEMORY, C.OUT_OF_MEMORY, id="143 that says out of memory"),
    ],
)
def test_the_exit_code_beats_the_class_it_claims(
    code: int, claimed: FailureClass, expected: FailureClass
) -> None:
    assert verdict(ended(code, claimed, "words")).failure_class is expected


def test_only_success_with_exit_code_0_is_a_completion() -> None:
    words = Termination(failure_class=C.COMPLETED, exit_code=0, message="done")
    seen = Observation(AttemptPhase.FAILED, all_gone=True, termination=words)
    assert verdict(ended()).failure_class is C.COMPLETED
    assert verdict(seen).failure_class is C.ERROR
    assert verdict(seen).exit_code == 1


def test_gone_without_a_word_is_a_lost_worker() -> None:
    words = verdict(Observation(AttemptPhase.UNKNOWN, all_gone=True))
    assert (words.failure_class, words.exit_code) == (C.WORKER_LOST, 137)


@pytest.mark.parametrize(
    ("failure", "code", "action"),
    [
        (C.DATA_ERROR, 65, RestartAction.FAIL),
        (C.CONFIG_ERROR, 78, RestartAction.FAIL),
        (C.DO_NOT_RESTART, 93, RestartAction.FAIL),
        (C.OVERTAKEN, 93, RestartAction.FAIL),
        (C.PREEMPTED, 75, RestartAction.RESTART_FREE),
        (C.PREEMPTED, 143, RestartAction.RESTART_FREE),
        (C.WORKER_LOST, 137, RestartAction.RESTART),
        (C.OUT_OF_MEMORY, 137, RestartAction.RESTART),
        (C.ERROR, 1, RestartAction.RESTART),
    ],
)
def test_each_class_has_a_default(failure: FailureClass, code: int, action: RestartAction) -> None:
    assert action_for(RestartPolicy(), failure, code) is action


def test_the_first_rule_that_matches_decides() -> None:
    policy = RestartPolicy.model_validate(
        {
            "rules": [
                {"onClass": "Error", "onExitCodes": [3], "action": "RestartFree"},
                {"onExitCodes": [3, 4], "action": "Fail"},
                {"onClass": "DataError", "action": "Restart"},
                {"onClass": "Error", "action": "Fail"},
            ]
        }
    )
    assert action_for(policy, C.ERROR, 3) is RestartAction.RESTART_FREE
    assert action_for(policy, C.OUT_OF_MEMORY, 3) is RestartAction.FAIL
    assert action_for(policy, C.DATA_ERROR, 65) is RestartAction.RESTART
    assert action_for(policy, C.ERROR, 1) is RestartAction.FAIL
    assert action_for(policy, C.PREEMPTED, 75) is RestartAction.RESTART_FREE


def test_no_rule_restarts_what_was_overtaken() -> None:
    policy = RestartPolicy.model_validate({"rules": [{"onExitCodes": [93], "action": "Restart"}]})
    assert action_for(policy, C.DO_NOT_RESTART, 93) is RestartAction.RESTART
    assert action_for(policy, C.OVERTAKEN, 93) is RestartAction.FAIL


@pytest.mark.parametrize(
    "rule",
    [
        *({"onClass": one} for one in ("DataError", "ConfigError", "DoNotRestart")),
        *({"onExitCodes": [1, code]} for code in (65, 78, 93)),
    ],
    ids=str,
)
def test_a_restart_after_a_failure_that_recurs_is_counted_and_new_jobs_cannot_ask_for_another(
    rule: dict[str, Any],
) -> None:
    rules = {"rules": [{**rule, "action": "RestartFree"}]}
    policy = RestartPolicy.model_validate(rules)
    recurring = ((C.DATA_ERROR, 65), (C.CONFIG_ERROR, 78), (C.DO_NOT_RESTART, 93))
    actions = {action_for(policy, *failure) for failure in recurring}
    assert actions == {RestartAction.RESTART, RestartAction.FAIL}
    new = defaulted(manifest(restartPolicy=rules))
    (found,) = check_object(new)
    assert show_path(found.path) == "spec.restartPolicy.rules[0].action"
    assert check_object(new | {"status": {"phase": "Running"}}, old=new) == []


def test_a_stored_job_that_asks_for_free_restarts_after_bad_data_ends() -> None:
    async def live(world: World) -> None:
        policy = {"maxRestarts": 2, "rules": [{"onExitCodes": [65], "action": "RestartFree"}]}
        await world.apply(restartPolicy=policy)
        for _ in range(3):
            await world.settle()
            await happen(world, "finds bad data")
            await world.settle()
            world.now += timedelta(seconds=10)
        await world.settle()
        status = world.job["status"]
        assert (status["phase"], status["restarts"]["counted"]) == ("Failed", 2)

    asyncio.run(live(World()))
