"""Tiny random models of several families, and packs of documents to run them on."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from finetune_trainer.data.batch import NO_TARGET, MicroBatch
from finetune_trainer.model.attention import is_isolating
from finetune_trainer.model.kernels import Card, choose_attention

CPU = torch.device("cpu")
VOCAB = 96

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
SMALL_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": 1,
}

# Names of transformers' model types, with what sets each one apart.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "mistral with a window": ("mistral", {"sliding_window": 4}),
    "gemma2": ("gemma2", {"sliding_window": 4, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 4}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 4}),
    "gpt2": ("gpt2", {}),
    "granite": ("granite", {"logits_scaling": 4.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
}


def family(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a random model of the family, with weights large enough for documents to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = FAMILIES[name]
    values = SMALL_GPT2 if model_type == "gpt2" else SMALL
    config = AutoConfig.for_model(model_type, **{**values, **settings, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


AMPERE = Card((8, 0), has_triton=True)


def isolate(model: Any, dtype: torch.dtype = torch.float32, card: Card | None = None) -> bool:
    """Give the model the attention that a run would, and say whether it is told of documents."""
    said: list[str] = []
    choose_attention(model, card, dtype, warn=said.append)
    return is_isolating(model)


def lift_flex_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have flex's backward run on a CPU, which torch refuses by a check of the device alone."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)


def pack(
    rows: Sequence[Sequence[int]], *, seed: int = 0, width: int | None = None, label_every: int = 2
) -> MicroBatch:
    """Return a batch whose rows hold random documents of the given lengths, padding at the end.

    Every `label_every`-th token of a document is to be predicted; its first one never is.
    """
    generator = torch.Generator().manual_seed(seed)
    width = width or max(sum(row) for row in rows)
    shape = (len(rows), width)
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    targets = torch.full(shape, NO_TARGET)
    for index, row in enumerate(rows):
        start = 0
        for length in row:
            document = torch.randint(2, VOCAB, (length,), generator=generator)
            part = slice(start, start + length)
            ids[index, part], positions[index, part] = document, torch.arange(length)
            wanted = torch.where(
                torch.arange(1, length) % label_every == 0, document[1:], NO_TARGET
            )
            targets[index, start : start + length - 1] = wanted
            start += length
        positions[index, start:] = torch.arange(width - start)
    return MicroBatch.of(ids, positions, targets, tokens=sum(map(sum, rows)))


def sequences(batch: MicroBatch, lengths: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Return each document of a batch of one row as (ids, positions, targets)."""
    fields = zip(
        *(
            field[0].split(lengths)
            for field in (batch.input_ids, batch.position_ids, batch.targets)
        ),
        strict=True,
    )
    return list(fields)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the gradient of each parameter, all of which must have one."""
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == dict(module.named_parameters()).keys()
    return found


def joined(batch: MicroBatch, rows: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> MicroBatch:
    """Return the same documents in other rows, padded at the end."""
    width = max(sum(len(ids) for ids, _, _ in row) for row in rows)
    fields = [torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3)]
    fields[2].fill_(-100)
    for index, row in enumerate(rows):
        start = 0
        for document in row:
            for field, values in zip(fields, document, strict=True):
                field[index, start : start + len(values)] = values
            start += len(document[0])
        fields[1][index, start:] = torch.arange(width - start)
    ids, positions, targets = fields
    return MicroBatch.of(ids, positions, targets, tokens=batch.tokens)
