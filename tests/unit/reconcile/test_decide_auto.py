"""The choice of the trainer for `auto` stays until a GPU is out of memory."""

from typing import Any

import pytest

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.reconcile.attempts import reopen
from finetune_operator.reconcile.decide import Submit
from finetune_trainer.config import FailureClass, Phase, PlanReport, Progress, Termination
from support.reconcile.decisions import Life, running

GPUS = {"gpusPerNode": 4, "processesPerNode": None}
GIB = 2**30


def plan_of(peak: int, lower: int | None) -> PlanReport:
    return PlanReport(
        strategy="ddp",
        activation_checkpointing="none",
        micro_batch_size=2,
        gradient_accumulation_steps=4,
        precision="bf16",
        peak_bytes=peak * GIB,
        usable_bytes=79 * GIB,
        lower_peak_bytes=None if lower is None else lower * GIB,
    )


def out_of_memory(attempt: int, *, is_gpu: bool = True, plan: PlanReport | None = None) -> Any:
    progress = Progress(attempt=attempt, phase=Phase.TRAINING, step=2, plan=plan)
    ended = Termination(
        failure_class=FailureClass.OUT_OF_MEMORY,
        exit_code=137,
        message="out of memory: CUDA out of memory",
        is_gpu_memory=is_gpu or None,
        progress=progress,
    )
    return Observation(AttemptPhase.FAILED, all_gone=True, termination=ended, progress=progress)


def gpu_life(**overrides: Any) -> Life:
    life = Life(
        topology=GPUS, training={"globalBatchSize": 32, "microBatchSize": None}, **overrides
    )
    life.see()
    return life


def test_the_choice_is_in_the_status_and_the_next_attempt_repeats_it() -> None:
    life = gpu_life()
    assert (life.status.plan.strategy, life.status.plan.micro_batch_size) == ("auto", 0)
    life.see(running(attempt=1, plan=plan_of(60, 50)))
    chosen = life.status.plan
    assert (chosen.strategy, chosen.precision, chosen.micro_batch_size) == ("ddp", "bf16", 2)
    assert chosen.gradient_accumulation_steps == 4
    assert "60.0 of 79.0 GiB" in chosen.reasons[0]
    assert life.end(out_of_memory(1, is_gpu=False)) == (Submit(2),)
    assert life.status.plan == chosen


def test_an_out_of_memory_lowers_the_choice_twice_and_then_fails_the_job() -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    assert life.end(out_of_memory(1, plan=plan_of(60, 50))) == (Submit(2),)
    plan = life.status.plan
    assert (plan.strategy, plan.peak_at_most, plan.lowered) == ("auto", 50 * GIB, 1)
    life.see(running(attempt=2, plan=plan_of(50, 40)))
    assert (life.status.plan.peak_at_most, life.status.plan.lowered) == (None, 1)
    assert life.end(out_of_memory(2, plan=plan_of(50, 40))) == (Submit(3),)
    assert life.end(out_of_memory(3, plan=plan_of(40, 30))) == ()
    assert life.condition("Failed") == ("True", "OutOfMemory")
    assert "auto has no other choice that needs less memory" in life.said("Failed")
    assert life.status.restarts.counted == 2


def test_without_a_lower_choice_the_job_fails_at_once() -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    life.end(out_of_memory(1, plan=plan_of(60, None)))
    assert life.condition("Failed") == ("True", "OutOfMemory")


def test_a_job_without_auto_fails_at_once() -> None:
    explicit = {"type": "ddp", "activationCheckpointing": "none"}
    training = {"globalBatchSize": 32, "microBatchSize": 2, "precision": "bf16"}
    life = Life(topology=GPUS, training=training, strategy=explicit)
    life.see()
    life.end(out_of_memory(1))
    assert life.condition("Failed") == ("True", "OutOfMemory")
    assert "auto" not in life.said("Failed")


def test_an_out_of_memory_before_the_choice_restarts_the_job() -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    assert life.end(out_of_memory(1)) == (Submit(2),)
    assert life.status.plan.lowered is None


def test_a_job_that_is_run_again_may_be_lowered_again() -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    for number, peak in enumerate((60, 50, 40), start=1):
        life.end(out_of_memory(number, plan=plan_of(peak, peak - 10)))
    assert life.condition("Failed")[0] == "True"
    status = reopen(life.status, life.now)
    life.job = life.job.model_copy(update={"status": status})
    assert life.end(None) == (Submit(4),)
    assert life.end(out_of_memory(4, plan=plan_of(40, 30))) == (Submit(5),)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"precision": "fp64"}, id="no precision of the API"),
        pytest.param({"replicas": 3, "strategy": "fsdp"}, id="replicas of another world"),
        pytest.param({"replicas": 2}, id="replicas of ddp"),
        pytest.param({"micro_batch_size": 5}, id="no divisor of the batch"),
    ],
)
def test_a_choice_that_auto_cannot_make_is_not_repeated(values: dict[str, Any]) -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    report = plan_of(60, 50).model_copy(update=values)
    life.see(running(attempt=1, plan=report))
    assert life.end(out_of_memory(1, is_gpu=False, plan=report)) == (Submit(2),)
    assert life.status.plan.strategy == "auto"


def test_a_rule_of_the_user_restarts_what_cannot_be_lowered() -> None:
    rule = {"onClass": "OutOfMemory", "action": "Restart"}
    life = gpu_life(restartPolicy={"maxRestarts": 5, "rules": [rule]})
    assert life.end(out_of_memory(1, plan=plan_of(60, None))) == (Submit(2),)
    assert life.status.plan.strategy == "ddp"


def test_memory_of_the_host_changes_no_choice() -> None:
    life = gpu_life(restartPolicy={"maxRestarts": 5})
    assert life.end(out_of_memory(1, is_gpu=False, plan=plan_of(60, 50))) == (Submit(2),)
    assert life.status.plan.lowered is None
