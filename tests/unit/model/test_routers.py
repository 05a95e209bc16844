"""Which parts of a mixture of experts LoRA adapts when nobody names any."""

import warnings
from typing import Any

import pytest
import transformers
from peft import PeftModel

from finetune_trainer.config import LoraSettings
from finetune_trainer.model.adapters import attach_lora

ROUTERS = {
    "Mixtral": "mlp.gate",
    "Qwen2Moe": "mlp.gate mlp.shared_expert_gate",
    "Qwen3Moe": "mlp.gate",
    "Afmoe": "mlp.router.gate",
}


def model(family: str) -> Any:
    settings = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_local_experts=4,
        num_dense_layers=0,
    )
    return getattr(transformers, f"{family}ForCausalLM")(settings)


def adapted(made: PeftModel) -> set[str]:
    """Return what is trained, below its decoder layer."""
    trained = [name for name, p in made.named_parameters() if p.requires_grad]
    return {name.split(".layers.0.")[1].split(".lora_")[0] for name in trained}


@pytest.mark.parametrize("family", ROUTERS)
def test_by_default_lora_adapts_attention_and_leaves_routers_alone(family: str) -> None:
    with warnings.catch_warnings():  # peft's, of patterns that it has made itself
        warnings.simplefilter("ignore", RuntimeWarning)
        names = adapted(attach_lora(model(family), LoraSettings(r=2)))
    assert {"self_attn.q_proj", "self_attn.o_proj"} <= names
    assert not names & set(ROUTERS[family].split())


def test_experts_that_are_stacked_are_adapted_as_before() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        names = adapted(attach_lora(model("Mixtral"), LoraSettings(r=2)))
    assert "mlp.experts" in names


def test_a_router_that_is_named_is_adapted() -> None:
    settings = LoraSettings(r=2, target_modules=("shared_expert_gate",))
    assert adapted(attach_lora(model("Qwen2Moe"), settings)) == {"mlp.shared_expert_gate"}
