"""A short series of random kills: what `make kill-series` runs fifty of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support" / "launch" / "kill_series.py"


@pytest.mark.full
@pytest.mark.timeout(900)  # some twenty starts of two ranks, each of which imports torch anew
def test_killed_runs_end_with_the_weights_of_unbroken_ones() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "3", "7"],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "3 of 3 correct resumes, 2 of 2 restarts, 6 of 6 clean exits"
    )
