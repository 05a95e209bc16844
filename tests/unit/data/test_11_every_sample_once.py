"""Every sample is seen exactly once an epoch, for any ranks, accumulation and resume points."""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.data.plan import DataPlan, Pack
from support.data.data_plans import CAPACITY, Lengths, lengths, plan, random_lengths

GLOBAL_BATCH = 12
# Ranks and packs of a micro-batch; what is left of the global batch is accumulated.
WORLDS = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3), (6, 1), (6, 2)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Lengths, dict[str, Any]]:
    values = draw(st.lists(st.integers(2, CAPACITY), min_size=1, max_size=80))
    return lengths(*values), {
        "seed": draw(st.integers(0, 5)),
        "packing": draw(st.booleans()),
        "global_batch_size": GLOBAL_BATCH,
        "epochs": draw(st.integers(1, 4)),
    }


@given(
    run=runs(),
    attempts=st.lists(
        st.tuples(st.sampled_from(WORLDS), st.integers(0, 8)), min_size=1, max_size=5
    ),
)
@settings(max_examples=300, deadline=None)
def test_every_sample_is_seen_once_an_epoch_whatever_the_ranks_and_resume_points(
    run: tuple[Lengths, dict[str, Any]], attempts: list[tuple[tuple[int, int], int]]
) -> None:
    dataset, choices = run
    unbroken = plan(dataset, **choices)
    seen: list[Pack] = []
    done = 0
    # Each attempt makes some steps and is evicted; the last one goes on to the end.
    for (ranks, micro_batch), num_steps in [*attempts, (attempts[0][0], unbroken.total_steps)]:
        attempt = plan(dataset, **choices, micro_batch_size=micro_batch)
        first, done = done, min(done + num_steps, unbroken.total_steps)
        for step in range(first, done):
            packs = attempt.packs(step)
            assert Counter(packs_of_all_ranks(attempt, step, ranks)) == Counter(packs)
            seen.extend(packs)
    assert seen == [pack for step in range(done) for pack in unbroken.packs(step)]
    size = unbroken.packs_per_epoch
    for epoch in range(choices["epochs"]):
        rows = [row for pack in seen[epoch * size : (epoch + 1) * size] for row in pack]
        assert sorted(rows) == list(range(len(dataset.lengths)))
    assert len(seen) == choices["epochs"] * size


def packs_of_all_ranks(made: DataPlan, step: int, ranks: int) -> list[Pack]:
    """Return what is trained on in a step; fails unless the ranks make equally many passes."""
    shares = [made.rank_packs(step, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    return [pack for share in shares for batch in share for pack in batch if pack]


@given(
    sources=st.lists(
        st.tuples(
            st.lists(st.integers(2, CAPACITY), min_size=1, max_size=30),
            st.sampled_from([0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0]),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda source: source[1],
    ),
    packing=st.booleans(),
    epochs=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_rows_of_a_source_are_seen_as_often_as_its_weight_says(
    sources: list[tuple[list[int], float]], packing: bool, epochs: int
) -> None:
    rows = [length for values, _ in sources for length in values]
    weights = [weight for values, weight in sources for _ in values]
    made = plan(
        lengths(*rows, weights=weights), packing=packing, epochs=epochs, global_batch_size=1
    )
    seen = Counter(
        row for step in range(made.total_steps) for pack in made.packs(step) for row in pack
    )
    first = 0
    for values, weight in sources:
        counts = [seen[row] for row in range(first, first + len(values))]
        # No row is ever more than one round ahead of another of its source.
        assert max(counts) - min(counts) <= 1
        if weight.is_integer():
            assert counts == [int(weight) * epochs] * len(values)
        elif not packing:
            assert sum(counts) == max(1, round(weight * len(values))) * epochs
        first += len(values)


def test_each_epoch_draws_other_rows_of_a_fraction_until_all_were_seen() -> None:
    rows = lengths(*[8] * 40, weights=[0.25] * 40)
    made = plan(rows, packing=False, epochs=8, global_batch_size=10)
    epochs = [{row for pack in made.packs(step) for row in pack} for step in range(8)]
    assert [len(epoch) for epoch in epochs] == [10] * 8
    assert set.union(*epochs[:4]) == set.union(*epochs[4:]) == set(range(40))
    assert epochs[:4] != epochs[4:]


def test_the_millionth_step_is_found_without_those_before_it() -> None:
    made = plan(random_lengths(50), max_steps=10**9)
    assert np.isclose(made.epoch(10**9), 4e9 / made.packs_per_epoch)
    assert [len(made.packs(step)) for step in range(10**9 - 4, 10**9)] == [4] * 4
