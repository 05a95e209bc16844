"""What every test shares: no network, and one process-starting test at a time."""

import os
from pathlib import Path

import pytest

# Tests never reach for a hub; set before any library reads them, and inherited by every process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_INTEGRATION = Path(__file__).parent / "integration"


# First, as xdist writes the group into the test's id in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start processes on one xdist worker, so that they do not compete."""
    for item in items:
        if _INTEGRATION in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))
