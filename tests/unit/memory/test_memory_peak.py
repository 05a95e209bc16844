"""The formula of a step's memory, held against a trace of the trainer's own step in fake tensors.

The ruler itself is held against torch's allocator on real steps.
"""

from pathlib import Path

import pytest

from support.memory.memory_setups import REAL, SETUPS, SHORT, Setup, compare
from support.memory.memory_trace import allocated_step, by_sdpa, trace_step
from support.model import grids


@pytest.mark.parametrize("setup", [pytest.param(one, id=one.name) for one in SHORT])
def test_the_formula_is_the_trace_of_a_few_layers(setup: Setup, tmp_path: Path) -> None:
    traced, peak = compare(setup, tmp_path)
    assert peak.static == pytest.approx(traced.at_rest, rel=0.01)
    assert -0.05 <= peak.nbytes / traced.peak - 1 <= 0.12


@pytest.mark.skipif(not grids.IS_WHOLE, reason="takes minutes: make grids")
def test_the_formula_is_the_trace_of_twelve_configurations(tmp_path: Path) -> None:
    off = []
    for setup in SETUPS:
        traced, peak = compare(setup, tmp_path)
        assert peak.static == pytest.approx(traced.at_rest, rel=0.01), setup.name
        off.append(peak.nbytes / traced.peak - 1)
        assert -0.05 <= off[-1] <= 0.12, setup.name
    assert sum(map(abs, off)) / len(off) <= 0.05


@pytest.mark.parametrize("setup", [pytest.param(one, id=one.name) for one in REAL])
def test_the_trace_is_what_the_allocator_counts_in_a_real_step(
    setup: Setup, tmp_path: Path
) -> None:
    settings, tokens, changes = setup.settings(), setup.tokens, setup.changes()
    traced = trace_step(tmp_path, settings, tokens=tokens, as_on=by_sdpa, **changes)
    real = allocated_step(tmp_path, settings, tokens=tokens, **changes)
    # Of the step before, the trace still has its inputs.
    assert traced.at_rest == pytest.approx(real.at_rest, rel=0.001)
    assert traced.peak == pytest.approx(real.peak, rel=0.05)
