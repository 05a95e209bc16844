"""The local backend without processes: where things lie, what it refuses, what it would start."""

from pathlib import Path
from typing import Any

import pytest

from finetune_operator.api.problems import Severity
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.backends.local.environment import passed_on
from finetune_operator.backends.local.layout import BadUriError, file_path
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_trainer.config import DatasetSource, LoraSettings, TrainConfig
from support.api.builders import job, planned
from support.kernel.fake_api import FakeApi


def backend(folder: Path, **environ: str) -> LocalBackend:
    context = BackendContext(folder, {"HOME": "/tmp/ada", **environ})
    return LocalBackend(context, command=("train",), cores=4, gpus=lambda: 2)


def test_other_systems_validate_jobs_and_are_refused_before_a_run(tmp_path: Path) -> None:
    mac = LocalBackend(BackendContext(tmp_path, {}), gpus=lambda: 0, system="Darwin")
    assert mac.validate(job()) == []
    messages = [str(one) for one in mac.check_inputs(job())]
    assert (
        "spec.backend.type local needs Linux (/proc, pidfd), this is Darwin; use WSL or a container"
    ) in messages


def findings(problems: Any, severity: Severity = Severity.ERROR) -> list[str]:
    return [problem.path for problem in problems if problem.severity is severity]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("file://./data/x.jsonl", "/jobs/data/x.jsonl"),
        ("file://../x y", "/x y"),
        ("file:///abs/x%20y", "/abs/x%20y"),
    ],
)
def test_file_uris_are_taken_as_written(uri: str, expected: str) -> None:
    assert file_path(uri, Path("/jobs")) == Path(expected)


@pytest.mark.parametrize("uri", ["file://data/x", "file://~/x", "pvc://claim/x"])
def test_a_uri_that_names_no_place_here_says_what_to_write(uri: str) -> None:
    with pytest.raises(BadUriError, match=r"use file://\./"):
        file_path(uri, Path("/jobs"))


def test_the_request_holds_the_whole_configuration_and_one_process_a_node() -> None:
    made = backend(Path("/m")).render(planned(topology={"nodes": 2}), Attempt(3))
    attempt, config, *nodes = made.objects
    folder = "/m/runs/default/tiny/attempts/3"
    assert made.name == folder
    assert attempt["content"]["uid"] == "uid-1-3"
    parsed = TrainConfig.model_validate(config["content"])
    assert parsed.world.world_size == 2
    assert parsed.world.threads_per_process == 2
    assert parsed.model.path == "/m/model"
    assert parsed.checkpoint.dir == "/m/runs/default/tiny/checkpoints"
    assert parsed.data.cache_dir == "/tmp/ada/.cache/finetune-operator/tokens"
    assert nodes[1] == {
        "kind": "Process",
        "node": 1,
        "command": ["train", f"{folder}/config.json"],
        "environment": {
            "FINETUNE_NODE_RANK": "1",
            "FINETUNE_TERMINATION_PATH": f"{folder}/node-1.termination.json",
        },
        "log": f"{folder}/node-1.log",
    }


def test_nodes_of_one_machine_divide_the_gpus_that_may_be_used() -> None:
    plan = planned(topology={"nodes": 2, "gpusPerNode": 2, "processesPerNode": None})
    made = backend(Path("/m"), CUDA_VISIBLE_DEVICES="3,5,6,7").render(plan, Attempt(1))
    seen = [node["environment"]["CUDA_VISIBLE_DEVICES"] for node in made.objects[2:]]
    assert seen == ["3,5", "6,7"]


def test_folders_follow_the_manifest_and_its_uris() -> None:
    manifest = job(backend={"local": {"runDirectory": "here"}}, checkpoint={"uri": "file:///saved"})
    folders = backend(Path("/m")).folders(manifest)
    assert (folders.run, folders.checkpoint) == (Path("/m/here"), Path("/saved"))
    assert folders.output == Path("/m/here/output")


def test_every_data_set_and_the_adapter_are_found_beside_the_manifest() -> None:
    plan = planned(
        dataset={
            "weight": 2,
            "also": [
                {"source": "file://./more.csv"},
                {"source": "hf://org/rows", "split": "sft", "weight": 0.5},
            ],
        },
        method={"lora": {"startFrom": "file://../adapter"}},
    )
    made = backend(Path("/m")).render(plan, Attempt(1))
    config = TrainConfig.model_validate(made.objects[1]["content"])
    assert config.data.sources == (
        DatasetSource(path="/m/train.jsonl", weight=2),
        DatasetSource(path="/m/more.csv"),
        DatasetSource(path="org/rows", split="sft", is_hub=True, weight=0.5),
    )
    assert config.method.lora == LoraSettings(start_from="/adapter")
    assert config.control.scheduled_events_url is None


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"model": {"source": "pvc://claim/model"}}, "spec.model.source"),
        ({"model": {"source": "file://model"}}, "spec.model.source"),
        ({"dataset__source": "https://example.org/x.jsonl"}, "spec.dataset.source"),
        ({"dataset__also": [{"source": "file://more.csv"}]}, "spec.dataset.also[0].source"),
        ({"method__lora__startFrom": "hf://org/adapter"}, "spec.method.lora.startFrom"),
        ({"checkpoint__uri": "hf://org/name"}, "spec.checkpoint.uri"),
        ({"checkpoint__resume_from": "pvc://claim/step-3"}, "spec.checkpoint.resumeFrom"),
        ({"output__uri": "azureml://models/x"}, "spec.output.uri"),
        ({"topology__instanceType": "Standard_A"}, "spec.topology.instanceType"),
        ({"topology__rdma": "required"}, "spec.topology.rdma"),
        ({"topology__placement": "spread"}, "spec.topology.placement"),
        ({"capacity": "spot"}, "spec.capacity"),
        ({"queue__name": "a"}, "spec.queue"),
        ({"podTemplate": {}}, "spec.podTemplate"),
        ({"ttlSecondsAfterFinished": 5}, "spec.ttlSecondsAfterFinished"),
        ({"model__tokenSecretRef": {"name": "a", "key": "b"}}, "spec.model.tokenSecretRef"),
    ],
)
def test_what_this_machine_cannot_do_is_an_error(overrides: dict[str, Any], path: str) -> None:
    assert findings(backend(Path("/m")).validate(job(**overrides))) == [path]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with everything that the built job names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    return tmp_path


def test_complete_inputs_have_no_problem_and_checking_leaves_nothing_behind(inputs: Path) -> None:
    before = sorted(inputs.rglob("*"))
    assert list(backend(inputs).check_inputs(job())) == []
    assert sorted(inputs.rglob("*")) == before


def test_missing_inputs_are_named_with_field_and_path(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "model").mkdir()
    manifest = job(
        dataset={
            "source": "file://./empty.jsonl",
            "also": [{"source": "hf://a/b"}, {"source": "file://./model"}],
            "evalSource": "file://./no.csv",
        },
        method__lora__startFrom="file://./adapter",
    )
    assert [str(problem) for problem in backend(tmp_path).check_inputs(manifest)] == [
        f"spec.model.source file://./model: {tmp_path}/model has no config.json; name a folder "
        "written by save_pretrained",
        f"spec.dataset.source file://./empty.jsonl: {tmp_path}/empty.jsonl is empty; it needs at "
        "least one row",
        f"spec.dataset.also[1].source file://./model: {tmp_path}/model holds no .jsonl, .json, "
        ".parquet, .csv file; add one or name another folder",
        f"spec.dataset.evalSource file://./no.csv: {tmp_path}/no.csv does not exist; correct the "
        "path",
        f"spec.method.lora.startFrom file://./adapter: {tmp_path}/adapter has no "
        "adapter_config.json; name the folder of an adapter",
    ]


def test_compressed_rows_are_rows_and_hidden_files_are_none(inputs: Path) -> None:
    (inputs / "rows.jsonl.zst").write_bytes(b"packed")
    (inputs / "rows").mkdir()
    (inputs / "rows" / "._a.jsonl").write_text("of a Mac")
    manifest = job(dataset__source="file://./rows.jsonl.zst", dataset__evalSource="file://./rows")
    (problem,) = backend(inputs).check_inputs(manifest)
    assert problem.path == "spec.dataset.evalSource"
    (inputs / "rows" / "a.csv.gz").write_bytes(b"packed")
    assert backend(inputs).check_inputs(manifest) == []


@pytest.mark.parametrize(
    ("tracker", "environ", "message"),
    [
        pytest.param({"type": "wandb"}, {}, None, id="the library's own server"),
        pytest.param(
            {"type": "mlflow"},
            {},
            "is missing: MLFLOW_TRACKING_URI is not the address of an MLflow server; export it",
            id="no server",
        ),
        pytest.param(
            {"type": "mlflow"}, {"MLFLOW_TRACKING_URI": "./mlruns"}, "is missing: ", id="a folder"
        ),
        pytest.param(
            {"type": "mlflow"}, {"MLFLOW_TRACKING_URI": "http://a:5000"}, None, id="a server"
        ),
        pytest.param(
            {"type": "wandb", "url": "https://evil.test"},
            {"WANDB_API_KEY": "k"},
            "https://evil.test is not the server of this machine (WANDB_BASE_URL); remove it, or "
            "export WANDB_BASE_URL=https://evil.test",
            id="a server of the manifest alone",
        ),
        pytest.param(
            {"type": "wandb", "url": "https://wandb.test"},
            {"WANDB_BASE_URL": "https://wandb.test/"},
            None,
            id="a server of both",
        ),
    ],
)
def test_the_variables_of_the_user_name_the_server_of_a_tracker(
    tracker: dict[str, str], environ: dict[str, str], message: str | None, inputs: Path
) -> None:
    manifest = job(observability={"trackers": [{"project": "p", **tracker}]})
    local = LocalBackend(BackendContext(inputs, {"HOME": str(inputs), **environ}), cores=2)
    found = [one for one in local.check_inputs(manifest) if "trackers" in one.path]
    if message is None:
        assert found == []
    else:
        (problem,) = found
        assert problem.path == "spec.observability.trackers[0].url"
        assert message in problem.message


def test_the_manifest_alone_says_whether_another_jobs_checkpoint_is_loaded() -> None:
    for allowed in (True, False):
        plan = planned(
            checkpoint={"resumeFrom": "file:///old/step-3", "allowForeign": allowed},
        )
        made = backend(Path("/m")).render(plan, Attempt(1))
        config = TrainConfig.model_validate(made.objects[1]["content"])
        assert config.checkpoint.allow_foreign is allowed


def test_no_python_of_an_attempt_imports_from_its_folder() -> None:
    taken = passed_on({"PYTHONPATH": ":/src:", "PYTHONSAFEPATH": "", "HOME": "/tmp/ada"})
    assert taken == {"PYTHONPATH": "/src", "PYTHONSAFEPATH": "1", "HOME": "/tmp/ada"}


def test_a_file_in_the_way_of_a_folder_is_found_before_anything_starts(inputs: Path) -> None:
    (inputs / "taken").touch()
    manifest = job(output__uri="file://./taken/out")
    (problem,) = backend(inputs).check_inputs(manifest)
    assert problem.path == "spec.output.uri"
    assert f"{inputs}/taken is not a folder" in problem.message


def test_a_home_that_cannot_be_written_is_said_with_the_setting(inputs: Path) -> None:
    home = inputs / "train.jsonl"
    (problem,) = backend(inputs, HOME=str(home)).check_inputs(job())
    assert str(problem) == (
        f"the token cache {home}/.cache/finetune-operator/tokens cannot be written: {home} is not "
        "a folder; set XDG_CACHE_HOME to a folder that can be written"
    )
    elsewhere = backend(inputs, HOME=str(home), XDG_CACHE_HOME=str(inputs / "cache"))
    assert list(elsewhere.check_inputs(job())) == []


def test_a_folder_of_offloaded_files_that_cannot_be_made_is_found_too(inputs: Path) -> None:
    on_disk = {"type": "zero3", "offload": "nvme", "nvmePath": f"{inputs}/train.jsonl/x"}
    (problem,) = backend(inputs).check_inputs(job(strategy=on_disk))
    assert problem.path == "spec.strategy.nvmePath"
    assert "is not a folder" in problem.message


def test_a_file_in_the_way_of_the_run_directory_is_said_once(inputs: Path) -> None:
    (inputs / "runs").touch()
    assert findings(backend(inputs).check_inputs(job())) == ["spec.backend.local.runDirectory"]


@pytest.mark.parametrize(
    ("overrides", "field", "sentence"),
    [
        ({"output__uri": "file://./model"}, "spec.output.uri", "is spec.model.source itself"),
        ({"output__uri": "file://./link"}, "spec.output.uri", "is spec.model.source itself"),
        (
            {"output__uri": "file://./a", "method__lora__startFrom": "file://./a"},
            "spec.output.uri",
            "is spec.method.lora.startFrom itself",
        ),
        (
            {"output__uri": "file://./b", "dataset__also": [{"source": "file://./b/c.jsonl"}]},
            "spec.output.uri",
            "holds spec.dataset.also[0].source",
        ),
        ({"output__uri": "file://./model/out"}, "spec.output.uri", "is inside spec.model.source"),
        ({"checkpoint__uri": "file://."}, "spec.checkpoint.uri", "holds the manifest"),
        ({"checkpoint__uri": "file://./.."}, "spec.checkpoint.uri", "holds the manifest"),
        (
            {"backend": {"local": {"runDirectory": "."}}},
            "spec.backend.local.runDirectory",
            "holds the manifest",
        ),
        (
            {"backend": {"local": {"runDirectory": "data"}}},
            "spec.backend.local.runDirectory",
            "holds spec.dataset.evalSource",
        ),
        (
            {"checkpoint": {"uri": "file://./old/step-5", "resumeFrom": "file://./old/step-5"}},
            "spec.checkpoint.uri",
            "is spec.checkpoint.resumeFrom itself",
        ),
        (
            {"checkpoint": {"resumeFrom": "file://./old/step-5"}, "output__uri": "file://./old"},
            "spec.output.uri",
            "holds spec.checkpoint.resumeFrom",
        ),
        (
            {"output__uri": "file://./runs/default/tiny/checkpoints"},
            "spec.output.uri",
            "is also the folder of spec.checkpoint.uri",
        ),
        (
            {"checkpoint__uri": "file://./saved", "output__uri": "file://./saved/step-7"},
            "spec.output.uri",
            "is inside step-7 of spec.checkpoint.uri",
        ),
    ],
)
def test_a_run_never_shares_a_folder_with_what_it_reads(
    inputs: Path, overrides: dict[str, Any], field: str, sentence: str
) -> None:
    (inputs / "link").symlink_to("model")
    (inputs / "data").mkdir()
    (inputs / "data" / "eval.jsonl").write_text("{}\n")
    (inputs / "old" / "step-5").mkdir(parents=True)
    for place in ("a/adapter_config.json", "b/c.jsonl"):
        (inputs / place).parent.mkdir()
        (inputs / place).write_text("{}\n")
    manifest = job(dataset__eval_source="file://./data/eval.jsonl", **overrides)
    (problem,) = backend(inputs).check_inputs(manifest)
    assert problem.path == field
    assert sentence in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        {"checkpoint": {"uri": "file://./old", "resumeFrom": "file://./old/step-5"}},
        {"checkpoint__uri": "file://./out/checkpoints", "output__uri": "file://./out"},
        {"checkpoint__uri": "file://./all", "output__uri": "file://./all/model"},
        {"output__uri": "file://./model-tuned", "checkpoint__uri": "file://./manifest"},
    ],
)
def test_folders_of_a_run_may_hold_each_other_and_the_checkpoint_to_start_from(
    inputs: Path, overrides: dict[str, Any]
) -> None:
    (inputs / "old" / "step-5").mkdir(parents=True)
    assert list(backend(inputs).check_inputs(job(**overrides))) == []


def test_gpus_that_are_not_there_are_an_error_with_both_counts(inputs: Path) -> None:
    manifest = job(topology={"nodes": 2, "gpusPerNode": 2, "processesPerNode": None})
    (problem,) = backend(inputs).check_inputs(manifest)
    assert problem.path == "spec.topology.gpusPerNode"
    assert "needs 4 GPUs, this machine offers 2" in problem.message
    hidden = backend(inputs, CUDA_VISIBLE_DEVICES="0").check_inputs(
        job(topology={"gpusPerNode": 2, "processesPerNode": None})
    )
    assert "offers 1" in hidden[0].message


def test_more_processes_than_cores_is_a_warning(inputs: Path) -> None:
    manifest = job(topology__processes_per_node=5)
    problems = backend(inputs).check_inputs(manifest)
    assert findings(problems, Severity.WARNING) == ["spec.topology.processesPerNode"]


def test_an_operator_in_a_cluster_runs_no_job_in_its_own_pod(tmp_path: Path) -> None:
    cluster = Cluster(FakeApi(), ObjectCache)
    operators = LocalBackend(BackendContext(tmp_path, cluster=cluster))
    [problem] = operators.validate(job())
    assert problem.path == "spec.backend.type"
    assert "operator's own pod" in problem.message
