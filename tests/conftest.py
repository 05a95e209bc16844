"""What tests share: no network, their order, no time limit for an example, a disk soon full."""

import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from run_order import sort_files, tell_run
from support.azureml.azureml_fixtures import stand_in, stand_in_of_module

__all__ = ["stand_in", "stand_in_of_module"]  # fixtures of several modules

# Assertions of the suite for backends tell their values, too.
pytest.register_assert_rewrite("finetune_operator.testing")

# Tests never reach for a hub; set before any library reads them, and inherited by every process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Workers share the cores already: more threads each would wait for one another, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example takes milliseconds, but may have to wait for the other tests that run.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(trylast=True)  # what groups tests by their fixtures comes before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with what takes longest, so that none is left with it at the end."""
    for item in items:
        tell_run(item)
    if hasattr(config, "workerinput"):
        sort_files(items, config.rootpath)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause garbage collection while imports create a million objects, then run it less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


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
