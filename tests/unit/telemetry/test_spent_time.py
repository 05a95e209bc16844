"""Where rank 0's time went: every second once, whatever it did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.config import Phase, TimeSpent
from finetune_trainer.telemetry import StepReport
from finetune_trainer.telemetry.spent import SpentTime

SECONDS = st.floats(0, 1000)


def step(data: float = 0.0, checkpoint: float = 0.0) -> StepReport:
    return StepReport(
        step=1,
        epoch=0.0,
        loss=None,
        grad_norm=None,
        learning_rate=0.0,
        tokens=0,
        samples=0,
        seconds=data + checkpoint,
        data_wait_seconds=data,
        checkpoint_blocking_seconds=checkpoint,
    )


def total(spent: TimeSpent) -> float:
    return sum(value for _, value in spent)


@given(
    begun=SECONDS,
    turns=st.lists(st.tuples(st.sampled_from(Phase), SECONDS, SECONDS, SECONDS), max_size=20),
)
def test_the_parts_sum_to_the_age_of_the_process(
    begun: float, turns: list[tuple[Phase, float, float, float]]
) -> None:
    now, spent = begun, SpentTime(begun)
    for phase, seconds, data, checkpoint in turns:
        spent.turn(phase, now)
        now += seconds
        spent.step(step(data, checkpoint))
        said = spent.at(now)
        assert total(said) == pytest.approx(now - begun, abs=0.01)
        assert min(value for _, value in said) >= 0


def test_what_steps_waited_for_is_not_training() -> None:
    spent = SpentTime(0.0)
    spent.turn(Phase.TRAINING, 10.0)
    spent.step(step(data=2.0, checkpoint=3.0))
    spent.turn(Phase.EVALUATING, 30.0)
    spent.turn(Phase.EXPORTING, 34.0)
    assert spent.at(40.0) == TimeSpent(
        starting=10.0, training=15.0, data=2.0, checkpoint=3.0, evaluation=4.0, exporting=6.0
    )
