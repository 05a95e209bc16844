"""The same step in one, two, four or eight parts: only the memory it takes may differ."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finetune_trainer.world import World
from support.strategies.parity import Case, Outcome, reference, train_case, train_cases, within_fp32

UNREDUCED = {"type": "fsdp", "reduce_each_micro_batch": False}
ALONE = Case("alone", {"type": "ddp"}, rows=8, steps=10)
SHARED = [
    Case("ddp", {"type": "ddp"}, rows=16, steps=10),
    Case("resharding", {**UNREDUCED, "reshard_after_forward": True}, rows=16, steps=10),
    Case("keeping", {**UNREDUCED, "reshard_after_forward": False}, rows=16, steps=10),
    Case("reducing", {"type": "fsdp", "reduce_each_micro_batch": True}, rows=16, steps=10),
]
MICRO_BATCH_SIZES = [1, *(pytest.param(size, marks=pytest.mark.full) for size in (8, 4, 2))]


def divided(case: Case, size: int) -> Case:
    return replace(case, name=f"{case.name}-{size}", micro_batch_size=size)


@pytest.fixture(scope="module", params=MICRO_BATCH_SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def outcomes(size: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = [divided(case, size) for case in SHARED]
    return train_cases(tmp_path_factory.mktemp("accumulation"), cases)


def test_one_process_accumulates_to_the_same_numbers(size: int, tmp_path: Path) -> None:
    world = World(0, 0, 1, torch.device("cpu"))
    found = train_case(divided(ALONE, size), tmp_path, world)
    within_fp32(found, reference(ALONE))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in SHARED])
def test_two_ranks_accumulate_to_the_same_numbers(
    case: Case, size: int, outcomes: dict[str, Outcome]
) -> None:
    within_fp32(outcomes[divided(case, size).name], reference(case))
