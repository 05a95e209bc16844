"""A disk that is full while a checkpoint is written costs that checkpoint and nothing else."""

from pathlib import Path

import pytest

from finetune_trainer.checkpoint.commit import ledger
from finetune_trainer.errors import CheckpointError, ConfigError
from support.checkpoint.checkpoint_fixtures import (
    make_state,
    open_store,
    run_processes,
    steps_in,
    tensors_differ,
)

SMALL, LARGE = 64, 1024  # 32 KiB and 8 MiB


def test_training_survives_a_full_disk_and_saves_again_when_there_is_room(
    small_disk: Path,
) -> None:
    root = small_disk / "checkpoints"
    warnings: list[str] = []
    store = open_store(root, warnings)
    store.restore(make_state(0, size=SMALL))
    store.save(1, make_state(1, size=SMALL))
    store.save(2, make_state(2, size=LARGE))
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.wait()

    assert len(warnings) == 1
    assert "the last committed one is step 1" in warnings[0]
    assert steps_in(root) == ["step-1"]
    store.save(3, make_state(3, size=SMALL))
    store.wait()
    assert [ref.step for ref in ledger(root)] == [3, 1]


def test_a_disk_too_small_is_refused_before_training(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 9 MiB and .*keep 2 needs .* 2\d MiB more"):
        open_store(small_disk / "checkpoints").check_space(make_state(0, size=LARGE))


def save_beyond_the_limit(root: Path) -> None:
    store = open_store(root)
    store.save(1, make_state(1, size=SMALL))
    store.save(2, make_state(2, size=LARGE))
    with pytest.raises(CheckpointError, match=r"step 2 was not written \(rank 0: File too large"):
        store.wait()


def test_a_write_that_fails_half_way_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert run_processes(save_beyond_the_limit, root, max_file_bytes={0: 2**20}) == [0]
    state = make_state(0, size=SMALL)
    open_store(root).restore(state)
    assert tensors_differ(state, make_state(1, size=SMALL)) == []
    assert steps_in(root) == ["step-1"]
