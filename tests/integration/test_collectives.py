"""What the collectives of a step come to, by what ranks of gloo have counted.

Bytes are those of docs/reference/collectives.md, exactly. Each case makes two micro-batches a step.
"""

from pathlib import Path
from typing import Any

import pytest

from counted_steps import COUNTED, Counts, count_steps, of
from finetune_trainer.config import metrics
from finetune_trainer.telemetry.collectives.sample import bus_factor
from parity import Case, build_model

MICRO_BATCHES = 2
WIDTH = 4  # bytes of a parameter in fp32
LOSS = 8  # bytes of the sum of losses, which is fp64 here
NORM = 4

Bytes = dict[tuple[str, str], int]
"""Of a step, by operation and group."""


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"type": "ddp"},
    "fsdp": {"type": "fsdp", "reshard_after_forward": False},
    "fsdp resharding": {"type": "fsdp", "reshard_after_forward": True},
    "fsdp in replicas": {"type": "fsdp", "replicas": 2, "reshard_after_forward": True},
    **{f"zero{stage}": {"type": f"zero{stage}"} for stage in (1, 2, 3)},
}


def case(name: str, num_ranks: int) -> Case:
    """Return a case with two micro-batches of two rows on each rank."""
    return Case(name, STRATEGIES[name], rows=2 * MICRO_BATCHES * num_ranks)


def sizes() -> tuple[int, int]:
    """Return the bytes of all parameters, and of those of the decoder layers."""
    named = dict(build_model(Case("", {})).named_parameters())
    whole = sum(p.numel() for p in named.values())
    return WIDTH * whole, WIDTH * sum(p.numel() for n, p in named.items() if ".layers." in n)


def expected(name: str, num_ranks: int) -> Bytes:
    """Return what the reference says of a step."""
    whole, layers = sizes()
    gathered_again = MICRO_BATCHES * (whole - layers + 2 * layers)
    of_strategy: dict[str, Bytes] = {
        "ddp": {("all_reduce", "dp"): whole + LOSS},
        "fsdp": {
            ("all_gather", "shard"): whole,
            ("reduce_scatter", "shard"): whole,
            ("all_reduce", "shard"): LOSS + NORM,
        },
        "fsdp resharding": {
            ("all_gather", "shard"): gathered_again,
            ("reduce_scatter", "shard"): whole,
            ("all_reduce", "shard"): LOSS + NORM,
        },
        "fsdp in replicas": {
            ("all_gather", "shard"): gathered_again,
            ("reduce_scatter", "shard"): whole,
            ("all_reduce", "replica"): whole // (num_ranks // 2),
            ("all_reduce", "shard"): NORM,
            ("all_reduce", "dp"): LOSS,
        },
        "zero1": {("all_reduce", "dp"): whole + LOSS + 8, ("all_gather", "dp"): whole},
        "zero2": {
            ("all_reduce", "dp"): MICRO_BATCHES * whole + LOSS + 8,
            ("all_gather", "dp"): whole,
        },
        "zero3": {
            ("all_reduce", "dp"): LOSS + 16,
            ("reduce_scatter", "dp"): MICRO_BATCHES * whole,
            ("all_gather", "dp"): whole,
        },
    }
    return of_strategy[name]


def bytes_of_a_step(counts: Counts) -> Bytes:
    """Return what one rank counted, but what was nothing."""
    found = {
        (op, group): of(counts, metrics.COMM_BYTES, op, group)
        for op in metrics.COLLECTIVE_OPS
        for group in metrics.GROUPS
    }
    return {key: int(value / COUNTED) for key, value in found.items() if value}


def check(ranks: list[Counts], name: str) -> None:
    """Compare every rank with the formulas, and what follows from bytes with bytes."""
    for counts in ranks:
        found = bytes_of_a_step(counts)
        assert found == expected(name, len(ranks)), name
        for op, group in found:
            size = 2 if (group in ("shard", "replica") and "replicas" in name) else len(ranks)
            factor = bus_factor(op, size)
            bus = of(counts, metrics.COMM_BUS_BYTES, op, group)
            assert bus == pytest.approx(factor * COUNTED * found[op, group], rel=1e-12)
            assert of(counts, metrics.COMM_SECONDS, op, group) > 0
            assert of(counts, metrics.COMM_EXPOSED, op, group) > 0
            for metric in (metrics.COMM_ENQUEUED, metrics.COMM_COMPLETED):
                # Besides those counted above there are no more than the strategies ask for.
                assert counts[f"{metric.name} {group}"] == sum(
                    of(counts, metrics.COMM_CALLS, one, group) for one in metrics.COLLECTIVE_OPS
                )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ddp_and_fsdp_move_the_bytes_of_the_reference(num_ranks: int, tmp_path: Path) -> None:
    names = ["ddp", "fsdp", "fsdp resharding"]
    if num_ranks == 4:
        names.append("fsdp in replicas")
    cases = [case(name, num_ranks) for name in names]
    for name, ranks in count_steps(tmp_path, cases, world_size=num_ranks).items():
        check(ranks, name)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_zero_moves_the_bytes_of_the_reference(num_ranks: int, tmp_path: Path) -> None:
    cases = [case(f"zero{stage}", num_ranks) for stage in (1, 2, 3)]
    found = count_steps(tmp_path, cases, world_size=num_ranks, deepspeed=True)
    for name, ranks in found.items():
        check(ranks, name)
