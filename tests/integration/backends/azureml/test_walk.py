"""`make run-azureml` as docs/how-to/azure-ml.md shows it, with the real small model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.azureml.walk_azureml import ASSETS

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "how-to" / "azure-ml.md"

pytestmark = [
    pytest.mark.full,
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ASSETS / "model").is_dir(),
        reason="the quickstart's model is not there; run: make quickstart-assets",
    ),
]


def test_the_walk_ends_as_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "support" / "azureml" / "walk_azureml.py"),
            str(tmp_path / "walk"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # How many lines tell of the progress depends on the machine.
    wanted, found = (
        [line for line in text.splitlines() if not re.match(r"attempt \d+: ", line)]
        for text in (shown, done.stdout)
    )
    assert len(found) == len(wanted), done.stdout
    for one, other in zip(found, wanted, strict=True):
        pattern = re.escape(other).replace("…", ".*").replace("\\ ", " ")
        assert re.fullmatch(pattern, one), (one, other)
