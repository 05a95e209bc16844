"""A rank that gets nowhere: every rank writes its stacks, and the attempt ends by itself."""

from pathlib import Path

import pytest

from finetune_trainer.config import ExitCode, FailureClass
from support.launch.launches import launch, train_config

HANG_SECONDS = 20
"""Long enough for ranks to import torch and to meet on a busy machine."""


@pytest.mark.full
def test_when_one_rank_hangs_all_write_their_stacks_and_end(tmp_path: Path) -> None:
    config = train_config(tmp_path, control={"hang_seconds": HANG_SECONDS})
    started = launch(config, "hang")
    assert started.wait() == ExitCode.ERROR
    words = started.termination
    assert words.failure_class is FailureClass.HUNG
    assert words.message.startswith(
        f"no progress for {HANG_SECONDS} s in phase Training after step 0; "
    )
    for rank, standing in ((0, "in barrier"), (1, "in hang")):
        stacks = Path(config.run_dir) / f"logs/attempt-1.1/rank-{rank}.stacks.txt"
        assert standing in stacks.read_text()
        [began, ended] = [
            event["time"] for event in started.events(rank) if event["event"] in ("phase", "ended")
        ]
        assert ended - began < 40


@pytest.mark.full
def test_a_rank_that_holds_the_interpreter_lock_is_called_hung(tmp_path: Path) -> None:
    config = train_config(
        tmp_path, world={"nproc_per_node": 1}, control={"hang_seconds": HANG_SECONDS}
    )
    started = launch(config, "hold_the_lock")
    assert started.wait() == ExitCode.ERROR
    words = started.termination
    assert words.failure_class is FailureClass.HUNG
    assert words.message.startswith("rank 0 made no progress while one of its threads held")
    stacks = Path(config.run_dir) / "logs/attempt-1.1/rank-0.stacks.txt"
    assert "in wait_with_the_lock" in stacks.read_text()
