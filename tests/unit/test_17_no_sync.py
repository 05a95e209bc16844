"""Test 17 of the trainer's plan: no micro-batch makes the host wait for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.model.prepare import prepare_model
from launches import train_config
from model_families import family, pack

# Operators whose result the host must have: each one makes it wait on a GPU.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class Waits(TorchDispatchMode):
    """Note every operator that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if name.split(".")[0] in _WAITING:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def prepared(name, device, tmp_path, how="none"):
    config = train_config(
        tmp_path,
        training={"precision": "bf16"},
        strategy={"activation_checkpointing": how},
    )
    batch = pack([(9, 7, 5)], width=24)
    return prepare_model(family(name).to(device).train(), config, device, lambda: batch), batch


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama", "mistral with a window", "granite"])
def test_a_micro_batch_reads_no_value_from_the_device(name, how, tmp_path):
    device = torch.device("cpu")
    module, batch = prepared(name, device, tmp_path, how)
    inputs = loss_inputs(batch, device)
    with Waits() as waits:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = module(**inputs)
            (loss * 0.5).backward()
    assert waits.names == []


def test_the_watch_sees_an_item_and_a_branch():
    with Waits() as waits:
        value = torch.ones(3)
        value.sum().item()
        if value.any():
            value.nonzero()
    assert waits.names == ["_local_scalar_dense", "_local_scalar_dense", "nonzero"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_micro_batch_never_waits_for_the_gpu(tmp_path):
    device = torch.device("cuda")
    module, batch = prepared("llama", device, tmp_path)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = module(**loss_inputs(batch, device))
            (loss * 0.5).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
