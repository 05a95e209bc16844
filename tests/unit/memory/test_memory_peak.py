"""The formula of a step's memory, held against a trace of the trainer's own step in fake tensors.

The ruler itself is held against torch's allocator on real steps.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from accuracy_table import record

from finetune_trainer.sizing.peak import step_peak
from support.memory.family_setups import (
    DENSE,
    EXPERTS,
    KEEPS_SCORES,
    OTHER_ATTENTION_ON_A_CPU,
    family_settings,
)
from support.memory.memory_setups import FSDP, REAL, SETUPS, SHORT, Setup, compare
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


TOKENS = 1024


def error_of(
    folder: Path, name: str, method: str, recompute: str, *, ranks: int = 1, dropout: float = 0.0
) -> float:
    """Return the relative error of the formula's peak against the trace."""
    is_full = method == "full"
    traced = trace_step(
        folder,
        family_settings(name),
        tokens=TOKENS,
        world={"nproc_per_node": ranks},
        method={"type": method, **({} if is_full else {"lora": {"r": 16, "dropout": dropout}})},
        output={"format": "merged" if is_full else "adapter"},
        strategy={
            **(FSDP if ranks > 1 else {"type": "ddp"}),
            "activation_checkpointing": recompute,
        },
        training={"precision": "bf16", "global_batch_size": ranks},
    )
    keeps_scores = name in KEEPS_SCORES
    peak = step_peak(traced.shape, traced.config, tokens=TOKENS, keeps_scores=keeps_scores)
    assert peak.static == pytest.approx(traced.at_rest, rel=0.01)
    return peak.nbytes / traced.peak - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "method", "recompute"),
    [
        pytest.param("phi3", "lora", "none", id="phi3, LoRA"),
        pytest.param("gpt2", "full", "none", id="gpt2, full"),
        pytest.param("gemma2", "lora", "none", id="gemma2 with scores, LoRA"),
        pytest.param("mixtral", "lora", "none", id="mixtral with merged experts, LoRA"),
        pytest.param("qwen2_moe", "lora", "none", id="qwen2_moe with frozen experts, LoRA"),
        pytest.param("gpt_oss", "lora", "none", id="gpt_oss with scores, LoRA"),
    ],
)
def test_the_formula_is_the_trace_of_a_family(
    name: str, method: str, recompute: str, tmp_path: Path
) -> None:
    assert -0.04 <= error_of(tmp_path, name, method, recompute) <= 0.12


def test_the_formula_counts_the_dropout_of_adapters(tmp_path: Path) -> None:
    assert error_of(tmp_path, "llama", "lora", "none", dropout=0.1) == pytest.approx(0, abs=0.03)


@pytest.mark.full
def test_the_formula_is_the_trace_of_sharded_experts(tmp_path: Path) -> None:
    assert -0.06 <= error_of(tmp_path, "qwen3_moe", "lora", "selective", ranks=8) <= 0.12


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not grids.IS_WHOLE, reason="takes minutes: make grids")
def test_the_formula_is_the_trace_of_27_families(tmp_path: Path) -> None:
    # Without FSDP, torch has no fake kernel for trained experts under autocast.
    methods = [*product(DENSE, ("lora", "full")), *product(EXPERTS, ("lora",))]
    off = {
        (name, method, recompute): error_of(tmp_path, name, method, recompute)
        for (name, method), recompute in product(methods, ("none", "full"))
    }
    assert sum(map(abs, off.values())) / len(off) <= 0.02
    assert -0.04 <= min(off.values()) <= max(off.values()) <= 0.12, _worst(off)
    record("trace", off.values())


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not grids.IS_WHOLE, reason="takes minutes: make grids")
def test_the_formula_is_the_trace_of_26_sharded_families(tmp_path: Path) -> None:
    off = {
        (name, method): error_of(tmp_path, name, method, "selective", ranks=8)
        for name, method in product((*DENSE, *EXPERTS), ("lora", "full"))
        if name not in OTHER_ATTENTION_ON_A_CPU
    }
    assert sum(map(abs, off.values())) / len(off) <= 0.05
    assert -0.06 <= min(off.values()) <= max(off.values()) <= 0.16, _worst(off)
    record("sharded", off.values())


def _worst(off: Mapping[Any, float]) -> str:
    ordered = sorted(off.items(), key=lambda item: item[1])
    mean = sum(map(abs, off.values())) / len(off)
    parts = (f"{' '.join(name)} {error:+.1%}" for name, error in (*ordered[:4], *ordered[-4:]))
    return f"mean {mean:.1%} of {len(off)}; {', '.join(parts)}"
