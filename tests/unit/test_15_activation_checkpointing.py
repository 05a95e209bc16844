"""Test 15 of the trainer's plan: recomputed activations give the same gradients."""

import pytest
import torch

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.model.recompute import recompute
from model_families import family, isolate, pack

CPU = torch.device("cpu")


def one_step(name, how):
    """Return loss, gradients and the bytes that the forward pass left for the backward pass."""
    model = family(name)
    isolate(model, torch.float32)
    recompute(model, how)
    module = CausalLoss(model.train())
    kept = {}

    def note(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = module(**loss_inputs(pack([(19, 17, 15), (14, 28, 9)]), CPU))
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return loss.detach(), gradients, sum(kept.values())


@pytest.mark.parametrize("name", ["llama", "mistral with a window", "gemma2", "gpt2"])
def test_none_selective_and_full_give_the_same_gradients_bitwise(name):
    loss, gradients, kept = one_step(name, "none")
    for how in ("selective", "full"):
        again_loss, again, kept_less = one_step(name, how)
        assert torch.equal(again_loss, loss)
        assert all(torch.equal(again[name], gradients[name]) for name in gradients)
        assert kept_less < kept


def test_selective_recomputes_no_matrix_product_and_full_recomputes_them_all():
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for how in ("none", "selective", "full"):
        with FlopCounterMode(display=False) as counter:
            one_step("llama", how)
        flops[how] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["full"]


def test_a_model_that_cannot_recompute_is_refused_by_name():
    model = family("llama")
    model.supports_gradient_checkpointing = False
    with pytest.raises(
        ConfigError, match=r"^spec.strategy.activationCheckpointing full .* LlamaForCausalLM"
    ):
        recompute(model, "full")
