"""Twenty steps under ZeRO against a plain loop in one process: the same mathematics.

Apart from the other strategies, as DeepSpeed chooses the accelerator once for a whole process.
"""

import pytest

from parity import Case, Outcome, at_seeds, reference, train_cases, within_fp32, worst_differences

SEEDS = 5
METHODS = ("full", "lora")
STAGES = [
    Case(f"zero{stage}-{method}", {"type": f"zero{stage}"}, method=method)
    for stage in (1, 2, 3)
    for method in METHODS
]
OFFLOADED = [
    Case(f"{kind}-offload-{offload}-{method}", {"type": kind, "offload": offload}, method=method)
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

# The first test waits for all launches, each of which has a limit of its own.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    seeded = [case for family in STAGES for case in at_seeds(family, SEEDS)]
    cases = [*seeded, *OFFLOADED, *POISONED, *NARROW]
    environ = {"DS_ACCELERATOR": "cpu"}
    folder = tmp_path_factory.mktemp("parity")
    found = train_cases(folder, cases, environ=environ, timeout=700)
    return {case.name: outcome for case, outcome in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], Outcome]:
    return {
        (m, s): reference(Case("", {}, method=m, seed=s)) for m in METHODS for s in range(SEEDS)
    }


@pytest.mark.parametrize("family", [pytest.param(case, id=case.name) for case in STAGES])
def test_every_seed_gives_the_numbers_of_one_process(family, outcomes, expected):
    for case in at_seeds(family, SEEDS):
        within_fp32(outcomes[case.name], expected[case.method, case.seed])


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in OFFLOADED])
def test_what_leaves_the_device_changes_no_number(case, outcomes, expected):
    within_fp32(outcomes[case.name], expected[case.method, 0])


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in POISONED])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(case, outcomes):
    within_fp32(outcomes[case.name], reference(case))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in NARROW])
def test_bf16_stays_close_to_fp32(case, outcomes, expected):
    loss, norm, _ = worst_differences(outcomes[case.name], expected["full", 0])
    assert 0 < loss <= 5e-3
    assert norm <= 5e-2
