"""Ranks that hold the same tensors divide them, so that each tensor is copied on one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune_trainer.checkpoint.division import own_part
from finetune_trainer.memory.host import pinned_size

RANKS = 8


def state_of_a_model() -> dict[str, Any]:
    """Return the state of full fine-tuning with AdamW, without values."""
    shapes = [(128, 64), (128,), *[(64, 64), (64, 256), (64,)] * 6]
    weights = {f"layer.{i}": torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    moments = {
        f"{name}.{kind}": torch.empty_like(weight)
        for name, weight in weights.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"{name}.step": torch.empty((), device="meta") for name in weights}
    return {"model": weights, "optimizer": {**moments, **steps}, "scaler": {"scale": 2.0}}


def names(state: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (section, name)
        for section, part in state.items()
        for name, value in part.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.fixture(autouse=True)
def exact_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin no powers of two, as on a GPU."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_round_threshold_mb:1")


def test_a_rank_of_ddp_copies_an_eighth_and_at_most_one_tensor() -> None:
    state = state_of_a_model()
    whole = pinned_size(state, "meta")
    largest = max(
        tensor.numel() * tensor.element_size()
        for part in (state["model"], state["optimizer"])
        for tensor in part.values()
    )
    parts = [own_part(state, rank, RANKS) for rank in range(RANKS)]
    assert all(pinned_size(part, "meta") <= whole / RANKS + largest for part in parts)
    assert sum(len(names(part)) for part in parts) == len(names(state)), "one rank for each tensor"
    assert set().union(*map(names, parts)) == names(state)
    assert all(part["scaler"] == {"scale": 2.0} for part in parts), "values stay on every rank"


def test_one_process_copies_the_whole_state() -> None:
    state = state_of_a_model()
    assert own_part(state, 0, 1) == state


def test_a_rank_without_tensors_of_a_section_has_no_empty_section() -> None:
    state = {"model": {"weight": torch.zeros(4)}, "optimizer": {}}
    assert own_part(state, 1, 2) == {"optimizer": {}}


def test_replicas_of_fsdp_divide_the_shards() -> None:
    """2 replicas of 2 shards: each shard has two holders, and one copies it."""
    seen: dict[tuple[str, int], int] = {}
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
            local = torch.zeros(4, 3)
            weights = {
                f"weight.{i}": DTensor.from_local(local, mesh, [Replicate(), Shard(0)])
                for i in range(6)
            }
            _, shard = mesh.get_coordinate() or (0, 0)
            part = own_part({"model": weights}, rank, 4)["model"]
            assert len(part) == 3
            for name in part:
                seen[name, shard] = seen.get((name, shard), 0) + 1
        finally:
            dist.destroy_process_group()
    assert seen == {(f"weight.{i}", shard): 1 for i in range(6) for shard in range(2)}


def test_shards_without_replicas_are_not_divided() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)])
        assert own_part({"model": {"weight": weight}}, 1, 2)["model"].keys() == {"weight"}
    finally:
        dist.destroy_process_group()
