"""What CUDA's libraries find in the environment of a rank."""

import os
import subprocess
import sys

import pytest

from finetune_trainer.config import TrainConfig
from finetune_trainer.launch.cuda_environment import cuda_environment
from support.launch.launches import train_config


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return train_config(tmp_path)


def on_a_gpu(config: TrainConfig, **training: bool) -> TrainConfig:
    world = config.world.model_copy(update={"device": "cuda"})
    training = {"expandable_segments": False, "deterministic": False, **training}
    return config.model_copy(
        update={"world": world, "training": config.training.model_copy(update=training)}
    )


def test_a_cpu_changes_nothing(config: TrainConfig) -> None:
    asked = {"expandable_segments": True, "deterministic": True}
    cpu = config.model_copy(update={"training": config.training.model_copy(update=asked)})
    assert cuda_environment(cpu, {}) == {}


@pytest.mark.parametrize(
    ("environ", "added"),
    [
        pytest.param({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, id="nothing is set"),
        pytest.param(
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            id="something else, by the older name",
        ),
        pytest.param({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}, id="the user's own"),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(
    config: TrainConfig, environ: dict[str, str], added: dict[str, str]
) -> None:
    assert cuda_environment(on_a_gpu(config, expandable_segments=True), environ) == added


def test_torch_understands_the_allocators_settings(config: TrainConfig) -> None:
    made = cuda_environment(on_a_gpu(config, expandable_segments=True), {})
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **made},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == made["PYTORCH_ALLOC_CONF"]


def test_libraries_add_up_in_one_order_where_that_is_asked_for(config: TrainConfig) -> None:
    asked = on_a_gpu(config, deterministic=True)
    assert cuda_environment(asked, {"NCCL_ALGO": "Tree"}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert cuda_environment(asked, {}) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }
