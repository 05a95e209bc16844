"""What CUDA's libraries find in the environment of a rank."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from finetune_trainer.config import TrainConfig
from finetune_trainer.launch import cuda_environment as cuda_environment_module
from finetune_trainer.launch.cuda_environment import cuda_environment
from finetune_trainer.telemetry.collectives.transport import ENV_LOG
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
    environ |= {THREADS: "4", "NCCL_DEBUG": "WARN"}
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


LOG_VARIABLES = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", ENV_LOG}


def test_nccl_logs_its_connections_to_a_file_of_the_process(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "100%"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    first, second = (cuda_environment(on_a_gpu(config), {}) for _ in range(2))
    assert (first["NCCL_DEBUG"], first["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT")
    path = Path(first[ENV_LOG])
    assert path.parent == folder
    # NCCL replaces %p by the process id and %% by %.
    name = first["NCCL_DEBUG_FILE"].replace("%%", "\0").replace("%p", str(os.getpid()))
    assert name.replace("\0", "%") == str(path)
    assert first[ENV_LOG] != second[ENV_LOG]


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"])
def test_a_log_that_the_user_configures_is_not_changed(config: TrainConfig, name: str) -> None:
    assert not LOG_VARIABLES & cuda_environment(on_a_gpu(config), {name: "x"}).keys()


def test_a_single_rank_has_no_log_of_nccl(config: TrainConfig) -> None:
    gpu = on_a_gpu(config)
    world = gpu.world.model_copy(update={"nproc_per_node": 1})
    alone = gpu.model_copy(update={"world": world})
    assert not LOG_VARIABLES & cuda_environment(alone, {}).keys()


def test_nccl_does_not_log_to_stdout_if_no_folder_is_writable(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert not LOG_VARIABLES & cuda_environment(on_a_gpu(config), {}).keys()
