"""The same step by one, two or four ranks, whose shares of the tokens are very uneven."""

from pathlib import Path

import pytest
import torch

from finetune_trainer.world import World
from support.strategies.parity import Case, reference, train_case, train_cases, within_fp32

CASES = [
    Case("ddp", {"type": "ddp"}, micro_batch_size=1, steps=10),
    Case("fsdp", {"type": "fsdp"}, micro_batch_size=1, steps=10),
]


def test_one_rank_gives_the_numbers_of_a_plain_loop(tmp_path: Path) -> None:
    world = World(0, 0, 1, torch.device("cpu"))
    within_fp32(train_case(CASES[0], tmp_path, world), reference(CASES[0]))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_any_number_of_ranks_gives_the_numbers_of_a_plain_loop(
    world_size: int, tmp_path: Path
) -> None:
    expected = reference(CASES[0])
    for found in train_cases(tmp_path, CASES, world_size=world_size).values():
        within_fp32(found, expected)
