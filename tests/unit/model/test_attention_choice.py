"""Which kernel computes attention: what is asked for, what serves, and what is said."""

import sys
import types
from functools import partial

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.read_base import read_base
from finetune_trainer.model.kernels import Card, choose_attention, use_newest_flash
from finetune_trainer.sizing.kernels import Kernel, avoids_scores
from support.model.model_families import AMPERE, family

TURING, HOPPER = Card((7, 5), has_triton=True), Card((9, 0), has_triton=True)


@pytest.mark.parametrize(
    ("name", "card", "dtype", "kernel", "said"),
    [
        pytest.param("llama", AMPERE, torch.bfloat16, Kernel.VARLEN, "", id="llama"),
        pytest.param(
            "mistral with a window", AMPERE, torch.float16, Kernel.VARLEN, "", id="a window"
        ),
        pytest.param("gemma2", AMPERE, torch.bfloat16, Kernel.FLEX, "", id="a softcap"),
        pytest.param("llama", AMPERE, torch.float32, Kernel.FLEX, "by flex attention", id="fp32"),
        pytest.param(
            "llama",
            TURING,
            torch.float16,
            Kernel.MODEL,
            "this GPU has compute capability 7.5, it needs 8.0",
            id="an old card",
        ),
        pytest.param("llama", None, torch.float32, Kernel.VARLEN, "", id="on a CPU"),
        pytest.param("gemma2", None, torch.float32, Kernel.MODEL, "", id="a softcap, CPU"),
    ],
)
def test_the_fastest_kernel_that_serves_is_chosen(name, card, dtype, kernel, said):
    warnings: list[str] = []
    assert choose_attention(family(name, head_dim=16), card, dtype, warn=warnings.append) is kernel
    assert len(warnings) == bool(said)
    assert said in "".join(warnings)


def test_heads_too_narrow_for_flex_get_the_model_s_own_attention():
    warnings: list[str] = []
    narrow = family("gemma2", head_dim=8)
    chosen = choose_attention(narrow, AMPERE, torch.bfloat16, warn=warnings.append)
    assert chosen is Kernel.MODEL
    assert "flex: its heads are 8 wide, flex attention's at least 16" in warnings[0]


@pytest.mark.parametrize("card", [TURING, AMPERE], ids=["Turing", "Ampere"])
@pytest.mark.parametrize("head_dim", [8, 16], ids=["narrow heads", "wider heads"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_memory_formula_expects_the_kernel_that_is_chosen(name, head_dim, card):
    base = read_base(family(name, head_dim=head_dim).train())
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    for precision, dtype in dtypes.items():
        model = family(name, head_dim=head_dim)
        chosen = choose_attention(model, card, dtype, warn=lambda _: None)
        expected = avoids_scores(base.fused_attention, "fastest", precision, card.capability)
        assert (chosen is not Kernel.MODEL) == expected, precision


def test_dropout_in_attention_is_served_where_torch_attends_document_by_document():
    said: list[str] = []
    model = family("llama", attention_dropout=0.1)
    choose = partial(choose_attention, model, dtype=torch.bfloat16, warn=said.append)
    assert choose(None) is Kernel.VARLEN
    assert choose(None, compiles=True) is Kernel.MODEL
    assert said == []
    assert choose(AMPERE) is Kernel.MODEL
    assert "spec.training.dropout 0 removes" in said[0]


def test_a_model_keeps_its_own_attention_where_that_is_asked_for():
    model = family("llama")
    before = model.config._attn_implementation
    chosen = choose_attention(model, None, torch.float32, asked="model", warn=pytest.fail)
    assert chosen is Kernel.MODEL
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("asked", "name", "changes", "card", "said"),
    [
        pytest.param(
            "varlen",
            "gemma2",
            {},
            AMPERE,
            "varlen does not support Gemma2.*such as by a cap",
            id="a cap",
        ),
        pytest.param(
            "varlen",
            "llama",
            {"attention_dropout": 0.1},
            AMPERE,
            "varlen .* dropout in attention",
            id="dropout",
        ),
        pytest.param(
            "varlen", "llama", {"head_dim": 512}, AMPERE, "varlen .* 512 wide", id="a wide head"
        ),
        pytest.param(
            "flex", "gemma2", {}, None, "flex .* no gradients for it on a CPU", id="a CPU"
        ),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused_by_field(asked, name, changes, card, said):
    model = family(name, **changes)
    with pytest.raises(ConfigError, match=f"^spec.training.attention {said}.*; use fastest"):
        choose_attention(model, card, torch.bfloat16, asked=asked, warn=pytest.fail)


def test_flash_attention_3_is_asked_for_only_on_hopper_and_needs_its_package():
    assert use_newest_flash(HOPPER, pytest.fail) is None
    assert use_newest_flash(AMPERE, pytest.fail) is None


def test_a_package_of_flash_attention_3_that_cannot_be_used_is_said(monkeypatch):
    """Torch itself finds that the module has no kernels."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("without kernels"))
    said: list[str] = []
    assert use_newest_flash(HOPPER, said.append) is None
    assert len(said) == 1
    assert said[0].startswith("FA3 is installed but cannot be used; using FlashAttention 2: ")
