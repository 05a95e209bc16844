"""Model FLOPs are those of the products that torch makes, by method and by document."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from finetune_trainer.config import LoraSettings
from finetune_trainer.model.adapters import attach_lora
from finetune_trainer.telemetry.flops import ModelFlops, model_flops, peak_flops
from support.model.every_family import NAMES, REFUSED, tiny_model, tiny_settings
from support.model.model_families import family

TOKENS = 24
IDS = torch.arange(2, 2 + TOKENS)[None]
LABELS = 5  # the head is asked for these alone


def counted(model: nn.Module, *, is_trained: bool = True) -> int:
    """Return the FLOPs of the products that one document makes, as torch counts them.

    The head's are those of a few labels, as the trainer asks it for no more.
    """
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(is_trained):
        logits = model(input_ids=IDS, use_cache=False, logits_to_keep=LABELS).logits
        if is_trained:
            logits.square().mean().backward()
    return int(counter.get_total_flops())


def eager(model: Any) -> Any:
    """Let a model attend and choose experts by products alone, which torch counts."""
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation = config._experts_implementation = "eager"
    return model


def expected(flops: ModelFlops | None) -> float:
    assert flops is not None
    return of(flops, [TOKENS], LABELS)


def of(flops: ModelFlops, documents: list[int], labels: int) -> float:
    """Return the FLOPs of documents, the first of which has all labels."""
    counts = np.array([labels, *[0] * len(documents)])[: len(documents)]
    return float(flops.of(np.array(documents, dtype=np.int32), counts).sum())


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2", "qwen3", "granite"])
def test_training_all_weights_takes_what_its_products_take(name: str) -> None:
    model = eager(family(name))
    assert expected(model_flops(model)) == counted(model)


def test_an_adapter_takes_no_products_for_the_weights_that_it_leaves() -> None:
    plain = eager(family("llama"))
    full = expected(model_flops(plain))
    model = attach_lora(plain, LoraSettings(r=4))
    # Before the first adapters nothing is trained, so no gradient goes on to there.
    first = model.get_base_model().model.layers[0].self_attn
    ends = (first.q_proj, first.k_proj, first.v_proj)
    inputs = [m.in_features * m.out_features for e in ends for m in (e.base_layer, *_down(e))]
    adapted = expected(model_flops(model))
    assert adapted - 2 * TOKENS * sum(inputs) == counted(model)
    assert adapted < full


def _down(adapter: Any) -> list[Any]:
    return list(adapter.lora_A.values())


@pytest.mark.full
@pytest.mark.parametrize("start", range(0, len(NAMES), 40))
def test_a_forward_pass_of_each_family_takes_a_third_or_is_not_known(start: int) -> None:
    known = 0
    for name in NAMES[start : start + 40]:
        model = None if name in REFUSED else eager(tiny_model(tiny_settings(name)))
        flops = None if model is None else model_flops(model)
        if model is not None and flops is not None:
            known += 1
            whole = {window: flops.attention[window] for window in flops.attention}
            attention = sum(whole.values()) * TOKENS**2  # eager attends to all, and masks
            products = flops.per_token * TOKENS + flops.per_label_token * LABELS
            assert 3 * counted(model, is_trained=False) == products + attention, name
    assert known > 0


def test_what_a_model_takes_that_is_not_known_is_absent() -> None:
    assert model_flops(tiny_model(tiny_settings("mamba"))) is None
    assert model_flops(tiny_model(tiny_settings("qwen3_next"))) is None


def test_documents_of_one_row_attend_each_to_itself() -> None:
    flops = ModelFlops(10.0, 100.0, {None: 1.0})
    assert of(flops, [3, 4], 2) == 10 * 7 + 100 * 2 + 9 + 16
    assert of(flops, [7], 2) == 10 * 7 + 100 * 2 + 49


def test_a_window_bounds_what_a_token_attends_to() -> None:
    windowed = ModelFlops(0.0, 0.0, {4: 1.0, None: 2.0})
    assert of(windowed, [3, 10], 0) == 9 + 40 + 2 * (9 + 100)


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("Tesla T4", "bf16", None),  # it has no such arithmetic
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16", None),
        ("NVIDIA A10-12Q", "bf16", None),
        ("Some GPU", "bf16", None),
    ],
)
def test_a_peak_is_of_whole_devices_that_are_known(
    device: str, precision: str, peak: float | None
) -> None:
    assert peak_flops(device, precision) == peak
    assert peak_flops(device, precision, is_float8=True) is None
