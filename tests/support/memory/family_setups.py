"""Small models of many families, whose steps are traced and computed.

They are large enough that activations and weights, not constants, make the peak.
"""

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "shared_expert_intermediate_size": 704,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "deepseek_v3": {"num_key_value_heads": 8, "head_dim": 32},
    "gemma2": {"sliding_window": 256},
    "gemma3_text": {"sliding_window": 256},
}
DENSE = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi", "phi3", "gpt2"),
    *("granite", "cohere", "olmo2", "stablelm", "starcoder2", "glm4", "smollm3", "ernie4_5"),
    *("gpt_neox", "nemotron"),
)
EXPERTS = (
    *("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "granitemoe", "gpt_oss", "deepseek_v3"),
    "phimoe",
)
KEEPS_SCORES = ("gemma2", "gpt_oss")
"""Families whose own attention, which the trace of a CPU has, retains the scores."""
OTHER_ATTENTION_ON_A_CPU = ("stablelm",)
"""Families whose own attention retains masks and copies in a CPU's kernel."""


def family_settings(name: str) -> PretrainedConfig:
    """Return the configuration of a model of the family with 4 layers of 512 features."""
    kind = CONFIG_MAPPING[name]
    known = {field.name for field in dataclasses.fields(kind)}
    values = {kind.attribute_map.get(key, key): one for key, one in _SIZES.items()}
    values |= _OWN.get(name, {})
    settings = AutoConfig.for_model(
        name, **{key: one for key, one in values.items() if key in known}
    )
    assert isinstance(settings, PretrainedConfig)
    return settings
