"""Two jobs, their attempts, orphans and whoever ends them, in random order on one folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoint import writers
from support.checkpoint.lagging_layer import lagging_layer
from support.launch.launches import clean_environment

# These seeds have every act of `writers.Run`; `make interleavings` runs more.
NUM_LAGGING, NUM_LOCAL = 24, 8


def interleave(*arguments: str) -> str:
    """Run interleavings, and return what is said of those that went wrong."""
    done = subprocess.run(
        [sys.executable, writers.__file__, *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.full
def test_no_interleaving_lets_two_write_or_loses_a_commit(tmp_path: Path) -> None:
    """On layers whose listings lag, and that have no rename, no lock, no exclusive create."""
    with lagging_layer(tmp_path):
        pass  # or skip
    if said := interleave("0", str(NUM_LAGGING)):
        pytest.fail(f"tests/support/checkpoint/writers.py SEED 1 repeats one of these\n{said}")


@pytest.mark.full
def test_no_interleaving_on_a_local_disk_does_either() -> None:
    if said := interleave("1003", str(NUM_LOCAL), "--local"):
        pytest.fail(
            f"tests/support/checkpoint/writers.py --local SEED 1 repeats one of these\n{said}"
        )
