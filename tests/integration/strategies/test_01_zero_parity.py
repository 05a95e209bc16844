"""Twenty steps under ZeRO against a plain loop in one process: the same mathematics."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.strategies.parity import (
    Case,
    Outcome,
    expected,
    reference,
    train_cases,
    within_fp32,
    worst_differences,
)

METHODS = ("full", "lora")
STAGES = [
    Case(f"zero{stage}-{method}", {"type": f"zero{stage}"}, method=method)
    for stage in (1, 2, 3)
    for method in METHODS
]
OFFLOADED = [
    Case(f"{kind}-{offload}-{method}", {"type": kind, "offload": offload}, method=method)
    for kind, offload in (("zero2", "optimizer"), ("zero3", "cpu"))
    for method in METHODS
]
POISONED = [
    Case("zero1-poisoned", {"type": "zero1"}, poison=(7, 1)),
    Case("zero2-offload-poisoned", {"type": "zero2", "offload": "optimizer"}, poison=(7, 0)),
    Case("zero3-poisoned", {"type": "zero3"}, poison=(7, 1)),
]
NARROW = [
    Case(f"zero{stage}-bf16", {"type": f"zero{stage}"}, precision="bf16") for stage in (1, 2, 3)
]
RECOMPUTING = [
    Case(
        f"{kind}-{method}-selective",
        {"type": kind, "activation_checkpointing": "selective"},
        method,
    )
    for kind, method in (("zero2", "full"), ("zero3", "lora"), ("zero3", "full"))
]

# The first test waits for all launches, each of which has a limit of its own.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return train(tmp_path_factory.mktemp("stages"), STAGES)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = [*OFFLOADED, *POISONED, *NARROW, *RECOMPUTING]
    return train(tmp_path_factory.mktemp("others"), cases)


def train(folder: Path, cases: Sequence[Case]) -> dict[str, Outcome]:
    return train_cases(folder, cases, timeout=700, deepspeed=True)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in STAGES])
def test_each_stage_gives_the_numbers_of_one_process(case, stages):
    within_fp32(stages[case.name], expected(case.method))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RECOMPUTING])
def test_selective_recomputation_changes_no_number(case, outcomes):
    within_fp32(outcomes[case.name], expected(case.method))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OFFLOADED])
def test_what_leaves_the_device_changes_no_number(case, outcomes):
    within_fp32(outcomes[case.name], expected(case.method))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in POISONED])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(case, outcomes):
    within_fp32(outcomes[case.name], reference(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in NARROW])
def test_bf16_stays_close_to_fp32(case, outcomes):
    loss, norm, _ = worst_differences(outcomes[case.name], expected("full"))
    assert 0 < loss <= 5e-3
    assert norm <= 5e-2
