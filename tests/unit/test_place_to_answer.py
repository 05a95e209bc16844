"""Where a model answers sample prompts; torch's `meta` device stands for a rank's GPU."""

import pytest
import torch
from torch import nn

from finetune_trainer.answers import place_to_answer

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


def test_a_model_of_4_bits_stays_where_its_scales_are() -> None:
    model = nn.Linear(1, 1)
    model.quant_state = None  # type: ignore[assignment]
    assert place_to_answer(model, GPU, lambda: 1 << 40) == CPU
