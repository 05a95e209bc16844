"""Two connected ranks verify one checkpoint: each reads a part of it, and rank 0 finds faults."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune_trainer.checkpoint.commit import FileDigest, digest_file, read_manifest, verify
from finetune_trainer.checkpoint.shared_hashes import SharedHashes
from finetune_trainer.errors import CheckpointError
from support.checkpoint.checkpoint_fixtures import make_state, open_store, run_processes, step_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIZE = 256


class Reader:
    """Hashes files, and remembers which."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> FileDigest:
        self.read.append(path.name)
        return digest_file(path)


def verify_together(
    group: "ProcessGroup", folder: Path, ranks_on_node: int = 2, claim: Path | None = None
) -> list[str]:
    """Verify on both ranks; return what this one has read for it."""
    reader, rank = Reader(), int(os.environ["RANK"])
    hashes = SharedHashes(
        group, None, rank=rank, ranks_on_node=ranks_on_node, claim=claim, digest=reader
    )
    if rank == 0:
        hashes.lead(lambda confirm: verify(folder, confirm))
    else:
        hashes.help()
    return reader.read


def all_of_rank_0(folder: Path) -> list[str]:
    return sorted(read_manifest(folder).files)


def share(group: "ProcessGroup", root: Path) -> None:
    folder = step_path(root, 1)
    read = verify_together(group, folder)
    others: list[list[str]] = [[], []]
    import torch.distributed as dist

    dist.all_gather_object(others, read, group=group)
    assert sorted(others[0] + others[1]) == all_of_rank_0(folder), "each file once"
    assert {"__0_0.distcp", "__1_0.distcp"} - set(read), "neither reads both shards"


def refuse_damage(group: "ProcessGroup", root: Path) -> None:
    rank = int(os.environ["RANK"])
    warnings: list[str] = []
    store = open_store(root, warnings, rank=rank, world_size=2, group=group, ranks_on_node=2)
    manifest = store.restore(make_state(0, size=SIZE))
    assert manifest is not None
    assert manifest.step == 1, "the newest one is damaged"
    if rank == 0:
        assert "__1_0.distcp is damaged" in warnings[0]


def help_from_another_node(group: "ProcessGroup", root: Path) -> None:
    folder, claim = step_path(root, 1), root / ".finetune-claims" / "mark"
    if int(os.environ["RANK"]) == 0:
        claim.touch()
    group.barrier().wait()
    read = verify_together(group, folder, ranks_on_node=1, claim=claim)
    assert read, "it sees the claim, so both share"


def no_help_from_another_disk(group: "ProcessGroup", root: Path) -> None:
    """Rank 1 is on another node, and its own file of that name is another one."""
    rank, folder = int(os.environ["RANK"]), step_path(root, 1)
    read = verify_together(group, folder, ranks_on_node=1, claim=root / "elsewhere" / "a" / "mark")
    assert sorted(read) == (all_of_rank_0(folder) if rank == 0 else [])


def save_twice(group: "ProcessGroup", root: Path) -> None:
    store = open_store(root, rank=int(os.environ["RANK"]), world_size=2, group=group)
    store.restore(make_state(0))
    for step in (1, 2):
        store.save(step, make_state(step, size=SIZE))
        store.wait()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("shared") / "checkpoints"
    assert run_processes(save_twice, made, world_size=2) == [0, 0]
    return made


@pytest.mark.parametrize("act", [share, help_from_another_node, no_help_from_another_disk])
def test_ranks_that_see_the_same_files_share_them(act, root: Path) -> None:
    assert run_processes(act, root, world_size=2) == [0, 0]


def test_what_another_rank_finds_damaged_is_passed_over_as_before(root: Path) -> None:
    damaged = step_path(root, 2) / "__1_0.distcp"
    before = damaged.read_bytes()
    damaged.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is damaged"):
        verify(damaged.parent)
    assert run_processes(refuse_damage, root, world_size=2) == [0, 0]
