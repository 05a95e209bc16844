"""What DDP and FSDP2 are built with is what the configuration says, whatever it says.

FSDP2 is built over any number of ranks in this one process: torch's fake process group answers
every collective at once, with no data, and shapes and types are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune_trainer.config import AutoConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.loss import CausalLoss
from finetune_trainer.strategies import (
    create,
    emulation_warning,
    refuse_unsupported,
    single_process_warning,
)
from finetune_trainer.strategies.ddp import DdpStrategy
from finetune_trainer.strategies.fsdp import FsdpStrategy
from finetune_trainer.world import World
from support.launch.launches import train_config
from support.strategies.parity import Case, build_model, case_config, inputs_of, prepared

ARITHMETIC = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
FOLDER = Path("unused")


@contextmanager
def one_of(world_size: int) -> Iterator[World]:
    """Yield rank 0 of so many ranks of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        group = dist.group.WORLD
        yield World(0, 0, world_size, torch.device("cpu"), group, None, None)
    finally:
        dist.destroy_process_group()


# A group that answers at once has no time-out to set.
@pytest.mark.filterwarnings("ignore:Set timeout is now only supported for either nccl or gloo")
@settings(max_examples=12, deadline=None)
@given(
    shards=st.sampled_from([2, 4]),
    replicas=st.sampled_from([1, 2]),
    precision=st.sampled_from(sorted(ARITHMETIC)),
    method=st.sampled_from(["full", "lora"]),
    reshards=st.booleans(),
    offload=st.sampled_from(["none", "cpu"]),
)
def test_fsdp_is_built_as_configured(
    shards: int, replicas: int, precision: str, method: str, reshards: bool, offload: str
) -> None:
    chosen = {"replicas": replicas, "reshard_after_forward": reshards, "offload": offload}
    size = shards * replicas
    case = Case(
        "", {"type": "fsdp", **chosen}, method, precision, micro_batch_size=1, rows=2 * size
    )
    with one_of(size) as world:
        strategy = prepared(case, FOLDER, world)
        assert isinstance(strategy, FsdpStrategy)
        groups = [m for m in strategy.model.modules() if isinstance(m, FSDPModule)]
        _, _, layer, _ = groups  # the root, the embedding and the head are the others

        names = ("shard",) if replicas == 1 else ("replica", "shard")
        placements = (Shard(0),) if replicas == 1 else (Replicate(), Shard(0))
        for parameter in strategy.model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.device_mesh.mesh_dim_names == names
            assert parameter.device_mesh["shard"].size() == shards
            assert parameter.placements == placements

        seen: dict[str, Any] = {}
        layer.register_forward_hook(lambda *given: seen.update(output=given[2]))
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=False), scale=1.0)
        assert seen["output"].dtype == ARITHMETIC[precision]
        trained = [p for p in layer.parameters() if p.requires_grad]
        assert all(isinstance(p, DTensor) for p in trained) == reshards
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=True), scale=1.0)
        wide = torch.float64 if precision == "fp64" else torch.float32
        for parameter in strategy.model.parameters():
            assert isinstance(parameter, DTensor), "weights are divided again before the step"
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                assert parameter.grad.dtype == parameter.dtype == wide
        assert ("scaler" in strategy.state()) == (precision == "fp16")


def test_retained_layers_stay_gathered_between_micro_batches() -> None:
    case = Case("", {"type": "fsdp", "reshard_after_forward": False})
    with one_of(2) as world:
        strategy = prepared(case, FOLDER, world)
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=False), scale=1.0)
        assert not any(isinstance(p, DTensor) for p in strategy.model.parameters())
        strategy.backward(strategy.forward(inputs_of(case, 0), is_last=True), scale=1.0)
        assert all(isinstance(p, DTensor) for p in strategy.model.parameters())


@pytest.mark.parametrize("precision", sorted(ARITHMETIC))
def test_one_process_computes_in_the_precision_asked_for(precision: str) -> None:
    case = Case("", {"type": "ddp"}, precision=precision)
    strategy = prepared(case, FOLDER, World(0, 0, 1, torch.device("cpu")))
    assert isinstance(strategy, DdpStrategy)
    seen: dict[str, Any] = {}
    last = strategy.model.get_submodule("model.layers.1.mlp.down_proj")
    last.register_forward_hook(lambda *given: seen.update(output=given[2]))
    strategy.backward(strategy.forward(inputs_of(case, 0), is_last=True), scale=1.0)
    assert seen["output"].dtype == ARITHMETIC[precision]
    assert ("scaler" in strategy.state()) == (precision == "fp16")


def test_what_is_trained_in_too_few_bits_is_refused() -> None:
    case = Case("", {"type": "ddp"})
    config = case_config(replace(case, precision="fp64"), FOLDER, 1)
    strategy = create(config, World(0, 0, 1, torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"precision fp64: the trained parameter model\.embed"):
        strategy.prepare(CausalLoss(build_model(case)))


def test_fsdp_on_one_process_is_refused_unless_it_goes_on_there() -> None:
    world = World(0, 0, 1, torch.device("cpu"))
    case = Case("", {"type": "fsdp"})
    with pytest.raises(ConfigError, match=r"strategy\.type fsdp needs at least two processes"):
        create(case_config(case, FOLDER, 1), world)


def test_only_explicit_settings_are_refused_before_auto_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    explicit = train_config(
        FOLDER,
        world={"nproc_per_node": 1, "device": "cuda"},
        strategy={"type": "fsdp"},
        training={"precision": "bf16"},
    )
    for auto, message in (
        (None, "Tesla V100 has no bf16"),
        (AutoConfig(settings=("precision",)), "fsdp needs at least two processes"),
        (AutoConfig(settings=("precision", "strategy")), None),
    ):
        config = explicit.model_copy(update={"auto": auto})
        with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            refuse_unsupported(config)


def test_going_on_with_one_process_is_said_aloud() -> None:
    alone, several = ({"nproc_per_node": n} for n in (1, 2))
    fsdp = {"type": "fsdp"}
    said = single_process_warning(train_config(FOLDER, world=alone, strategy=fsdp))
    assert said is not None
    assert said.startswith("spec.strategy.type fsdp continues with one process")
    assert single_process_warning(train_config(FOLDER, world=several, strategy=fsdp)) is None
    assert single_process_warning(train_config(FOLDER, world=alone)) is None


@pytest.mark.parametrize("replicas", [3, 4])
def test_replicas_that_leave_nothing_to_shard_are_refused(replicas: int) -> None:
    case = Case("", {"type": "fsdp", "replicas": replicas}, micro_batch_size=1)
    with (
        one_of(4) as world,
        pytest.raises(ConfigError, match=rf"spec\.strategy\.replicas {replicas}"),
    ):
        create(case_config(case, FOLDER, 4), world)


@pytest.mark.parametrize("feature", ["avx512_bf16", "amx_bf16", None])
def test_bf16_on_a_cpu_that_emulates_it_is_warned_of(feature: str | None) -> None:
    features = {"avx2": True, "avx512_bf16": False, "amx_bf16": False}
    if feature:
        features[feature] = True
    asked = train_config(FOLDER, training={"precision": "bf16"})
    assert (emulation_warning(asked, features) is not None) == (feature is None)
    assert emulation_warning(asked, {"sve": True}) is None
    wide = train_config(FOLDER, training={"precision": "fp32"})
    assert emulation_warning(wide, features) is None
