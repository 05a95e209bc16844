"""The data plan: the same data for the same step, whatever the ranks, and all of it once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.data.packing import best_fit
from support.data.data_plans import CAPACITY, Lengths, lengths, plan, random_lengths, sequences

GOLDEN_PACKS = [((1,), (9,), (8,), (2,)), ((4,), (3,), (5,), (6,)), ((7,), (0,), (7,), (0,))]
GOLDEN_FINGERPRINT = "28e7dd6c751df9a2cad4b0b40579b6e94d7e379a505fa41055eedbb605a00624"


@st.composite
def runs(draw: st.DrawFn) -> tuple[Lengths, dict[str, Any], int]:
    values = draw(st.lists(st.integers(2, CAPACITY), min_size=1, max_size=60))
    world_size = draw(st.sampled_from([1, 2, 3, 4]))
    micro_batch_size = draw(st.integers(1, 3))
    choices = {
        "seed": draw(st.integers(0, 5)),
        "packing": draw(st.booleans()),
        "micro_batch_size": micro_batch_size,
        "global_batch_size": world_size * micro_batch_size * draw(st.integers(1, 3)),
        "epochs": draw(st.integers(1, 3)),
    }
    return lengths(*values), choices, world_size


@given(run=runs())
@settings(max_examples=100, deadline=None)
def test_ranks_share_the_packs_of_a_step_in_equally_many_micro_batches(
    run: tuple[Lengths, dict[str, Any], int],
) -> None:
    dataset, choices, world_size = run
    made = plan(dataset, **choices)
    for step in range(made.total_steps):
        shares = [made.rank_packs(step, rank, world_size) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        assert all(len(batch) == choices["micro_batch_size"] for share in shares for batch in share)
        packs = [pack for share in shares for batch in share for pack in batch if pack]
        assert sorted(packs) == sorted(made.packs(step))


@given(run=runs())
@settings(max_examples=100, deadline=None)
def test_tokens_and_labels_of_a_step_are_those_of_its_sequences(
    run: tuple[Lengths, dict[str, Any], int],
) -> None:
    dataset, choices, _ = run
    made = plan(dataset, **choices)
    for step in range(made.total_steps):
        members = [index for pack in made.packs(step) for index in pack]
        assert made.tokens(step) == dataset.lengths[members].sum()
        assert made.label_tokens(step) == dataset.label_counts[members].sum()
        for pack in made.packs(step):
            assert dataset.lengths[list(pack)].sum() <= CAPACITY


def test_the_order_never_changes() -> None:
    # A checkpoint names its position by a step: these values may only change with the version
    # in the plan's fingerprint.
    made = plan(lengths(*range(2, 12)), epochs=2, packing=False)
    assert [made.packs(step) for step in range(3)] == GOLDEN_PACKS
    assert made.fingerprint == GOLDEN_FINGERPRINT


def test_each_epoch_has_an_order_of_its_own_over_the_same_packs() -> None:
    made = plan(random_lengths(200), epochs=2, global_batch_size=1)
    first, second = (
        [made.packs(step)[0] for step in range(start, start + made.packs_per_epoch)]
        for start in (0, made.packs_per_epoch)
    )
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"seed": 2}, id="seed"),
        pytest.param({"global_batch_size": 8}, id="global batch"),
        pytest.param({"packing": False}, id="packing"),
        pytest.param({"max_seq_len": 128}, id="length of a pack"),
    ],
)
def test_what_changes_the_order_changes_the_fingerprint(change: dict[str, Any]) -> None:
    dataset = random_lengths(50)
    assert plan(dataset, **change).packs(0) != plan(dataset).packs(0)
    assert plan(dataset, **change).fingerprint != plan(dataset).fingerprint


def test_other_data_have_another_order() -> None:
    same, other = lengths(*[8] * 50), lengths(*[8] * 50, fingerprint="other rows")
    assert plan(same).packs(0) != plan(other).packs(0)


def test_a_longer_run_starts_with_the_same_steps() -> None:
    short, long = plan(random_lengths(50)), plan(random_lengths(50), epochs=3)
    assert [long.packs(step) for step in range(short.total_steps - 1)] == [
        short.packs(step) for step in range(short.total_steps - 1)
    ]
    assert long.fingerprint == short.fingerprint


@pytest.mark.parametrize(
    ("epochs", "steps", "samples"),
    [
        pytest.param(0.3, 1, 3, id="part of an epoch"),
        pytest.param(0.1 + 0.2, 1, 3, id="binary fractions add no pack"),
        pytest.param(1, 3, 10, id="the last step is smaller"),
        pytest.param(1.25, 4, 13, id="rounded up to a pack"),
        pytest.param(2, 5, 20, id="steps reach over an epoch's end"),
    ],
)
def test_fractions_of_an_epoch_round_up(epochs: float, steps: int, samples: int) -> None:
    made = plan(lengths(*[8] * 10), packing=False, epochs=epochs)
    assert made.total_steps == steps
    assert len(sequences(made, range(steps))) == samples


def test_max_steps_are_full_steps_that_start_over_at_an_epochs_end() -> None:
    made = plan(lengths(*[8] * 5), packing=False, max_steps=4)
    assert made.total_steps == 4
    assert sorted(sequences(made, range(4)))[:4] == [0, 0, 0, 1]
    assert made.epoch(4) == 16 / 5


def test_a_step_outside_the_run_is_refused() -> None:
    with pytest.raises(IndexError, match="step 3 is not one of the run's 3 steps"):
        plan(lengths(*[8] * 10), packing=False).packs(3)


@pytest.mark.parametrize(
    ("rows", "packing"),
    [
        pytest.param(
            np.clip(np.random.default_rng(3).lognormal(8, 1.2, 4000), 2, 32_768).astype(np.int64),
            True,
            id="packs of few or many documents",
        ),
        pytest.param(np.random.default_rng(7).integers(2, 2048, 600), False, id="single rows"),
    ],
)
def test_ranks_get_about_equally_much_work(rows: np.ndarray, packing: bool) -> None:
    # Attention makes one long document dearer than many short ones of as many tokens.
    work = rows * (1 + rows / 32_768)
    made = plan(lengths(*rows), packing=packing, max_seq_len=32_768, global_batch_size=128)
    shares = [
        sum(work[list(pack)].sum() for batch in made.rank_packs(0, rank, 4) for pack in batch)
        for rank in range(4)
    ]
    assert max(shares) / min(shares) < 1.01


def test_packs_of_chat_like_rows_are_nearly_full() -> None:
    rows = np.clip(np.random.default_rng(3).lognormal(5.2, 0.9, 20_000), 2, 2048).astype(np.int32)
    made = plan(lengths(*rows), max_seq_len=2048)
    assert made.fill_ratio > 0.99


def test_a_sequence_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens is longer than 64"):
        best_fit(np.arange(1), np.asarray([65], np.int32), 64)
