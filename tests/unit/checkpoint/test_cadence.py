"""How often a checkpoint is made when nobody says how often."""

import math
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.checkpoint.cadence import Cadence, young_daly_seconds
from finetune_trainer.config import CheckpointConfig
from support.checkpoint.checkpoint_fixtures import make_state, open_store

TWO_HOURS = 7200.0


def cadence(**changes: Any) -> Cadence:
    settings = {"dir": "/nowhere", "mean_time_between_failures": TWO_HOURS} | changes
    return Cadence(CheckpointConfig.model_validate(settings))


def saves(made: Cadence, seconds: int, *, cost: float) -> list[int]:
    """Return when saves begin if one may begin every second and each takes `cost`."""
    begun = []
    for now in range(seconds):
        if made.is_elapsed(float(now)):
            made.restart()
            made.is_elapsed(float(now))
            made.save_seconds = cost
            begun.append(now)
    return begun


@pytest.mark.parametrize(
    ("cost", "failures", "interval"),
    [
        pytest.param(1.0, 7200.0, 120.0, id="cheap saves, spot nodes"),
        pytest.param(12.5, 86_400.0, math.sqrt(25 * 86_400), id="slower saves, nodes that last"),
        pytest.param(50.0, 10.0, 50.0, id="a save takes longer than nodes live"),
    ],
)
def test_the_interval_is_that_of_young_and_daly(
    cost: float, failures: float, interval: float
) -> None:
    assert young_daly_seconds(cost, failures) == pytest.approx(interval)


@pytest.mark.parametrize("cost", [0.5, 4.0, 30.0])
def test_no_interval_loses_less_time_than_the_chosen_one(cost: float) -> None:
    def lost(interval: float) -> float:
        return cost / interval + interval / (2 * TWO_HOURS)

    chosen = young_daly_seconds(cost, TWO_HOURS)
    assert all(lost(chosen) <= lost(chosen * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_the_first_save_is_early_and_the_next_ones_follow_from_its_cost() -> None:
    assert saves(cadence(), 260, cost=1.0) == [8, 128, 248]  # 7200 s / 1000, then 120 s


def test_a_cost_that_changes_changes_the_interval() -> None:
    made = cadence()
    made.save_seconds = 1.0
    assert made.interval_seconds == pytest.approx(120.0)
    made.save_seconds = 4.0
    assert made.interval_seconds == pytest.approx(240.0)


@pytest.mark.parametrize(
    ("settings", "interval"), [({"every_seconds": 30}, 30), ({"every_steps": 5}, None)]
)
def test_what_was_asked_for_is_not_overruled(
    settings: dict[str, int], interval: int | None
) -> None:
    made = cadence(**settings)
    made.save_seconds = 1.0
    assert made.interval_seconds == interval


def test_a_store_measures_its_saves_and_asks_for_the_next_one_in_time(tmp_path: Path) -> None:
    store = open_store(tmp_path, mean_time_between_failures=2000.0)
    store.restore(make_state(0))
    assert [now for now in (0.0, 1.9, 2.0, 2.1) if store.wants_save(1, now)] == [2.0]

    store.save(1, make_state(1))
    store.wait()
    assert store.cadence.save_seconds is not None
    interval = young_daly_seconds(store.cadence.save_seconds, 2000.0)
    asked = [100.0, 100.0 + 0.99 * interval, 100.0 + 1.01 * interval]
    assert [now for now in asked if store.wants_save(2, now)] == asked[2:]
