"""Test 6 of the trainer's plan: the fused head against cross-entropy over whole logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.profiler import profile

from finetune_trainer.data.batch import NO_TARGET
from finetune_trainer.model.fused_head import (
    FusedHead,
    OutputForm,
    fuse_head,
    linear_cross_entropy,
)
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from support.model.alive_bytes import AliveBytes
from support.model.model_families import FAMILIES, family, pack

CPU = torch.device("cpu")


def head_tensors(vocabulary, *, positions=37, width=24, dtype=torch.float64):
    torch.manual_seed(vocabulary)
    hidden = torch.randn(positions, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, vocabulary, (positions,))


def whole_logits(hidden, weight, bias, targets, form):
    logits = functional.linear(hidden, weight, bias) * form.scale
    if form.cap:
        logits = form.cap * torch.tanh(logits / form.cap)
    return functional.cross_entropy(logits, targets, reduction="sum")


def results(function, tensors, targets, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    loss = function(*leaves, targets, **options)
    return [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]


def relative_error(value, expected):
    difference = (value.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("vocabulary", [2, 97, 4096])
@pytest.mark.parametrize("rows", [16, 64], ids=lambda rows: f"{rows} rows at a time")
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(OutputForm(), id="as is"),
        pytest.param(OutputForm(scale=0.25), id="scaled"),
        pytest.param(OutputForm(cap=5.0), id="soft-capped"),
    ],
)
def test_loss_and_gradients_equal_cross_entropy_over_whole_logits(vocabulary, rows, form):
    *tensors, targets = head_tensors(vocabulary)
    expected = results(whole_logits, tensors, targets, form=form)
    options = {"form": form, "chunk_bytes": rows * (8 * vocabulary + 8 * 24 + 64)}
    exact = results(linear_cross_entropy, tensors, targets, **options)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-11)
    single = results(linear_cross_entropy, [t.float() for t in tensors], targets, **options)
    assert max(map(relative_error, single, expected)) <= 1e-6


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(OutputForm(), id="as is"),
        pytest.param(OutputForm(scale=0.25), id="scaled"),
        pytest.param(OutputForm(cap=5.0), id="soft-capped"),
    ],
)
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_most_two_chunks_are_alive_beside_the_gradients(form, is_trained, dtype):
    with FakeTensorMode():  # the sizes of an 8B model with 4,096 labels
        hidden = torch.empty(4096, 4096, dtype=dtype, requires_grad=True)
        weight = torch.empty(128256, 4096, dtype=dtype, requires_grad=is_trained)
        targets = torch.empty(4096, dtype=torch.int64)
        chunk = 2**29
        with AliveBytes(hidden, weight, targets) as alive:
            loss = linear_cross_entropy(hidden, weight, None, targets, form=form, chunk_bytes=chunk)
        trained = (hidden, weight) if is_trained else (hidden,)
        wide = sum(4 * tensor.numel() for tensor in trained)
        assert 1.4 * chunk <= alive.peak - wide <= 2 * chunk
        assert alive.now == sum(tensor.nbytes for tensor in trained) + loss.nbytes


def test_a_factor_of_one_costs_no_pass_over_the_logits():
    *tensors, targets = head_tensors(97, dtype=torch.float32)
    passes = {}
    for scale in (1.0, 0.5):
        with profile() as profiler:
            results(linear_cross_entropy, tensors, targets, form=OutputForm(scale=scale))
        passes[scale] = sum(event.name == "aten::mul_" for event in profiler.events())
    assert passes[0.5] - passes[1.0] == 2  # logits, gradient
    assert passes[1.0] == 3  # the factor on the loss, over the three gradients alone


def test_no_positions_give_a_finite_zero_with_gradients_of_zero():
    *tensors, targets = head_tensors(50, positions=0)
    loss, *gradients = results(linear_cross_entropy, tensors, targets)
    assert loss == 0
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]
    assert not any(gradient.any() for gradient in gradients)


def test_frozen_heads_get_no_gradient_and_evaluation_makes_none():
    hidden, weight, bias, targets = head_tensors(50)
    loss = linear_cross_entropy(hidden, weight.detach(), bias.detach(), targets)
    assert torch.autograd.grad(loss, hidden)[0].any()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, bias, targets) == loss.detach()


def test_bf16_arithmetic_keeps_the_loss_in_fp32_and_gradients_in_their_own_type():
    *tensors, targets = head_tensors(300, dtype=torch.float32)
    expected = results(whole_logits, tensors, targets, form=OutputForm())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = results(linear_cross_entropy, tensors, targets)
    assert [value.dtype for value in narrow] == [torch.float32] * 4
    assert max(map(relative_error, narrow, expected)) < 2e-2


def gradients_of(module, loss):
    module.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}


def plain_loss(model, batch):
    logits = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).logits
    targets = batch.targets.flatten()
    return functional.cross_entropy(
        logits.flatten(0, 1), targets, ignore_index=NO_TARGET, reduction="sum"
    )


def assert_same_loss(model, batch, *, fuse=True):
    """Compare, in fp64, the loss of the model as it is with that of `CausalLoss` around it."""
    expected = plain_loss(model, batch)
    expected_gradients = gradients_of(model, expected)
    module = CausalLoss(model, fuse=fuse)
    loss = module(**loss_inputs(batch, CPU))
    assert relative_error(loss.detach(), expected.detach()) < 1e-12
    for name, gradient in gradients_of(model, loss).items():
        assert relative_error(gradient, expected_gradients[name]) < 1e-9, name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_its_loss_and_gradients_with_a_fused_head(name):
    model = family(name).double()
    assert_same_loss(model, pack([(9, 7), (5, 6)]))
    assert isinstance(model.get_output_embeddings(), FusedHead)


def test_a_head_that_shall_not_be_fused_keeps_loss_and_gradients():
    model = family("llama").double()
    assert_same_loss(model, pack([(9, 7), (5, 6)]), fuse=False)
    assert not isinstance(model.get_output_embeddings(), FusedHead)


def test_an_adapter_on_the_head_takes_the_plain_path():
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"])
    model = get_peft_model(family("llama"), lora).double()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert_same_loss(model, pack([(9, 7), (5, 6)]))
    assert not isinstance(model.get_base_model().get_output_embeddings(), FusedHead)


def test_a_model_that_does_something_unknown_to_its_logits_takes_the_plain_path():
    from transformers import LlamaForCausalLM

    class Shifted(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * torch.linspace(0, 1, output.logits.shape[-1])
            return output

    model = Shifted(family("llama").config).double()
    assert_same_loss(model, pack([(9, 7), (5, 6)]))
    assert fuse_head(model) is None


def test_answers_and_saved_files_do_not_notice_the_fused_head(tmp_path):
    from transformers import AutoModelForCausalLM

    model = family("llama tied")
    prompt = torch.tensor([[5, 6, 7]])
    before = model(input_ids=prompt).logits
    CausalLoss(model)
    torch.testing.assert_close(model(input_ids=prompt).logits, before, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(again(input_ids=prompt).logits, before, rtol=0, atol=0)
