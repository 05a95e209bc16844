"""A rank that gets nowhere: every rank writes its stacks, and the attempt ends by itself."""

from pathlib import Path

import pytest

from finetune_trainer.config import ExitCode, FailureClass
from launches import launch, train_config


@pytest.mark.full
def test_when_one_rank_hangs_all_write_their_stacks_and_end(tmp_path: Path) -> None:
    # Long enough for the ranks to import torch and to meet on a busy machine.
    config = train_config(tmp_path, control={"hang_seconds": 20})
    started = launch(config, "hang")
    assert started.wait() == ExitCode.ERROR
    words = started.termination
    assert words.failure_class is FailureClass.HUNG
    assert words.message.startswith("no progress for 20 s in phase Training after step 0; ")
    for rank, standing in ((0, "in barrier"), (1, "in hang")):
        assert standing in (tmp_path / "run" / "logs" / f"rank-{rank}.stacks.txt").read_text()
        [began, ended] = [
            event["time"] for event in started.events(rank) if event["event"] in ("phase", "ended")
        ]
        assert ended - began < 40
