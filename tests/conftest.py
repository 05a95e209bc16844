"""What tests share: no network, no time limit for an example, a disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests never reach for a hub; set before any library reads them, and inherited by every process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# An example takes milliseconds, but may have to wait for the other tests that run.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"a tmpfs cannot be mounted here: {str(reason).strip()}")
    yield disk
    # Lazy, as a process that was killed a moment ago may still be on its way out.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
