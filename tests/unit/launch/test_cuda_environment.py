"""What CUDA's libraries find in the environment of a rank."""

import os
import subprocess
import sys

import pytest

from finetune_trainer.config import TrainConfig
from finetune_trainer.launch import cuda_environment as cuda_environment_module
from finetune_trainer.launch.cuda_environment import cuda_environment
from support.launch.launches import train_config

EXACT = "pinned_max_round_threshold_mb:1"
THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


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
        pytest.param({}, {"PYTORCH_ALLOC_CONF": f"{EXACT},expandable_segments:True"}, id="unset"),
        pytest.param(
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:64,{EXACT},expandable_segments:True"},
            id="another setting, by the older name",
        ),
        pytest.param(
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            {"PYTORCH_ALLOC_CONF": f"expandable_segments:False,{EXACT}"},
            id="the user's segments",
        ),
        pytest.param(
            {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:8,expandable_segments:True"},
            {},
            id="the user's threshold and segments",
        ),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(
    config: TrainConfig, environ: dict[str, str], added: dict[str, str]
) -> None:
    environ[THREADS] = "4"
    assert cuda_environment(on_a_gpu(config, expandable_segments=True), environ) == added


def test_torch_before_2_13_gets_no_setting_that_it_refuses(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_environment_module, "version", lambda _: "2.11.0+cu130")
    assert EXACT not in "".join(cuda_environment(on_a_gpu(config), {}).values())


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
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    assert "NCCL_ALGO" not in cuda_environment(asked, {"NCCL_ALGO": "Tree"})
    assert ours.items() <= cuda_environment(asked, {}).items()


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"),
    [
        pytest.param(96, 8, "12", id="divided among the ranks of a node"),
        pytest.param(8, 8, "2", id="at least two"),
        pytest.param(256, 1, "32", id="at most as many as torch starts"),
    ],
)
def test_ranks_of_a_node_share_its_cores_for_compiling(
    config: TrainConfig,
    cores: int,
    ranks: int,
    workers: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_environment_module, "usable_cores", lambda: cores)
    world = config.world.model_copy(update={"device": "cuda", "nproc_per_node": ranks})
    on_node = config.model_copy(update={"world": world})
    assert cuda_environment(on_node, {})[THREADS] == workers
    assert THREADS not in cuda_environment(on_node, {THREADS: "5"})
