"""Test 17 of the trainer's plan: no micro-batch makes the host wait for the device."""

from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_trainer import evaluation, loop, numerics
from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.config import DataReport
from finetune_trainer.control import Agreement, StopSignal
from finetune_trainer.data.batch import collate, eval_batches
from finetune_trainer.data.plan import DataPlan
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.data.token_store import StoredTokens
from finetune_trainer.evaluation import held_out_loss
from finetune_trainer.model import attention
from finetune_trainer.model.loss import loss_inputs
from finetune_trainer.model.prepare import prepare_model
from finetune_trainer.numerics import DeferredMetrics
from finetune_trainer.stopping import Patience
from finetune_trainer.strategies import create
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.launches import train_config
from support.model.fake_device import DEVICE, FakeDevice, MovedToHostError, on_host
from support.model.model_families import family, pack

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
    return prepare_model(family(name).to(device).train(), config, device), batch


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


class Untouched:
    """The checkpoints of a run that never saves."""

    is_enabled = True
    cadence = SimpleNamespace(is_due=lambda step: False)
    wants_save = staticmethod(lambda step, now: False)
    poll = staticmethod(lambda: None)
    save = staticmethod(lambda step, state, eval_loss: None)


class Arrivals:
    """Stands for a CUDA event."""

    def record(self):
        pass


class AgreedWait(DeferredMetrics):
    """Reads a step's numbers without values: the one place where the host may wait."""

    reports = 0

    def report(self):
        if self._in_flight is not None:
            assert self._in_flight.arrived is not None
            self._in_flight = None
            self.reports += 1


def rows_of(lengths):
    tokens = np.concatenate([np.arange(3, 3 + length, dtype=np.int32) for length in lengths])
    sizes = np.asarray(lengths, np.int32)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    is_label = np.ones(len(tokens), np.bool_)
    is_label[first] = False
    arrays = {
        "tokens": tokens,
        "is_label": is_label,
        "lengths": sizes,
        "label_counts": sizes - 1,
        "rows": np.arange(1, len(sizes) + 1),
    }
    return TokenDataset([(StoredTokens(arrays, DataReport(), "rows"), 1.0)])


def attend_as_on_cuda(rows, bounds, window, dropout, scaling):
    return attention._attend_at_once(rows, bounds, len(rows[0]), window, scaling)


def fake_steps(tmp_path, monkeypatch, planted=None, **training):
    """Make two steps of two micro-batches, with an evaluation after each; return the run."""
    device = FakeDevice()
    monkeypatch.setattr(numerics, "is_on_gpu", lambda values: isinstance(values, FakeTensor))
    monkeypatch.setattr(torch.cuda, "Event", Arrivals)
    monkeypatch.setattr(loop, "collate", on_host(collate))
    monkeypatch.setattr(loop, "loss_inputs", device.fed_by(loss_inputs))
    monkeypatch.setattr(evaluation, "eval_batches", on_host(eval_batches))
    monkeypatch.setattr(evaluation, "loss_inputs", device.fed_by(loss_inputs))
    monkeypatch.setattr(attention, "_attend_each", attend_as_on_cuda)
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        data={"max_seq_len": 24, "packing": True},
        training={
            **{"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "max_grad_norm": 1.0},
            **{"eval_every_steps": 1, **training},
        },
    )
    world = World(rank=0, local_rank=0, world_size=1, device=DEVICE)
    dataset = rows_of([20, 12, 9, 18, 6, 15, 21, 8, 11, 17])
    model = family("llama").train()
    if config.training.optimizer == "adamw8bit":
        model = model.bfloat16()
    module = prepare_model(model, config, DEVICE)
    device.put(module)
    strategy = create(config, world)
    telemetry = Telemetry(config, rank=0, world_size=1)
    # An evaluation ends with a number for the host: it waits for the device here, once a pass.
    waits: list[str] = []
    monkeypatch.setattr(World, "sum", staticmethod(lambda values: Awaited.of(values, waits)))
    with closing(telemetry), device.active():
        strategy.prepare(module)
        run = loop.Run(
            config=config,
            world=world,
            strategy=strategy,
            dataset=dataset,
            plan=DataPlan.of(dataset, config),
            store=cast(CheckpointStore, Untouched()),
            telemetry=telemetry,
            stop=StopSignal(),
            agreement=Agreement(world),
            fence=None,
            patience=Patience(None),
            evaluate=partial(held_out_loss, strategy, dataset, world, lambda: False, round_to=8),
            notes=dict,
            pad_to=24,
            pad_id=0,
            flops_of_rows=None,
        )
        run.numbers = AgreedWait(world, run.agreement, telemetry, str)
        if planted is not None:
            step = strategy.step
            monkeypatch.setattr(strategy, "step", lambda *args: planted(step(*args)))
        loop.train(run, 0)
    return run, waits


class Awaited:
    """Totals of an evaluation, whose `tolist` is noted; other sums stay what they are."""

    def __init__(self, waits):
        self._waits = waits

    @classmethod
    def of(cls, values, waits):
        return values if values.ndim == 0 else cls(waits)

    def tolist(self):
        self._waits.append("evaluation")
        return [1.0, 1.0]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"precision": "bf16"}, id="bf16"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param({"precision": "fp32"}, id="fp32"),
        pytest.param({"precision": "bf16", "optimizer": "adamw8bit"}, id="8-bit moments"),
    ],
)
def test_the_host_waits_in_a_step_for_nothing_but_late_numbers(training, tmp_path, monkeypatch):
    run, waits = fake_steps(tmp_path, monkeypatch, **training)
    assert run.config.gradient_accumulation_steps == 2
    assert run.numbers.reports == 2
    assert waits == ["evaluation"] * 2


PLANTED = {
    "item": lambda norm: norm.item(),
    "bool": lambda norm: bool(norm > 1),
    "tolist": lambda norm: norm[None].tolist(),
    "nonzero": lambda norm: norm[None].nonzero(),
    "an index by a mask": lambda norm: norm[None][norm[None] > 1],
    "cpu": lambda norm: norm.cpu(),
    "numpy": lambda norm: norm.numpy(),
    "to the host": lambda norm: norm.to("cpu"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_wait_fails_the_step(planted, tmp_path, monkeypatch):
    waiting = (MovedToHostError, DataDependentOutputException, DynamicOutputShapeException)
    with pytest.raises(waiting):
        fake_steps(tmp_path, monkeypatch, PLANTED[planted], precision="fp16")
