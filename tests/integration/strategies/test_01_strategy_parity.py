"""Twenty steps under DDP and FSDP2 against a plain loop in one process: the same mathematics."""

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

DDP = {"type": "ddp"}
RESHARDING = {
    "type": "fsdp",
    "reshard_after_forward": True,
    "reduce_each_micro_batch": False,
    "prefetch": 1,
}
KEEPING = {**RESHARDING, "reshard_after_forward": False, "prefetch": 8}
HYBRID = {"type": "fsdp", "replicas": 2, "reduce_each_micro_batch": False}
FAMILIES = [
    Case("ddp-full", DDP),
    Case("ddp-lora", DDP, method="lora"),
    Case("resharding-full", RESHARDING),
    Case("resharding-lora", RESHARDING, method="lora"),
]
KEPT = [Case("keeping-full", KEEPING), Case("keeping-lora", KEEPING, method="lora")]
SELECTIVE = {"activation_checkpointing": "selective"}
RECOMPUTING = [
    Case(
        f"{name}-{method}-selective", {**strategy, "activation_checkpointing": "selective"}, method
    )
    for name, strategy, method in (
        ("ddp", DDP, "lora"),
        ("resharding", RESHARDING, "lora"),
        ("resharding", RESHARDING, "full"),
    )
]
IN_FP64 = [
    Case(f"{name}-{method}-fp64", strategy, method=method, precision="fp64")
    for name, strategy in (("ddp", DDP), ("resharding", RESHARDING))
    for method in ("full", "lora")
]
POISONED = [
    Case("ddp-poisoned", DDP, poison=(7, 1)),
    Case("resharding-poisoned", RESHARDING, poison=(7, 1)),
    Case("resharding-lora-poisoned", RESHARDING, method="lora", poison=(7, 1)),
]
HYBRIDS = [
    Case("hybrid-full", HYBRID, micro_batch_size=1),
    Case("hybrid-lora", HYBRID, method="lora", micro_batch_size=1),
    Case("hybrid-reducing", {**HYBRID, "reduce_each_micro_batch": True}, micro_batch_size=1),
]

# The first test waits for the launch of most cases, which has a limit of its own.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return train_cases(
        tmp_path_factory.mktemp("others"),
        [*FAMILIES, *KEPT, *RECOMPUTING, *IN_FP64, *POISONED],
        timeout=700,
    )


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in FAMILIES])
def test_each_strategy_gives_the_numbers_of_one_process(case, outcomes):
    within_fp32(outcomes[case.name], expected(case.method))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in KEPT])
def test_layers_that_stay_gathered_change_no_number(case, outcomes):
    within_fp32(outcomes[case.name], expected(case.method))


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in RECOMPUTING])
def test_selective_recomputation_changes_no_number(case, outcomes):
    within_fp32(outcomes[case.name], expected(case.method))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in IN_FP64])
def test_in_fp64_nothing_is_left_but_rounding(case, outcomes):
    loss, norm, weights = worst_differences(outcomes[case.name], reference(case))
    assert loss <= 1e-9
    assert norm <= 1e-9
    assert weights <= 1e-9


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in POISONED])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(case, outcomes):
    within_fp32(outcomes[case.name], reference(case))


@pytest.mark.full
def test_four_ranks_in_two_replicas_give_the_numbers_of_one_process(tmp_path: Path):
    found = train_cases(tmp_path, HYBRIDS, world_size=4)
    for case in HYBRIDS:
        within_fp32(found[case.name], expected(case.method))
