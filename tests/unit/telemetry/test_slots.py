"""A rank's block of numbers: one process writes it, another reads it, and a later one goes on."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer.config import metrics
from finetune_trainer.config.metrics import Label, Metric, MetricType
from finetune_trainer.telemetry.slots import Block, Layout, layout_of_node

STEPS = layout_of_node().place(metrics.STEPS)


def test_a_fresh_block_has_counters_at_0_and_gauges_that_are_not_known(tmp_path: Path) -> None:
    numbers = Block.open(tmp_path / "block").numbers
    assert numbers[STEPS] == 0
    assert math.isnan(numbers[layout_of_node().place(metrics.LOSS)])


def test_what_one_writes_another_reads(tmp_path: Path) -> None:
    written = Block.open(tmp_path / "block")
    read = Block.find(tmp_path / "block")
    written.slot(metrics.STEPS).add(2)
    written.slot(metrics.LOSS).set(0.25)
    assert read is not None
    assert (read.numbers[STEPS], read.numbers[layout_of_node().place(metrics.LOSS)]) == (2, 0.25)


def test_counters_go_on_where_the_process_before_left_them(tmp_path: Path) -> None:
    Block.open(tmp_path / "block").slot(metrics.STEPS).add(5)
    again = Block.open(tmp_path / "block")
    again.slot(metrics.STEPS).add(1)
    assert again.numbers[STEPS] == 6


def test_a_histogram_counts_a_value_on_a_bound_below_it(tmp_path: Path) -> None:
    block = Block.open(tmp_path / "block")
    first, second, *_ = metrics.STEP_DURATION.buckets
    for value in (first, second, 1e9):
        block.histogram(metrics.STEP_DURATION).observe(value)
    at, size = layout_of_node().place(metrics.STEP_DURATION), len(metrics.STEP_DURATION.buckets)
    *counts, total = block.numbers[at : at + size + 2]
    assert counts == [1, 1, *[0] * (size - 2), 1]
    assert total == first + second + 1e9


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(layout_of_node().fresh()[:100], id="half of one"),
        pytest.param(bytes(layout_of_node().num_bytes), id="zeros"),
        pytest.param(layout_of_node().fresh() + b"more", id="longer"),
        pytest.param(b"FTSLOTS0" + layout_of_node().fresh()[8:], id="another version"),
        pytest.param(b"FTSLOTS1" + bytes(8) + layout_of_node().fresh()[16:], id="other metrics"),
    ],
)
def test_what_is_no_block_of_this_version_is_not_read_and_is_replaced(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "block"
    path.write_bytes(content)
    assert Block.find(path) is None
    assert Block.open(path).numbers[STEPS] == 0
    assert Block.find(path) is not None


def test_a_block_is_not_there_before_it_is_made(tmp_path: Path) -> None:
    assert Block.find(tmp_path / "block") is None


def test_another_bucket_is_another_layout() -> None:
    def layout(*buckets: float) -> Layout:
        return Layout(
            [Metric("a_seconds", MetricType.HISTOGRAM, "seconds", "A.", (Label("rank"),), buckets)]
        )

    assert layout(1, 2).head == layout(1, 2).head
    assert layout(1, 2).head != layout(1, 3).head


def test_a_value_that_is_not_declared_has_no_place() -> None:
    with pytest.raises(KeyError):
        layout_of_node().place(metrics.TOKENS, "prompt")


COUNT_FOR_EVER = """
import sys
from pathlib import Path
from finetune_trainer.config import metrics
from finetune_trainer.telemetry.slots import Block
steps = Block.open(Path(sys.argv[1])).slot(metrics.STEPS)
while True:
    steps.add(1)
"""


def test_a_counter_never_falls_for_a_reader_nor_over_the_death_of_its_writer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "block"
    seen = [0.0]

    def read_until(goal: float) -> None:
        while seen[-1] < goal:
            block = Block.find(path)
            if block is not None:
                values = [block.numbers[STEPS] for _ in range(1000)]
                assert [seen[-1], *values] == sorted([seen[-1], *values])
                seen.append(values[-1])

    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", COUNT_FOR_EVER, str(path)])
        try:
            read_until(seen[-1] + 200_000)
        finally:
            writer.kill()
            writer.wait()
