"""What tests of a device share: which one it is, and the inputs of their runs."""

import os
from pathlib import Path

import pytest

from support.launch.device_runs import Device, device_of_tests
from support.launch.tiny_run import write_inputs

_HERE = Path(__file__).parent
_LEFT_TO_GPU_CHECK = pytest.mark.skip(
    reason="needs a GPU, or `make gpu-check DEVICE=cpu`: other tests show this on a CPU"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let libraries warn here: what they say differs with the card, its driver and compilers.

    What tests elsewhere show on a CPU already is left to `make gpu-check`, which names the device.
    """
    is_one_run_of_many = "FINETUNE_TEST_DEVICE" not in os.environ and device_of_tests() == "cpu"
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.filterwarnings("default"))
            if is_one_run_of_many and item.get_closest_marker("full"):
                item.add_marker(_LEFT_TO_GPU_CHECK)


@pytest.fixture(scope="session")
def device() -> Device:
    """The device that `make gpu-check` names."""
    return device_of_tests()


@pytest.fixture(scope="session")
def inputs(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `train.jsonl` and `eval.jsonl`; the model is wider for a GPU."""
    folder: Path = tmp_path_factory.mktemp("inputs")
    return write_inputs(folder, hidden_size=1024 if device == "cuda" else 64)
