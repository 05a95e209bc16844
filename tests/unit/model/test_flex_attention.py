"""Flex attention is dense softmax: causal, inside documents, in a window, with capped scores.

Torch refuses flex's backward on a CPU by a check of the device. The fixture `on_cpu` lifts that
check, under which the graphs that a GPU compiles are run operator by operator (aot_eager).
"""

from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from finetune_trainer.errors import ConfigError
from finetune_trainer.model import flex
from finetune_trainer.model.kernels import use_flex
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from support.model.model_families import CPU, family, gradients, lift_flex_check, pack


@pytest.fixture
def on_cpu(monkeypatch):
    lift_flex_check(monkeypatch)
    torch._dynamo.reset()


def documents(rows, length):
    """Number the documents of each row, the rest of it being one more."""
    numbers = [
        torch.repeat_interleave(torch.arange(len(row) + 1), torch.tensor([*row, length - sum(row)]))
        for row in rows
    ]
    return torch.stack(numbers).int()


def dense(query, key, value, numbers, window, softcap, scaling):
    """Attend by the definition, with all scores."""
    length, shared = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(length)
    seen = (place[None] <= place[:, None]) & (numbers[:, :, None] == numbers[:, None, :])
    if window:
        seen &= place[:, None] - place[None] < window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


SHAPES: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "unlike blocks": ([(5, 300, 17, 100), (128, 128, 40)], 450),
    "whole blocks": ([(384,)], 384),
    "less than a block": ([(3, 4)], 9),
}
IN_EACH_RUN = {
    ("unlike blocks", 0, 2.0),
    ("unlike blocks", 200, None),
    ("whole blocks", 50, 2.0),
    ("less than a block", 0, None),
}


CASES = [
    pytest.param(*case, marks=() if case in IN_EACH_RUN else pytest.mark.full)
    for case in product(SHAPES, (0, 50, 200), (None, 2.0))
]


@pytest.mark.parametrize(("shape", "window", "softcap"), CASES)
def test_flex_is_dense_softmax_with_its_gradients(on_cpu, shape, window, softcap):
    rows, length = SHAPES[shape]
    torch.manual_seed(0)
    numbers, count = documents(rows, length), len(rows)
    query, key, value = sources = [
        torch.randn(count, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)
    ]
    slope = torch.randn(count, length, 4, 8)
    expected = dense(query, key, value, numbers, window, softcap, 0.5)
    wanted = torch.autograd.grad(expected, sources, slope)
    attend = torch.compile(flex.attend, backend="aot_eager", fullgraph=True)
    found, _ = attend(
        torch.nn.Identity(),
        query,
        key,
        value,
        numbers[:, None, None],
        scaling=0.5,
        sliding_window=window,
        softcap=softcap,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    made = torch.autograd.grad(found, sources, slope)
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [0, 1, 127, 128, 129, 300])
def test_the_mask_of_blocks_is_that_of_single_scores(window):
    """What torch finds by looking at every score, where the blocks are made of a few numbers."""
    from torch.nn.attention.flex_attention import create_block_mask

    numbers = documents([(5, 300, 17, 100), (128, 128, 40), (256, 194)], 450)
    made = flex.block_mask(numbers, window)
    found = create_block_mask(made.mask_mod, 3, None, 450, 450, device="cpu")
    assert torch.equal(made.to_dense(), found.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(found, name)), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_gemma_2_is_the_same_with_flex_as_with_its_own_attention(on_cpu):
    batch, found = pack([(9, 7, 5), (4, 8, 9)], width=24), []
    for is_flex in (True, False):
        model = family("gemma2", attn_logit_softcapping=5.0).eval()
        if is_flex:
            use_flex(model)
        module = CausalLoss(model)
        loss = module(**loss_inputs(batch, CPU))
        loss.backward()
        found.append((loss.detach(), gradients(module)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


def test_answers_with_a_cache_are_the_same_with_flex():
    prompt = torch.tensor([[5, 6, 7, 8, 9, 10]])
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain, flexed = (family("gemma2", attn_logit_softcapping=5.0) for _ in range(2))
    use_flex(flexed)
    assert torch.equal(flexed.generate(prompt, **options), plain.generate(prompt, **options))


def test_flex_that_cannot_be_compiled_is_refused_by_field(monkeypatch):
    def refusing(graph, inputs):
        raise RuntimeError("no such kernel")

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=refusing)
    monkeypatch.setattr(flex, "_compiled", lambda device_type: compiled)
    query = torch.randn(1, 2, 16, 8)
    numbers = torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"^spec\.training\.attention: .*no such kernel\); use"):
        flex.attend(torch.nn.Module(), query, query, query, numbers)
