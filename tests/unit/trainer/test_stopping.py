"""Early stopping: what counts as an improvement, and when patience is over."""

import pytest

from finetune_trainer.config import EarlyStopping
from finetune_trainer.stopping import Patience


@pytest.mark.parametrize(
    ("losses", "min_delta", "improved", "is_over"),
    [
        pytest.param([3.0, 2.0, 1.0], 0.0, [True, True, True], False, id="it falls"),
        pytest.param([3.0, 3.0, 3.1], 0.0, [True, False, False], True, id="it stays"),
        pytest.param(
            [3.0, 3.5, 2.9, 3.0], 0.0, [True, False, True, False], False, id="it recovers"
        ),
        pytest.param([3.0, 2.9, 2.8], 0.5, [True, False, False], True, id="it falls too slowly"),
        pytest.param([3.0, 2.7, 2.4], 0.5, [True, False, True], False, id="it falls in the end"),
        pytest.param([3.0, float("nan"), 2.0], 0.0, [True, False, True], False, id="not a number"),
        pytest.param([3.0, None, 3.0], 0.0, [True, False, False], False, id="one broken off"),
    ],
)
def test_patience_counts_the_evaluations_since_the_last_improvement(
    losses: list[float | None], min_delta: float, improved: list[bool], is_over: bool
) -> None:
    patience = Patience(EarlyStopping(patience=2, min_delta=min_delta))
    assert [patience.improves(loss) for loss in losses] == improved
    assert patience.is_exhausted == is_over


def test_without_settings_patience_has_no_end() -> None:
    patience = Patience(None)
    assert not any(patience.improves(loss) for loss in (1.0, 2.0, 3.0))
    assert not patience.is_exhausted
