"""Test 4 of the trainer's plan: a packed batch is its documents, one at a time."""

import pytest
import torch

from finetune_trainer.model.loss import CausalLoss, loss_inputs
from support.model.model_families import FAMILIES, family, isolate, joined, pack, sequences

CPU = torch.device("cpu")
LENGTHS = (9, 2, 7, 5, 6)


def gradients(model, batches):
    """Return the summed loss and all gradients as one vector."""
    module = CausalLoss(model)
    module.zero_grad()
    losses = [module(**loss_inputs(batch, CPU)) for batch in batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return loss.item(), torch.cat(found)


def error(found, expected):
    (loss, gradient), (expected_loss, expected_gradient) = found, expected
    off = (gradient - expected_gradient).norm() / expected_gradient.norm()
    return abs(loss - expected_loss) / abs(expected_loss), off.item()


@pytest.mark.parametrize("is_isolating", [True, False], ids=["documents", "model's own mask"])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded_equals_one_document_at_a_time(name, is_isolating):
    batch = pack([LENGTHS], width=32)
    documents = sequences(batch, (*LENGTHS, 3))[:-1]
    model = family(name)
    expected = gradients(model.double(), [joined(batch, [[d]]) for d in documents])

    model = family(name).double()
    if is_isolating:
        assert isolate(model, torch.float64) == (name != "gemma2")
    packed = gradients(model, [batch])
    padded = gradients(model, [joined(batch, [[d] for d in documents])])
    in_rows = gradients(model, [joined(batch, [documents[:2], documents[2:]])])
    for found in (packed, padded, in_rows):
        assert max(error(found, expected)) <= 1e-6
    single = gradients(model.float(), [batch])
    assert max(error(single, expected)) <= 1e-6


@pytest.mark.parametrize("name", ["llama", "mistral with a window"])
def test_without_isolation_the_gradient_would_be_another_one(name):
    batch = pack([LENGTHS])
    documents = sequences(batch, LENGTHS)
    expected = gradients(family(name).double(), [joined(batch, [[d]]) for d in documents])
    leaking = type(batch).of(
        batch.input_ids,
        torch.arange(sum(LENGTHS))[None],
        batch.targets,
        tokens=batch.tokens,
    )
    assert error(gradients(family(name).double(), [leaking]), expected)[1] > 1e-1
