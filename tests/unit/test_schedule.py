import math

import pytest

from finetune_trainer.config import TrainingConfig
from finetune_trainer.schedule import learning_rate


def rates(total=10, **settings):
    training = TrainingConfig(global_batch_size=1, max_steps=total, learning_rate=1.0, **settings)
    return [learning_rate(training, step, total) for step in range(total)]


def test_constant_schedule_stays_after_warm_up():
    assert rates(schedule="constant", warmup=4) == [0.25, 0.5, 0.75, *[1.0] * 7]


def test_linear_schedule_would_reach_zero_one_step_after_the_last():
    assert rates(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])


def test_cosine_schedule_follows_half_a_cosine():
    expected = [0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    assert rates(schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("warmup", "first"),
    [
        pytest.param(0.25, 1 / 3, id="a share of the steps, rounded up"),
        pytest.param(2, 1 / 2, id="a count of steps"),
        pytest.param(0, 1.0, id="none"),
    ],
)
def test_warm_up_is_a_share_below_one_and_a_count_from_one(warmup, first):
    assert rates(schedule="constant", warmup=warmup)[0] == pytest.approx(first)
