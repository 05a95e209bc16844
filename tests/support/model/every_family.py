"""A tiny random model of every causal family of transformers, and what it computes by itself."""

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 96
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


_CORPUS = Path(__file__).parents[2] / "corpus/model_families.yaml"
FAMILIES: dict[str, Any] = yaml.safe_load(_CORPUS.read_text(encoding="utf-8"))


def _reasons(part: str) -> dict[str, str]:
    return {name: reason for reason, names in FAMILIES[part].items() for name in names}


# By family, a part of the message. Encoders have their own default configuration.
REFUSED, PADDED = _reasons("refused"), _reasons("padded")
# Of the encoders, as decoders.
PADDED_DECODERS = frozenset(
    {
        "big_bird",
        "camembert",
        "data2vec-text",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)

# By the name of a field: what makes a model of two layers and some thousand weights.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "ffn_dim": 48,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "attention_chunk_size": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_chunk_size": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "window_size": 4,
    "rotary_dim": 4,
    "original_max_position_embeddings": 64,
    "max_window_layers": 1,
    "query_pre_attn_scalar": 8,
}
# What a family has beside these, or wants in other proportions.
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
_FULL_LAST = {"layer_types": ["linear_attention", "full_attention"]}
_CONV_FIRST = {"layer_types": ["conv", "full_attention"]}
_OWN_SIZES: dict[str, dict[str, Any]] = {
    **{
        name: {"num_key_value_heads": 4}
        for name in (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
        )
    },
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _FULL_LAST),
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROTARY, "full_attention": _ROTARY},
    },
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": _CONV_FIRST,
    "lfm3": _CONV_FIRST,
    "bamba": {"attn_layer_indices": [1]},
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4},
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 8, "hc_mult": 2},
    "electra": {"embedding_size": 32},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "falcon_mamba": {"state_size": 8},
    "gemma3n_text": {"laurel_rank": 8, "num_kv_shared_layers": 0},
    "granitemoehybrid": {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]},
    "inkling2_text": {"unpadded_vocab_size": VOCAB, "swa_head_dim": 8},
    "inkling_text": {"unpadded_vocab_size": VOCAB, "swa_head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        **_FULL_LAST,
    },
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "modernbert-decoder": {"local_attention": 4},
    "phi4_multimodal": {"original_max_position_embeddings": 64},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        **_FULL_LAST,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "chunk_size": 8},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "chunk_size": 8,
        "n_mamba_heads": 8,
        "adapter_rank": 8,
    },
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1},
}


def tiny_settings(name: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a small model of a family, all defaults but the sizes kept."""
    own = _OWN_SIZES.get(name, {}) | changes
    settings = AutoConfig.for_model(name, **_sizes(CONFIG_MAPPING[name], own))
    assert isinstance(settings, PretrainedConfig)
    return settings


def tiny_model(settings: PretrainedConfig) -> Any:
    """Return a random model, with weights large enough for every token to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.eval()


def write_settings(settings: PretrainedConfig, folder: Path) -> Path:
    """Write what a model's folder begins with, and nothing else: no weights, no tokenizer."""
    settings.save_pretrained(folder)
    return folder


def alone(model: Any, documents: list[Tensor], targets: list[Tensor]) -> tuple[float, Tensor]:
    """Return loss and gradient of the model's own forward, one document at a time."""
    model.zero_grad()
    total = torch.zeros(())
    for ids, wanted in zip(documents, targets, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        total = total + functional.cross_entropy(logits.float(), wanted, reduction="sum")
    total.backward()
    return total.item(), gradient(model)


def gradient(model: Any) -> Tensor:
    """Return all gradients as one vector; a parameter that was not used has zeros."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


def _sizes(config_class: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a configuration has a field for, those of its parts included."""
    alias = {theirs: usual for usual, theirs in config_class.attribute_map.items()}
    names = {field.name: alias.get(field.name, field.name) for field in fields(config_class)}
    sizes = {name: _SIZES[usual] for name, usual in names.items() if usual in _SIZES} | dict(own)
    for name, spec in config_class.sub_configs_defaults.items():
        is_open = spec.config_class is AutoConfig
        part = CONFIG_MAPPING[spec.model_type] if is_open else spec.config_class
        kind = part.model_type
        sizes[name] = _sizes(part, _OWN_SIZES.get(kind, {}) | own.get(name, {}))
        sizes[name] |= {"model_type": kind} if is_open else {}
    return sizes
