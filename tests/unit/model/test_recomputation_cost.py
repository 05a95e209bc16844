"""What recomputation saves in bytes, and what it costs the host."""

import statistics
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AttentionInterface, LlamaConfig, LlamaModel
from transformers.masking_utils import AttentionMaskInterface

from finetune_trainer.model.compile import compile_layers
from finetune_trainer.model.loss import base_of
from finetune_trainer.model.recompute import recompute
from support.model.alive_bytes import AliveBytes

CPU = torch.device("cpu")


def attend(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    """Attend causally over one document, as the trainer's own does on a GPU: without a mask."""
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


def llama(how, *, is_lora, hidden_size, num_hidden_layers):
    """Return a body in training mode: frozen in bf16 with adapters in fp32, or trained in fp32."""
    AttentionInterface.register("one document", attend)
    AttentionMaskInterface.register("one document", lambda *_, **__: None)
    heads = hidden_size // 64
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        attn_implementation="one document",
    )
    model = LlamaModel(config)
    if is_lora:
        model = get_peft_model(model.bfloat16(), LoraConfig(r=16, target_modules="all-linear"))
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False  # as the trainer does in bf16
    recompute(base_of(model), how)
    return model.train()


def make_fake(model, mode):
    """Put fake tensors in place of parameters and buffers."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fake = mode.from_tensor(parameter.detach())
            setattr(module, name, nn.Parameter(fake, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, mode.from_tensor(buffer))


def alive_after_forward(how, *, is_lora):
    model = llama(how, is_lora=is_lora, hidden_size=512, num_hidden_layers=4)
    mode = FakeTensorMode()
    make_fake(model, mode)
    with mode:
        tokens = torch.empty(1, 4096, dtype=torch.int64)
        with (
            AliveBytes(*model.parameters(), *model.buffers()) as alive,
            torch.autocast("cpu", torch.bfloat16),
        ):
            output = base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        assert output.requires_grad
        return alive.now


@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
def test_selective_keeps_at_most_seven_tenths_of_the_bytes_of_none(is_lora):
    none, selective, full = (
        alive_after_forward(how, is_lora=is_lora) for how in ("none", "selective", "full")
    )
    assert full < selective <= 0.7 * none


def kept_by_graphs(how, *, is_lora):
    """Return the bytes that compiled layers leave for the backward pass, parameters not counted."""
    torch._dynamo.reset()
    model = llama(how, is_lora=is_lora, hidden_size=128, num_hidden_layers=2)
    compile_layers(base_of(model), CPU, is_asked=True, warn=print, backend="aot_eager")
    held = {parameter.data_ptr() for parameter in model.parameters()}
    kept = {}

    def note(tensor):
        if tensor.data_ptr() not in held:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch._dynamo.utils.counters.clear()
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        output = base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    output.float().square().sum().backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return sum(kept.values()), gradients


@pytest.mark.full
# Dynamo looks at .grad of every tensor that it meets, and torch warns it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
def test_graphs_keep_at_most_seven_tenths_with_selective_for_the_same_gradients(is_lora):
    torch.manual_seed(0)
    none, gradients = kept_by_graphs("none", is_lora=is_lora)
    torch.manual_seed(0)
    selective, again = kept_by_graphs("selective", is_lora=is_lora)
    assert selective <= 0.7 * none
    assert any(gradient.any() for gradient in gradients.values())
    torch.testing.assert_close(again, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("is_lora", [True, False], ids=["lora", "full"])
def test_selective_takes_the_host_at_most_2_3_times_as_long_as_none(is_lora):
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    seconds: dict[str, list[float]] = {"none": [], "selective": []}
    models = {
        how: llama(how, is_lora=is_lora, hidden_size=128, num_hidden_layers=4) for how in seconds
    }
    for _ in range(15):
        for how, model in models.items():
            begin = time.thread_time()
            with torch.autocast("cpu", torch.bfloat16):
                output = base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
            output.float().sum().backward()
            seconds[how].append(time.thread_time() - begin)
            model.zero_grad()
    none, selective = (statistics.median(seconds[how][3:]) for how in seconds)
    assert selective <= 2.3 * none
