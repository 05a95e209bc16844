"""A tiny model that generates a given text, whatever the question is."""

from pathlib import Path
from typing import Any

from support.data.text_fixtures import tiny_tokenizer

# Ends with a token that no script has.
SCRIPTED_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    "<|im_start|>"
)


def scripted_model(folder: Path, text: str, *, is_endless: bool = False) -> Path:
    """Save a Llama that generates `text` and ends, or repeats it without end.

    The layers add zero, so the next token depends on the last one alone. The embedding of token
    K of the script is a unit vector, which the head maps to token K + 1; every other token has the
    first vector.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer: Any = tiny_tokenizer(folder, template=SCRIPTED_TEMPLATE)
    script = tokenizer.encode(text, add_special_tokens=False)
    assert len({*script}) == len(script) <= 62, "a token has one successor"
    config = LlamaConfig(
        vocab_size=768,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=100_000,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.zero_()
        embedding[:, 0] = 1.0
        head.zero_()
        last = script[0] if is_endless else tokenizer.eos_token_id
        for place, (token, following) in enumerate(zip(script, [*script[1:], last], strict=True)):
            embedding[token] = 0.0
            embedding[token, place + 1] = 1.0
            head[following, place + 1] = 1.0
        head[script[0], 0] = 1.0
    model.save_pretrained(folder)
    return folder
