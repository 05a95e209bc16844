"""What Azure ML says of a node and its mounts becomes what the supervisor takes."""

import pytest

from finetune_trainer.config import ENV_TRAIN_CONFIG, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.launch.azureml.mounts import read_mounts, resolve_mounts
from finetune_trainer.launch.azureml.node import environment_of_supervisor
from finetune_trainer.launch.start_ranks import Node, read_node
from finetune_trainer.launchers import has_launcher, read_launch
from support.azureml.azureml_nodes import variables

MOUNTS = {"model": "/mnt/m", "rows": "/mnt/rows.jsonl", "out": "/mnt/o/", "local": "/tmp/l"}
TEXT = "mount://nowhere, says the user"


def config(**changes: object) -> TrainConfig:
    """Return a configuration whose every path lies on a mount."""
    values: dict[str, object] = {
        "job": {"name": "tiny", "uid": "u-1"},
        "world": {"nnodes": 2, "nproc_per_node": 4},
        "model": {"path": "mount://model", "chat_template": TEXT},
        "data": {
            "train": {"path": "mount://rows"},
            "also": [{"path": "mount://rows"}, {"path": "org/data", "is_hub": True}],
            "eval": {"path": "mount://model/deep/eval.jsonl"},
            "columns": {"text": TEXT},
            "cache_dir": "mount://local/cache",
        },
        "method": {"type": "lora", "lora": {"start_from": "mount://model/adapter"}},
        "strategy": {"type": "zero3", "offload": "nvme", "nvme_path": "mount://local/nvme"},
        "training": {"global_batch_size": 8, "max_steps": 1, "learning_rate": 1e-3},
        "checkpoint": {"dir": "mount://out/checkpoints", "resume_from": "mount://model/step-3"},
        "output": {"dir": "mount://out"},
        "telemetry": {"sample_prompts": [TEXT]},
        "run_dir": "mount://local/run",
        "termination_path": "mount://local/termination.json",
    }
    return TrainConfig.model_validate(values | changes)


def test_every_path_is_put_in_and_no_text_is_touched() -> None:
    found = resolve_mounts(config(), MOUNTS)
    assert found.model.path == "/mnt/m"
    assert [one.path for one in found.data.sources] == [
        "/mnt/rows.jsonl",
        "/mnt/rows.jsonl",
        "org/data",
    ]
    assert found.data.eval is not None
    assert found.data.eval.path == "/mnt/m/deep/eval.jsonl"
    assert found.data.cache_dir == "/tmp/l/cache"
    assert found.method.lora is not None
    assert found.method.lora.start_from == "/mnt/m/adapter"
    assert found.strategy.nvme_path == "/tmp/l/nvme"
    assert found.checkpoint.dir == "/mnt/o/checkpoints"
    assert found.checkpoint.resume_from == "/mnt/m/step-3"
    assert found.output.dir == "/mnt/o"
    assert (found.run_dir, found.termination_path) == ("/tmp/l/run", "/tmp/l/termination.json")
    assert found.model.chat_template == found.data.columns.text == TEXT
    assert found.telemetry.sample_prompts == (TEXT,)
    assert found.to_json().count("mount://") == 3, "a path of the configuration is not known"


def test_a_configuration_without_mounts_stays_as_it_is() -> None:
    put = resolve_mounts(config(), MOUNTS)
    assert resolve_mounts(put, {}) == put


@pytest.mark.parametrize(
    ("place", "said"),
    [
        pytest.param(
            "mount://other/x", "mount://other/x: no argument .* the path of other", id="unknown"
        ),
        pytest.param("mount:///x", "mount:///x is not mount://NAME", id="no name"),
        pytest.param("mount://Model", "mount://Model is not mount://NAME", id="another name"),
    ],
)
def test_a_place_that_no_argument_names_is_refused_by_name(place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_mounts(config(output={"dir": place}), MOUNTS)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        pytest.param("model", "'model' is not NAME=PATH", id="no path"),
        pytest.param("model=", "'model=' is not NAME=PATH", id="empty"),
        pytest.param("--model=/x", "'--model=/x' is not NAME=PATH", id="an option"),
        pytest.param("rows=/x", "two arguments name the mount rows", id="twice"),
    ],
)
def test_an_argument_that_is_no_mount_is_refused(argument: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_mounts(["rows=/a=b", argument])


def test_a_path_may_hold_what_a_name_may_not() -> None:
    assert read_mounts(["a_1=/mnt/A b=c"]) == {"a_1": "/mnt/A b=c"}


def test_a_node_finds_its_place_and_is_no_rank() -> None:
    given = variables(1, 2, 6105) | {"PATH": "/bin", "MLFLOW_RUN_ID": "r", ENV_TRAIN_CONFIG: "x"}
    environ = environment_of_supervisor(given, 2)
    assert read_node(config(), environ) == Node(rank=1, host="127.0.0.1", port=6105)
    assert not has_launcher(environ)
    assert read_launch(environ) is None
    kept = {name: environ[name] for name in environ if not name.startswith("FINETUNE_")}
    assert kept == {"PATH": "/bin", "MLFLOW_RUN_ID": "r"}
    assert ENV_TRAIN_CONFIG not in environ


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, id="mpirun"),
        pytest.param({"ACCELERATE_DYNAMO_MODE": "default"}, id="accelerate"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, id="torchrun"),
    ],
)
def test_no_launcher_makes_the_supervisor_a_rank(launcher: dict[str, str]) -> None:
    assert has_launcher(launcher)
    assert environment_of_supervisor(launcher, 1) == {}


def test_a_single_node_needs_no_variables() -> None:
    assert environment_of_supervisor({"PATH": "/bin"}, 1) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but .*nodes is 2: ", id="one a GPU"),
        pytest.param({"NODE_RANK": ""}, "^NODE_RANK", id="no rank"),
        pytest.param(
            {"MASTER_ADDR": "", "MASTER_PORT": ""}, "^MASTER_ADDR and MASTER_PORT", id="no address"
        ),
    ],
)
def test_another_distribution_is_refused_with_the_one_that_works(
    changes: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        environment_of_supervisor(variables(0, 2, 6105) | changes, 2)
    assert "distribution: {type: pytorch, process_count_per_instance: 1}" in str(refused.value)
