"""Rows longer than a model's table of positions are refused before one of them is computed."""

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.positions import refuse_long_rows
from support.model.every_family import tiny_model, tiny_settings

KNOWN = 64
WITH_TABLE = ("gpt2", "opt", "gpt_neo", "gptj", "codegen", "biogpt", "ctrl", "openai-gpt")
WITHOUT = ("llama", "gpt_neox", "bloom", "mpt", "phi", "gemma2", "gpt_oss")


@pytest.mark.parametrize("name", [*WITH_TABLE, *WITHOUT])
def test_a_row_beyond_the_model_s_positions_is_refused_where_it_cannot_be_computed(
    name: str,
) -> None:
    model = tiny_model(tiny_settings(name)).eval()
    assert refuse_long_rows(model, KNOWN) is None
    ids = torch.arange(KNOWN + 16)[None] % 32 + 8
    with torch.no_grad():
        model(input_ids=ids[:, :KNOWN], use_cache=False)
        if name in WITH_TABLE:
            with pytest.raises(ConfigError, match=r"80 tokens.*64, the end of .* to 64, or set"):
                refuse_long_rows(model, KNOWN + 16)
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=ids, use_cache=False)
        else:
            model(input_ids=ids, use_cache=False)
            refuse_long_rows(model, KNOWN + 16)
