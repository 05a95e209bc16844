import math
import re

import pytest

from finetune_trainer.config import TrainingConfig
from finetune_trainer.schedule import few_steps_warning, learning_rate, warmup_warning


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


@pytest.mark.parametrize(
    ("warmup", "total", "part"),
    [
        pytest.param(500, 4, "warmup 500 takes all 4 steps, so the .* to 0.8 % of", id="longer"),
        pytest.param(4, 4, "warmup 4 takes all 4 steps, so the .* to 100.0 % of", id="as long"),
        pytest.param(0.9, 4, "warmup 0.9 takes all 4 steps", id="a share, rounded up"),
        pytest.param(3, 4, None, id="shorter"),
        pytest.param(0.1, 1, None, id="one step at the full rate"),
        pytest.param(0, 4, None, id="none"),
    ],
)
def test_a_warm_up_that_takes_all_steps_is_worth_a_warning(warmup, total, part):
    training = TrainingConfig(
        global_batch_size=1, max_steps=total, learning_rate=1.0, warmup=warmup
    )
    warning = warmup_warning(training, total)
    assert (warning is None) if part is None else re.search(part, warning or "")


@pytest.mark.parametrize(
    ("limits", "total", "part"),
    [
        pytest.param({"epochs": 3}, 1, "the whole run has 1 optimizer step, which", id="one step"),
        pytest.param({"epochs": 3}, 9, "has 9 optimizer steps, which", id="few steps"),
        pytest.param({"epochs": 3}, 10, None, id="enough steps"),
        pytest.param({"max_steps": 2}, 2, None, id="as many as the manifest sets"),
    ],
)
def test_few_steps_of_all_epochs_are_worth_a_warning(limits, total, part):
    training = TrainingConfig(global_batch_size=1, learning_rate=1.0, **limits)
    warning = few_steps_warning(training, total)
    assert (warning is None) if part is None else part in (warning or "")
