"""What the collectives of a step come to, by what ranks of gloo have counted.

Bytes are those of docs/reference/collectives.md, exactly.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import metrics
from finetune_trainer.telemetry.collectives.sample import bus_factor
from support.strategies.counted_steps import COUNTED, PHASE, Counts, count_steps, of
from support.strategies.parity import Case, build_model

MICRO_BATCHES = 2
WIDTH = 4  # bytes of a parameter in fp32
LOSS = 8  # bytes of the sum of losses, which is fp64 here
NORM = 4
KEPT_WHOLE = 100_000  # elements of the largest tensor that ZeRO-3 keeps on every rank

Bytes = dict[tuple[str, str], int]
"""Of a step, by operation and group."""

_FSDP: dict[str, Any] = {"type": "fsdp", "reduce_each_micro_batch": False}
_KEEPS: dict[str, Any] = {**_FSDP, "reshard_after_forward": False}
_RESHARDS: dict[str, Any] = {**_FSDP, "reshard_after_forward": True}
TORCH = [
    Case("ddp", {"type": "ddp"}),
    Case("fsdp", _KEEPS),
    Case("fsdp resharding", _RESHARDS),
    Case("fsdp resharding, lora", _RESHARDS, method="lora"),
]
REPLICAS = Case("fsdp in replicas", {**_RESHARDS, "replicas": 2})
DEEPSPEED = [
    Case("zero1", {"type": "zero1"}),
    Case("zero2", {"type": "zero2"}),
    Case("zero3", {"type": "zero3"}),
    Case("zero3, lora", {"type": "zero3"}, method="lora"),
    Case("zero3, large tensors", {"type": "zero3"}, hidden_size=320),
]


def expected(case: Case, num_ranks: int) -> Bytes:
    """Return what the reference says of a step."""
    named = build_model(case).named_parameters()
    sizes = [(name, WIDTH * one.numel(), one.requires_grad) for name, one in named]
    whole = sum(size for _, size, _ in sizes)
    layers = sum(size for name, size, _ in sizes if ".layers." in name)
    trained = sum(size for _, size, is_trained in sizes if is_trained)
    large = sum(size for _, size, _ in sizes if size > WIDTH * KEPT_WHOLE)
    kind, norms = case.strategy["type"], NORM * (1 if case.method == "lora" else 2)
    if kind == "ddp":
        return {("all_reduce", "dp"): trained + LOSS}
    if kind == "zero1":
        return {("all_reduce", "dp"): trained + LOSS + norms, ("all_gather", "dp"): trained}
    if kind == "zero2":
        return {
            ("all_reduce", "dp"): MICRO_BATCHES * trained + LOSS + norms,
            ("all_gather", "dp"): trained,
        }
    if kind == "zero3":
        return {
            ("all_reduce", "dp"): LOSS + 2 * norms,
            ("reduce_scatter", "dp"): MICRO_BATCHES * trained,
            ("all_gather", "dp"): whole + (MICRO_BATCHES - 1) * large,
        }
    gathered = MICRO_BATCHES * (whole + layers) if case.strategy != _KEEPS else whole
    found = {("all_gather", "shard"): gathered, ("reduce_scatter", "shard"): trained}
    if "replicas" not in case.strategy:
        return found | {("all_reduce", "shard"): LOSS + NORM}
    shards = num_ranks // case.strategy["replicas"]
    return found | {
        ("all_reduce", "replica"): trained // shards,
        ("all_reduce", "shard"): NORM,
        ("all_reduce", "dp"): LOSS,
    }


def check(folder: Path, cases: list[Case], num_ranks: int, *, deepspeed: bool = False) -> None:
    """Compare what every rank counts with the formulas, and with each other."""
    cases = [replace(case, rows=2 * MICRO_BATCHES * num_ranks) for case in cases]
    counted = count_steps(folder, cases, world_size=num_ranks, deepspeed=deepspeed)
    for case in cases:
        wanted = expected(case, num_ranks)
        for counts in counted[case.name]:
            assert bytes_of_a_step(counts) == wanted, case.name
            for op, group in wanted:
                is_part = "replicas" in case.strategy and group != "dp"
                size = num_ranks // 2 if is_part else num_ranks
                bus = of(counts, metrics.COMM_BUS_BYTES, op, group)
                whole = bus_factor(op, size) * COUNTED * wanted[op, group]
                if case.strategy["type"] in ("ddp", "fsdp"):
                    assert bus == pytest.approx(whole, rel=1e-12), case.name
                else:  # nobody knows the times of what was over before it was waited for
                    assert 0 < bus <= whole * (1 + 1e-12), case.name
                assert of(counts, metrics.COMM_SECONDS, op, group) > 0
                assert of(counts, metrics.COMM_EXPOSED, op, group) > 0
            for group in {group for _, group in wanted}:
                numbers = {counts[f"{one.name} {group}"] for one in _NEWEST}
                calls = (of(counts, metrics.COMM_CALLS, op, group) for op in metrics.COLLECTIVE_OPS)
                assert numbers == {sum(calls)}, "as many have begun and ended as were counted"
            if case.strategy["type"] != "ddp":  # of which the clock hears when it is over
                waited = (of(counts, metrics.COMM_EXPOSED, op, group) for op, group in wanted)
                assert counts[PHASE] >= sum(waited)


_NEWEST = (metrics.COMM_ENQUEUED, metrics.COMM_COMPLETED)


def bytes_of_a_step(counts: Counts) -> Bytes:
    """Return what one rank counted, but what was nothing."""
    found = {
        (op, group): of(counts, metrics.COMM_BYTES, op, group)
        for op in metrics.COLLECTIVE_OPS
        for group in metrics.GROUPS
    }
    return {key: int(value / COUNTED) for key, value in found.items() if value}


def test_two_ranks_of_torch_move_the_bytes_of_the_reference(tmp_path: Path) -> None:
    check(tmp_path, TORCH, 2)


@pytest.mark.full
def test_four_ranks_of_torch_move_the_bytes_of_the_reference(tmp_path: Path) -> None:
    check(tmp_path, [*TORCH, REPLICAS], 4)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_of_deepspeed_move_the_bytes_of_the_reference(num_ranks: int, tmp_path: Path) -> None:
    check(tmp_path, DEEPSPEED, num_ranks, deepspeed=True)
