"""Test 15 of the trainer's plan: recomputed activations give the same gradients."""

from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer.errors import ConfigError, TrainerError
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs
from finetune_trainer.model.recompute import recompute
from support.model.model_families import family, isolate, pack

CPU = torch.device("cpu")


def one_step(name, how, *, is_lora=False, lora_dropout=0.0, **changes):
    """Return loss, gradients and the bytes that the forward pass left for the backward pass."""
    model = family(name, **changes)
    if is_lora:
        targets = ["c_attn", "c_fc"] if name == "gpt2" else "all-linear"
        options = {"fan_in_fan_out": name == "gpt2", "lora_dropout": lora_dropout}
        lora = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **options)
        model = get_peft_model(model, lora)
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
    base = base_of(model)
    base.enable_input_require_grads()  # transformers does so with recomputation
    isolate(base, torch.float32)
    recompute(base, how)
    module = CausalLoss(model.train())
    kept = {}

    def note(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = module(**loss_inputs(pack([(19, 17, 15), (14, 28, 9)]), CPU))
    loss.backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
    return loss.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral with a window", "gemma2", "gpt2"])
def test_none_selective_and_full_give_the_same_gradients_bitwise(name, is_lora):
    loss, gradients, _ = one_step(name, "none", is_lora=is_lora)
    assert any(gradient.any() for gradient in gradients.values())
    for how in ("selective", "full"):
        again_loss, again, _ = one_step(name, how, is_lora=is_lora)
        assert torch.equal(again_loss, loss)
        assert all(torch.equal(again[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("llama", {"lora_dropout": 0.3}, id="of adapters"),
        pytest.param("llama", {"lora_dropout": 0.3, "attention_dropout": 0.3}, id="of attention"),
        pytest.param("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3}, id="of residuals"),
    ],
)
def test_dropout_draws_the_same_numbers_again(name, changes):
    loss, gradients, _ = one_step(name, "none", is_lora=True, **changes)
    without, _, _ = one_step(name, "none", is_lora=True)
    assert loss != without
    for how in ("selective", "full"):
        again_loss, again, _ = one_step(name, how, is_lora=True, **changes)
        assert torch.equal(again_loss, loss)
        assert all(torch.equal(again[name], gradients[name]) for name in gradients)


class Calls(TorchDispatchMode):
    """Count calls of attention, and of products by whether both of their sides are wide."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func) and "backward" not in str(func):
            self.seen["attention"] += 1
        if func is torch.ops.aten.mm.default:
            self.seen["product" if min(*args[0].shape, *args[1].shape) > 2 else "adapter"] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_no_attention_and_no_product_with_a_frozen_weight():
    seen = {}
    for how in ("none", "selective", "full"):
        with Calls() as calls:
            one_step("llama", how, is_lora=True)
        seen[how] = calls.seen
    assert seen["selective"]["attention"] == seen["none"]["attention"] < seen["full"]["attention"]
    assert seen["selective"]["product"] == seen["none"]["product"] < seen["full"]["product"]
    assert seen["selective"]["adapter"] > seen["none"]["adapter"]


def test_selective_recomputes_no_attention_where_all_is_trained():
    seen = {}
    for how in ("none", "selective"):
        with Calls() as calls:
            one_step("llama", how)
        seen[how] = calls.seen
    assert seen["selective"]["attention"] == seen["none"]["attention"]
    assert seen["selective"]["product"] > seen["none"]["product"]


def test_what_is_kept_and_then_changed_in_place_is_refused():
    model = family("llama")
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    product = model.model.layers[0].mlp.up_proj
    forward = product.forward
    recompute(model, "selective")
    assert product.forward is not forward
    kept = product.forward
    product.forward = lambda hidden: kept(hidden).mul_(2)
    loss = model.train()(input_ids=torch.tensor([[5, 6, 7]])).logits.sum()
    with pytest.raises(TrainerError, match=r"^spec.strategy.activationCheckpointing selective"):
        loss.backward()


def test_a_model_that_cannot_recompute_is_refused_by_name():
    model = family("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(
        ConfigError, match=r"^spec.strategy.activationCheckpointing full .* LlamaForCausalLM"
    ):
        recompute(model, "full")
