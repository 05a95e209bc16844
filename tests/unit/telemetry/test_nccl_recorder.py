"""What is made of NCCL's flight recorder: every collective once, and what is missing said.

The answers are written by hand (`nccl_dumps`): no test here has seen NCCL.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import pytest

from finetune_trainer.config import StrategyConfig, metrics
from finetune_trainer.telemetry.collectives.dump import UnknownDumpError, read_dump
from finetune_trainer.telemetry.collectives.flight_recorder import (
    MAX_TIME_SHARE,
    FlightRecorder,
    recorder_of_nccl,
)
from finetune_trainer.telemetry.collectives.groups import GroupNames
from finetune_trainer.telemetry.collectives.tally import Tallies
from finetune_trainer.telemetry.slots import Block
from support.telemetry.nccl_dumps import RANKS, Entry, dump, entry, pg_config


class Rank:
    """A rank with a recorder that answers what a test says, at a time that a test says."""

    def __init__(self, strategy: str = "ddp") -> None:
        self.now = 0.0
        self.seconds_of_a_ring = 0.0
        self.rings_read = 0
        self.answer = dump([])
        self.warnings: list[str] = []
        self._block = Block.private()
        self._tallies = Tallies(self._block)
        names = GroupNames(StrategyConfig.model_validate({"type": strategy}))
        self._source = FlightRecorder(
            self._block,
            self._tallies,
            names,
            recorder=self._record,
            warn=self.warnings.append,
            clock=lambda: self.now,
        )
        self._tallies.is_counting = True

    def _record(self, with_ring: bool) -> bytes:
        self.rings_read += with_ring
        self.now += self.seconds_of_a_ring if with_ring else 0.0
        return self.answer

    def sees(self, entries: Sequence[Entry], **changes: Any) -> None:
        """Read a ring with these entries, long after the last one."""
        self.answer = dump(entries, **changes)
        self.now += 3600
        self.read()

    def read(self) -> None:
        self._source.read()
        self._tallies.publish_sampled()

    def value(self, metric: metrics.Metric, *labels: str) -> float | None:
        found = self._block.numbers[self._block.place(metric, *labels)]
        return None if found != found else found


@pytest.mark.parametrize(
    ("recorded", "given", "gotten", "op", "num_bytes"),
    [
        ("all_reduce", [1000], [1000], "all_reduce", 4000),
        ("_all_gather_base", [250], [1000], "all_gather", 4000),
        ("all_gather_single", [250], [1000], "all_gather", 4000),
        ("_reduce_scatter_base", [1000], [250], "reduce_scatter", 4000),
        ("reduce_scatter_single", [1000], [250], "reduce_scatter", 4000),
        ("broadcast", [1000], [1000], "broadcast", 4000),
        ("_broadcast_oop", [1000], [1000], "broadcast", 4000),
        ("reduce", [1000], [1000], "reduce", 4000),
        ("gather", [250], [1000], "gather", 4000),
        ("scatter", [250], [1000], "scatter", 4000),
        ("all_to_all", [1000], [1000], "all_to_all", 4000),
    ],
)
def test_a_collective_is_counted_by_what_was_asked_for(
    recorded: str, given: list[int], gotten: list[int], op: str, num_bytes: int
) -> None:
    rank = Rank()
    rank.sees([entry(0, recorded, given, gotten, duration_ms=2.5)])
    assert rank.value(metrics.COMM_CALLS, op, "dp", "small") == 1
    assert rank.value(metrics.COMM_BYTES, op, "dp", "small") == num_bytes
    assert rank.value(metrics.COMM_SECONDS, op, "dp", "small") == 0.0025
    assert rank.value(metrics.COMM_EXPOSED, op, "dp", "small") is None


def test_tensors_that_travel_together_are_one_collective() -> None:
    rank = Rank("fsdp")
    together = {"collective_seq_id": 7, "retired": False}
    rank.sees(
        [
            entry(0, "all_gather_into_tensor_coalesced", [8], [32], **together),
            entry(1, "all_gather_into_tensor_coalesced", [2], [8], **together),
            entry(2, "coalesced", [], [], collective_seq_id=7, duration_ms=1.0,
                  input_sizes=[], input_dtypes=[], output_sizes=[], output_dtypes=[]),
        ]
    )  # fmt: skip
    assert rank.value(metrics.COMM_CALLS, "all_gather", "shard", "small") == 1
    assert rank.value(metrics.COMM_BYTES, "all_gather", "shard", "small") == 4 * 10 * RANKS
    assert rank.value(metrics.COMM_SECONDS, "all_gather", "shard", "small") == 0.001


def test_without_timing_there_are_no_seconds() -> None:
    rank = Rank()
    rank.sees([entry(0, "all_reduce", [1000], [1000])])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 1
    assert rank.value(metrics.COMM_SECONDS, "all_reduce", "dp", "small") is None
    assert rank.value(metrics.COMM_BUS_BYTES, "all_reduce", "dp", "small") is None
    assert rank.value(metrics.COMM_SAMPLED, "bytes") == 1.0
    assert rank.value(metrics.COMM_SAMPLED, "seconds") == 0.0


def test_each_is_counted_once_when_it_is_over() -> None:
    rank = Rank()
    first, second = (entry(i, "all_reduce", [1], [1]) for i in (0, 1))
    rank.sees([first | {"retired": False}, second])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 1
    rank.sees([first, second])
    rank.sees([first, second])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 2


def test_what_was_overwritten_is_said_to_be_missing() -> None:
    rank = Rank()
    rank.sees([entry(i, "all_reduce", [1], [1]) for i in range(4)])
    rank.sees([entry(i, "all_reduce", [1], [1]) for i in range(8, 12)])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 8
    assert rank.value(metrics.COMM_SAMPLED, "bytes") == 8 / 12


def test_a_type_of_unknown_width_is_missing_and_not_guessed() -> None:
    rank = Rank()
    known = entry(0, "all_reduce", [1], [1])
    rank.sees([known, entry(1, "all_reduce", [1], [1], input_dtypes=["Float4_e2m1fn_x2"])])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 1
    assert rank.value(metrics.COMM_SAMPLED, "bytes") == 0.5


def test_a_group_whose_ranks_are_not_noted_is_missing_and_not_guessed() -> None:
    rank = Rank()
    rank.sees([entry(0, "all_reduce", [1], [1])], pg_config={})
    rank.sees([entry(1, "all_reduce", [1], [1])])
    assert rank.value(metrics.COMM_SAMPLED, "bytes") == 0.5


def test_a_recorder_that_was_emptied_counts_on() -> None:
    rank = Rank()
    rank.sees([entry(i, "all_reduce", [1], [1]) for i in range(5)])
    rank.sees([entry(i, "all_reduce", [1], [1]) for i in range(2)])
    assert rank.value(metrics.COMM_CALLS, "all_reduce", "dp", "small") == 7
    assert rank.value(metrics.COMM_SAMPLED, "bytes") == 1.0


def test_barriers_messages_and_groups_of_one_rank_are_not_counted() -> None:
    rank = Rank()
    alone = ("3", "mesh_replica")
    rank.sees(
        [
            entry(0, "all_reduce_barrier", [1], [1]),
            entry(1, "send 0->1", [1], [1], is_p2p=True),
            entry(2, "all_reduce", [1], [1], process_group=alone, pg_id=3),
            entry(3, "all_reduce", [1], [1], process_group=("9", "a stranger's"), pg_id=9),
        ],
        pg_config=pg_config({("0", "default_pg"): RANKS, alone: 1, ("9", "a stranger's"): 4}),
    )
    assert rank.value(metrics.COMM_SAMPLED, "bytes") is None


def test_groups_of_a_mesh_have_their_names_and_numbers() -> None:
    rank = Rank("fsdp")
    shard, replica = ("1", "mesh_shard"), ("2", "mesh_replica")
    status = {
        "1": {"last_enqueued_collective": 9, "last_completed_collective": 7},
        "2": {"last_enqueued_collective": 4, "last_completed_collective": -1},
    }
    rank.sees(
        [
            entry(0, "_all_gather_base", [8], [16], process_group=shard, pg_id=1, duration_ms=1.0),
            entry(1, "all_reduce", [8], [8], process_group=replica, pg_id=2, duration_ms=1.0),
        ],
        pg_config=pg_config({shard: 2, replica: 2}),
        pg_status=status,
    )
    assert rank.value(metrics.COMM_BYTES, "all_gather", "shard", "small") == 64
    assert rank.value(metrics.COMM_BUS_BYTES, "all_gather", "shard", "small") == 32
    assert rank.value(metrics.COMM_BUS_BYTES, "all_reduce", "replica", "small") == 32
    found = [
        (rank.value(metrics.COMM_ENQUEUED, name), rank.value(metrics.COMM_COMPLETED, name))
        for name in ("shard", "replica")
    ]
    assert found == [(9, 7), (4, 0)]


def test_reading_the_ring_takes_no_more_than_its_share_of_the_time() -> None:
    rank = Rank()
    rank.seconds_of_a_ring = 0.02
    while rank.now < 1000:
        rank.now += 0.25
        rank.read()
    assert 0 < rank.rings_read * rank.seconds_of_a_ring / rank.now <= MAX_TIME_SHARE


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(dump([], version="3.0"), id="another version"),
        pytest.param(pickle.dumps({"version": "2.10"}), id="fields that are missing"),
        pytest.param(pickle.dumps(["2.10"]), id="another form"),
        pytest.param(dump([])[:20], id="cut off"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"{}", id="JSON"),
        pytest.param(dump([{"record_id": 0}]), id="an entry without fields"),
    ],
)
def test_a_recorder_that_is_not_known_is_one_warning_and_no_series(answer: bytes) -> None:
    rank = Rank()
    rank.answer = answer
    for _ in range(3):
        rank.now += 3600
        rank.read()
    assert len(rank.warnings) == 1
    assert "training continues" in rank.warnings[0]
    assert rank.rings_read == 1
    assert rank.value(metrics.COMM_SAMPLED, "bytes") is None


def test_a_minor_version_may_add_fields() -> None:
    found = read_dump(dump([entry(0, "all_reduce", [1], [1], flow_id=1)], version="2.11", more=1))
    assert len(found.collectives) == 1


def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(UnknownDumpError, match="this build of torch has no flight recorder"):
        recorder_of_nccl()(True)
