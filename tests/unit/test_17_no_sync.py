"""Test 17 of the trainer's plan: no micro-batch makes the host wait for the device."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import StopSignal
from finetune_trainer.gpu import device_clock
from finetune_trainer.launch.claim import claim_folders
from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.phases import PhaseClock
from finetune_trainer.telemetry.slots import Block
from finetune_trainer.world import World
from launches import train_config
from model_families import family, pack
from text_fixtures import tiny_model

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


# Where the host looks at what a step computed, it has arrived: `LateNumbers` waits for it by event.
_WITHOUT_WAITING = set(TimedPhase) - {
    TimedPhase.DATA_WAIT,
    TimedPhase.H2D,  # it searches on the CPU, before anything is moved
    TimedPhase.CHECKPOINT_BLOCKING,
    TimedPhase.EVAL,
    TimedPhase.LOGGING,
    TimedPhase.OTHER,
}


class WaitsOfSteps(Waits):
    """Note them with the phase that a rank is in, where it must not wait."""

    def __init__(self, phases):
        super().__init__()
        self.seen = set()
        self._phases = phases

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(self._phases.phase)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self._phases.phase not in _WITHOUT_WAITING:
            self.names.clear()
        assert self.names == [], f"in phase {self._phases.phase}"
        return result


def test_a_whole_step_reads_no_value_from_the_device(tmp_path):
    model = tiny_model(tmp_path / "base")
    rows = "".join(json.dumps({"text": f"Row {n} of these."}) + "\n" for n in range(8))
    (tmp_path / "train.jsonl").write_text(rows)
    made = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        model={"path": str(model)},
        method={"type": "lora", "lora": {"r": 2}},
        output={"format": "adapter"},
        data={"format": "text"},
        training={"global_batch_size": 4, "max_steps": 3},
    )
    fence = claim_folders(made, lambda: False)
    telemetry = Telemetry(made, rank=0, world_size=1)
    world = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    with WaitsOfSteps(telemetry.phases) as waits:
        run(made, world, StopSignal(), telemetry, fence)
    telemetry.close()
    computing = {TimedPhase.FORWARD, TimedPhase.BACKWARD, TimedPhase.OPTIMIZER}
    assert computing | {TimedPhase.COMM_EXPOSED} <= waits.seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_micro_batch_never_waits_for_the_gpu(tmp_path):
    device = torch.device("cuda")
    module, batch = prepared("llama", device, tmp_path)
    phases, taken = PhaseClock(Block.private()), []
    phases.follow(device_clock(device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            phases.enter(TimedPhase.FORWARD)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = module(**loss_inputs(batch, device))
            phases.enter(TimedPhase.BACKWARD)
            (loss * 0.5).backward()
            phases.enter(TimedPhase.LOGGING)
            taken.append(phases.take_marks())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for marks in taken:
        phases.count(marks)
