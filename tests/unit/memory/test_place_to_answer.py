"""Where a model answers sample prompts; torch's `meta` device stands for a rank's GPU."""

from typing import Any

import pytest
import torch
from torch import nn

from finetune_trainer.answers import place_to_answer
from finetune_trainer.model.quantize import move

CPU, GPU = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("free_bytes", "place"),
    [pytest.param(500, GPU, id="room"), pytest.param(499, CPU, id="too little room")],
)
def test_a_gathered_model_answers_on_the_gpu_where_it_fits(
    free_bytes: int, place: torch.device
) -> None:
    model = nn.Linear(10, 10, bias=False)  # 400 bytes
    assert place_to_answer(model, GPU, lambda: free_bytes) == place


def test_a_model_that_is_there_already_stays_and_nothing_is_asked() -> None:
    assert place_to_answer(nn.Linear(1, 1), CPU, lambda: 1 // 0) == CPU


def test_a_model_of_4_bits_is_moved_with_its_scales() -> None:
    from bitsandbytes.nn.modules import Linear4bit

    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True).to(CPU)
    scales: Any = layer.quant_state
    packed = layer.weight.detach().as_subclass(torch.Tensor)
    layer.weight = nn.Parameter(packed, requires_grad=False)  # as FSDP gathers it
    assert place_to_answer(layer, GPU, lambda: 1 << 40) == GPU
    move(layer, GPU)
    moved = (layer.weight, scales.absmax, scales.code, scales.offset, scales.state2.absmax)
    assert {one.device for one in moved} == {GPU}
