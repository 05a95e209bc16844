"""The shortest series of random kills; `make kill-series` runs 50 times as many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "launch" / "kill_series.py"


@pytest.mark.full
@pytest.mark.timeout(600)  # some six starts of two ranks, each of which imports torch
def test_killed_runs_end_with_the_weights_of_unbroken_ones() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "1", "7"],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "1 of 1 correct resumes, 1 of 1 restarts, 2 of 2 clean exits"
    )
