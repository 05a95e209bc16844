"""What computes attention inside documents on this device gives what a dense mask gives."""

import pytest
import torch

from finetune_trainer.model.attention import use_documents
from finetune_trainer.model.kernels import Card, choose_attention, use_flex
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.sizing.kernels import Kernel
from support.launch.device_runs import Device
from support.model.model_families import family, gradients, lift_flex_check, pack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("llama", Kernel.VARLEN), ("mistral with a window", Kernel.VARLEN), ("gemma2", Kernel.FLEX)],
)
def test_the_kernel_of_the_device_gives_the_gradients_of_the_masked_one(
    name: str, kernel: Kernel, device: Device
) -> None:
    if kernel is Kernel.FLEX and device == "cpu":
        pytest.skip("torch computes no gradients of flex on a CPU")
    batch, found = pack([(19, 17, 5), (14, 8, 19)]), []
    for is_isolating in (True, False):
        model = family(name, head_dim=16).to(device)
        if is_isolating:
            card = Card.of(torch.device(device))
            chosen = choose_attention(model, card, torch.bfloat16, warn=pytest.fail)
            assert chosen is kernel
        module = CausalLoss(model)
        with torch.autocast(device, dtype=torch.bfloat16):
            module(**loss_inputs(batch, torch.device(device))).backward()
        found.append(torch.cat([one.flatten() for one in gradients(module).values()]))
    assert (found[0] - found[1]).norm() / found[1].norm() < 3e-2


@pytest.mark.parametrize("name", ["llama", "mistral with a window"])
def test_flex_varlen_and_sdpa_give_one_another_s_gradients(
    name: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        lift_flex_check(monkeypatch)
    batch, found = pack([(19, 17, 5), (14, 8, 19)]), []
    for use in (use_flex, use_documents, None):
        model = family(name, head_dim=16).to(device)
        if use is not None:
            use(model)
        module = CausalLoss(model)
        with torch.autocast(device, dtype=torch.bfloat16):
            module(**loss_inputs(batch, torch.device(device))).backward()
        found.append(torch.cat([one.flatten() for one in gradients(module).values()]))
    flex, varlen, sdpa = found
    for one, other in ((flex, varlen), (flex, sdpa), (varlen, sdpa)):
        assert (one - other).norm() / other.norm() < 3e-2
