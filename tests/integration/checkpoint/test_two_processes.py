"""Two connected processes: one checkpoint, the same one for both, and no rank fails alone."""

import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from finetune_trainer.checkpoint.commit import verify
from finetune_trainer.errors import CheckpointError, ConfigError
from support.checkpoint.checkpoint_fixtures import (
    FINGERPRINT,
    State,
    make_state,
    open_store,
    run_processes,
    step_path,
    steps_in,
    tensors_differ,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIZE = 512  # the weight and its moment are 1 MiB each


def with_a_shard(group: "ProcessGroup", rank: int) -> State:
    """Return a replicated state and one tensor of which each rank holds half, as FSDP2 has them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    state = make_state(1, size=SIZE)
    half = torch.full((4, 3), float(rank))
    mesh = DeviceMesh.from_group(group, "cpu")
    state["model"]["sharded"] = DTensor.from_local(half, mesh, [Shard(0)])
    return state


def save_and_restore(group: "ProcessGroup", root: Path) -> None:
    rank = int(os.environ["RANK"])
    store = open_store(root, rank=rank, world_size=2, group=group)
    assert store.restore(make_state(0)) is None
    store.check_space(make_state(0))
    store.save(1, with_a_shard(group, rank), eval_loss=1.5)
    ref = store.wait()
    assert ref is not None
    assert (ref.step, ref.world_size, store.best) == (1, 2, ref)

    state = with_a_shard(group, 5)
    for section in ("model", "optimizer"):
        for tensor in state[section].values():
            tensor.zero_()
    store = open_store(root, rank=rank, world_size=2, group=group)
    manifest = store.restore(state)
    assert manifest is not None
    assert store.last == ref
    local = state["model"].pop("sharded").to_local()
    assert torch.equal(local, torch.full((4, 3), float(rank)))
    assert tensors_differ(state, make_state(1, size=SIZE)) == []
    assert state["trainer"] == make_state(1)["trainer"]


def load_what_is_refused(group: "ProcessGroup", root: Path) -> None:
    """Both come to the next collective, so neither waits for the other."""
    store = open_store(root, rank=int(os.environ["RANK"]), world_size=2, group=group)
    for folder, says in (
        ("record", r"names builtins\.print, which"),
        ("shard", "contains objects other than tensors"),
    ):
        with pytest.raises(ConfigError, match=says):
            store.load(root.parent / folder, make_state(0))
    group.barrier().wait()


def test_a_program_in_a_checkpoint_is_refused_by_both_ranks_alike(tmp_path: Path) -> None:
    store = open_store(tmp_path / "made")
    store.save(1, make_state(1))
    store.wait()
    for name in ("record", "shard"):
        shutil.copytree(step_path(tmp_path / "made", 1), tmp_path / name)
    (tmp_path / "record" / ".metadata").write_bytes(pickle.dumps(print))
    (shard,) = (tmp_path / "shard").glob("*.distcp")
    size = shard.stat().st_size
    shard.write_bytes(pickle.dumps(print).ljust(size, b"."))
    (tmp_path / "checkpoints").mkdir()
    assert run_processes(load_what_is_refused, tmp_path / "checkpoints", world_size=2) == [0, 0]


def test_two_ranks_restore_bit_for_bit_and_one_can_take_it_over(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert run_processes(save_and_restore, root, world_size=2) == [0, 0]

    manifest = verify(step_path(root, 1))
    shards = {name: d.size for name, d in manifest.files.items() if name.endswith(".distcp")}
    assert sorted(shards) == ["__0_0.distcp", "__1_0.distcp"]
    assert sum(shards.values()) < 2.1 * 2**20, "a replicated tensor is written once"
    assert max(shards.values()) < 1.1 * 2**20, "and both ranks share the work"

    alone = make_state(0, size=SIZE)
    alone["model"]["sharded"] = torch.zeros(8, 3)
    open_store(root).restore(alone)
    whole = alone["model"].pop("sharded")
    assert torch.equal(whole, torch.arange(2.0).repeat_interleave(4)[:, None].expand(8, 3))
    assert tensors_differ(alone, make_state(1, size=SIZE)) == []


def save_where_rank_1_cannot(group: "ProcessGroup", root: Path) -> None:
    rank = int(os.environ["RANK"])
    warnings: list[str] = []
    store = open_store(root, warnings, rank=rank, world_size=2, group=group)
    store.restore(make_state(0))
    store.save(1, make_state(1))
    store.save(2, make_state(2, size=SIZE))
    with pytest.raises(CheckpointError, match=r"step 2 was not written \(rank 1: File too large"):
        store.wait()
    assert len(warnings) == (1 if rank == 0 else 0)
    store.save(3, make_state(3))
    ref = store.wait()
    assert ref is not None
    assert ref.step == 3


def test_when_one_rank_cannot_write_both_know_and_training_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    codes = run_processes(save_where_rank_1_cannot, root, world_size=2, max_file_bytes={1: 300_000})
    assert codes == [0, 0]
    assert steps_in(root) == ["step-1", "step-3"]


def refuse_another_run(group: "ProcessGroup", root: Path) -> None:
    rank = int(os.environ["RANK"])
    other = FINGERPRINT.model_copy(update={"model": "another model"})
    store = open_store(root, rank=rank, world_size=2, group=group, fingerprint=other)
    with pytest.raises(ConfigError, match=r"with another model \(spec\.model\)"):
        store.restore(make_state(0))


def test_what_rank_0_refuses_every_rank_refuses(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    store = open_store(root)
    store.save(1, make_state(1))
    store.wait()
    assert run_processes(refuse_another_run, root, world_size=2) == [0, 0]
