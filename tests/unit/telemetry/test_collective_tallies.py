"""How collectives are added up: bandwidths that are right, and a bounded number of series."""

import pytest

from finetune_trainer.config import metrics
from finetune_trainer.telemetry.collectives.sample import Sample, bus_factor, size_class
from finetune_trainer.telemetry.collectives.tally import Tallies
from finetune_trainer.telemetry.slots import Block

MIB = 1 << 20


def value(block: Block, metric: metrics.Metric, *labels: str) -> float:
    return block.numbers[block.place(metric, *labels)]


def counting(block: Block) -> Tallies:
    tallies = Tallies(block)
    tallies.is_counting = True
    return tallies


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_bytes_on_four_ranks(op: str, factor: float) -> None:
    assert bus_factor(op, 4) == factor


def test_sizes_fall_into_three_classes() -> None:
    sizes = (0, MIB - 1, MIB, 32 * MIB - 1, 32 * MIB)
    assert [size_class(size) for size in sizes] == ["small", "small", "medium", "medium", "large"]


def test_bus_bytes_by_seconds_are_the_bandwidth_also_where_some_times_are_not_known() -> None:
    block = Block.private()
    tallies = counting(block)
    tallies.add(Sample("all_reduce", "dp", 4, 1000, seconds=0.5))
    tallies.add(Sample("all_reduce", "dp", 4, 9000))
    labels = ("all_reduce", "dp", "small")
    assert value(block, metrics.COMM_BYTES, *labels) == 10_000
    assert value(block, metrics.COMM_BUS_BYTES, *labels) == 1500
    assert value(block, metrics.COMM_SECONDS, *labels) == 0.5
    tallies.publish_sampled()
    assert value(block, metrics.COMM_SAMPLED, "bytes") == 1.0
    assert value(block, metrics.COMM_SAMPLED, "seconds") == 0.5


def test_a_later_process_of_the_rank_counts_on() -> None:
    block = Block.private()
    for _ in range(2):
        counting(block).add(Sample("all_reduce", "dp", 2, 100, seconds=1.0))
    labels = ("all_reduce", "dp", "small")
    assert value(block, metrics.COMM_CALLS, *labels) == 2
    assert value(block, metrics.COMM_SECONDS, *labels) == 2.0


def test_a_kind_too_many_is_missing_and_said_to_be() -> None:
    block = Block.private()
    tallies = counting(block)
    kinds = [(op, group) for op in metrics.COLLECTIVE_OPS for group in ("dp", "shard")]
    assert len(kinds) == metrics.MOST_KINDS + 2
    for op, group in kinds:
        tallies.add(Sample(op, group, 2, 8))
    tallies.publish_sampled()
    ratio = value(block, metrics.COMM_SAMPLED, "bytes")
    assert ratio == metrics.MOST_KINDS / len(kinds)
