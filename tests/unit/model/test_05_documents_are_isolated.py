"""Test 5 of the trainer's plan: what one document says changes nothing in another."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer.model.attention import bounds_as_mask
from finetune_trainer.model.loss import loss_inputs
from support.model.model_families import AMPERE, FAMILIES, family, isolate, pack

CPU = torch.device("cpu")


def logits(model, batch, is_isolating):
    bounds = loss_inputs(batch, CPU)["bounds"]
    with torch.no_grad():
        return model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=bounds_as_mask(bounds) if is_isolating else None,
            use_cache=False,
        ).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_another_first_document_leaves_the_others_bitwise_as_they_were(name):
    model = family(name)
    is_isolating = isolate(model, torch.float32)
    batch = pack([(9, 7, 5), (4, 8, 9)])
    before = logits(model, batch, is_isolating)
    batch.input_ids[0, :9] = (batch.input_ids[0, :9] + 1) % 90 + 2
    after = logits(model, batch, is_isolating)
    assert not torch.equal(after[0, :9], before[0, :9])
    assert torch.equal(after[0, 9:], before[0, 9:])
    assert torch.equal(after[1], before[1])


def test_answers_with_a_cache_are_the_same_with_the_documents_attention():
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10]])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = family("mistral with a window")
    isolating = family("mistral with a window")
    assert isolate(isolating, torch.float32)
    assert torch.equal(isolating.generate(prompt, **options), plain.generate(prompt, **options))


def test_the_attention_is_not_written_into_a_saved_model(tmp_path):
    model = family("llama")
    isolate(model, torch.float32)
    model.save_pretrained(tmp_path)
    assert "documents" not in (tmp_path / "config.json").read_text()


class Kernels(TorchDispatchMode):
    """Note the kernels of attention that are called, with their windows."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().rpartition("::")[2]
        if "attn" in name or "attention" in name:
            values = [*args, *(kwargs or {}).values()]
            self.calls.append((name, *(value for value in values if isinstance(value, list))))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "window"), [("llama", [-1, 0]), ("mistral with a window", [3, 0])]
)
def test_off_the_cpu_one_kernel_a_layer_attends_in_all_documents(name, window):
    """Only shapes are computed, so this needs no GPU."""
    batch = pack([(9, 7, 5), (4, 8, 9)])
    bounds = loss_inputs(batch, CPU)["bounds"]
    with torch.device("meta"):
        model = family(name).to(torch.bfloat16)
    assert isolate(model, torch.bfloat16, AMPERE)
    with Kernels() as kernels:
        model(
            input_ids=batch.input_ids.to("meta"),
            position_ids=batch.position_ids.to("meta"),
            attention_mask=bounds_as_mask(bounds.to("meta")),
            use_cache=False,
        ).logits.sum().backward()
    names = ["_varlen_attn", "_varlen_attn", "_varlen_attn_backward", "_varlen_attn_backward"]
    assert kernels.calls == [(name, window) for name in names]
