"""Twenty steps under DDP and FSDP2 against a plain loop in one process: the same mathematics."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from parity import Case, Outcome, at_seeds, reference, train_cases, within_fp32, worst_differences

SEEDS = [
    pytest.param((0,), id="first seed"),
    pytest.param((1, 2, 3, 4), id="other seeds", marks=pytest.mark.full),
]
DDP = {"type": "ddp"}
RESHARDING = {"type": "fsdp", "reshard_after_forward": True}
KEEPING = {"type": "fsdp", "reshard_after_forward": False}
HYBRID = {"type": "fsdp", "replicas": 2}
FAMILIES = [
    Case("ddp-full", DDP),
    Case("ddp-lora", DDP, method="lora"),
    Case("resharding-full", RESHARDING),
    Case("resharding-lora", RESHARDING, method="lora"),
]
KEPT = [Case("keeping-full", KEEPING), Case("keeping-lora", KEEPING, method="lora")]
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
]

# The first test waits for the launch of most cases, which has a limit of its own.
pytestmark = pytest.mark.timeout(900)


def trained(folder: Path, cases: Sequence[Case]) -> dict[str, Outcome]:
    found = train_cases(folder, cases, timeout=700)
    return {case.name: outcome for case, outcome in zip(cases, found, strict=True)}


@cache
def expected(method: str, seed: int = 0) -> Outcome:
    return reference(Case("", {}, method=method, seed=seed))


@pytest.fixture(scope="module", params=SEEDS)
def seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@pytest.fixture(scope="module")
def seeded(seeds: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    cases = [case for family in FAMILIES for case in at_seeds(family, seeds)]
    return trained(tmp_path_factory.mktemp("seeded"), cases)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return trained(tmp_path_factory.mktemp("others"), [*KEPT, *IN_FP64, *POISONED])


@pytest.mark.parametrize("family", [pytest.param(case, id=case.name) for case in FAMILIES])
def test_every_seed_gives_the_numbers_of_one_process(family, seeds, seeded):
    for case in at_seeds(family, seeds):
        within_fp32(seeded[case.name], expected(case.method, case.seed))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in KEPT])
def test_layers_that_stay_gathered_change_no_number(case, outcomes):
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
    for case, found in zip(HYBRIDS, train_cases(tmp_path, HYBRIDS, world_size=4), strict=True):
        within_fp32(found, expected(case.method))
