"""What computes attention inside documents on this device gives what a dense mask gives."""

import pytest
import torch

from device_runs import Device
from finetune_trainer.model.attention import isolate_documents
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from model_families import family, gradients, pack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "mistral with a window"])
def test_the_kernel_of_the_device_gives_the_gradients_of_the_masked_one(
    name: str, device: Device
) -> None:
    batch, found = pack([(19, 17, 5), (14, 8, 19)]), []
    for is_isolating in (True, False):
        model = family(name).to(device)
        if is_isolating:
            assert isolate_documents(model, torch.device(device), torch.bfloat16)
        module = CausalLoss(model)
        with torch.autocast(device, dtype=torch.bfloat16):
            module(**loss_inputs(batch, torch.device(device))).backward()
        found.append(torch.cat([one.flatten() for one in gradients(module).values()]))
    assert (found[0] - found[1]).norm() / found[1].norm() < 3e-2
