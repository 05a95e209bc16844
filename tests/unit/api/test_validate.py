"""`ftctl validate` and `load_job`: what they refuse, what they say, what they leave alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator import __version__
from finetune_operator.api.manifest import Manifest
from finetune_operator.api.openapi import Schema
from finetune_operator.api.problems import InvalidJobError, Problem
from finetune_operator.api.structural import check_structure
from finetune_operator.api.unbuilt import UNBUILT
from finetune_operator.api.validation import check_manifest, load_job
from finetune_operator.cli.app import app
from support.api.builders import job, manifest

EXAMPLES = Path(__file__).parents[3] / "examples"


def problems(**overrides: Any) -> list[str]:
    value = manifest(**overrides)
    return [f"{one.path} {one.message}" for one in check_manifest(Manifest("", 1, value, {}))]


def write(folder: Path, *values: dict[str, Any]) -> Path:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump_all(values, sort_keys=False))
    return file


def ftctl(*arguments: object, stdin: str | None = None) -> tuple[int, str]:
    without_gpus = {"CUDA_VISIBLE_DEVICES": ""}  # the machine of the test may have small ones
    words = ["validate", *map(str, arguments)]
    result = CliRunner().invoke(app, words, input=stdin, env=without_gpus)
    return result.exit_code, result.stdout


def test_every_example_is_valid() -> None:
    files = sorted(EXAMPLES.glob("*.yaml"))
    profiles = sorted(EXAMPLES.glob("profiles/*.yaml"))
    assert len(files) >= 4
    assert ftctl(*files, *profiles) == (0, f"{len(files)} FineTuneJobs checked, no problem\n")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_opens_with_how_to_use_it(file: Path) -> None:
    head = file.read_text().partition("apiVersion")[0]
    for word in ("Check:", "Logs:", "Clean:"):
        assert word in head
    assert "Apply:" in head or "Run:" in head


def test_an_empty_block_means_its_defaults() -> None:
    assert problems(restartPolicy={}, checkpoint={}) == []


def test_all_problems_of_a_manifest_are_reported_at_once() -> None:
    found = problems(
        training={"epochs": 1, "warmup": -1}, nix=1, method={"type": "dora"}, topology__maxNodes=2
    )
    fields = {line.split(" ")[0] for line in found}
    assert fields == {
        "spec.training",
        "spec.training.warmup",
        "spec.topology.maxNodes",
        "spec.nix",
        "spec.method.type",
    }


@pytest.mark.parametrize("entry", UNBUILT, ids=lambda entry: entry.path)
def test_an_unbuilt_field_exists_and_its_default_is_built(entry: Any) -> None:
    from finetune_operator.api.crd import job_schema

    node: Schema = job_schema()["properties"]["spec"]
    for part in entry.path.split("."):
        node = node["properties"][part.removesuffix("[]")]
        node = node["items"] if part.endswith("[]") else node
    assert "default" not in node or node["default"] in entry.values


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"strategy__tensorParallel": 2, "topology__nodes": 2}, "spec.strategy.tensorParallel"),
        ({"strategy__pipelineParallel": 2, "topology__nodes": 2}, "spec.strategy.pipelineParallel"),
        ({"topology__maxNodes": 2}, "spec.topology.maxNodes"),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, "spec.managedBy"),
        (
            {"restartPolicy__rules": [{"onClass": "Typo", "action": "Fail"}]},
            "spec.restartPolicy.rules[0].onClass",
        ),
    ],
)
def test_what_nothing_acts_on_yet_is_named(overrides: dict[str, Any], field: str) -> None:
    found = problems(**overrides)
    assert [line for line in found if line.startswith(field) and "is not supported yet; " in line]


def test_a_rule_that_reads_an_unsupported_value_suggests_no_other_value() -> None:
    strategy = {"type": "fsdp", "tensorParallel": 2, "pipelineParallel": 2}
    assert problems(strategy=strategy, topology__nodes=3, training__globalBatchSize=7) == [
        "spec.strategy.tensorParallel 2 is not supported yet; use 1",
        "spec.strategy.pipelineParallel 2 is not supported yet; use 1",
    ]


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
def test_a_number_that_json_lacks_is_one_problem(tmp_path: Path, number: str) -> None:
    file = write(tmp_path, manifest(training__learningRate="NUMBER"))
    file.write_text(file.read_text().replace("NUMBER", number))
    code, output = ftctl("validate", "-f", file)
    assert code == 1
    [line] = [line for line in output.splitlines() if "learningRate" in line]
    assert f"spec.training.learningRate {number} is not a number in JSON" in line


def test_a_folder_is_no_manifest_to_run(tmp_path: Path) -> None:
    write(tmp_path, manifest())
    with pytest.raises(InvalidJobError, match="is a folder; name one manifest file"):
        load_job(tmp_path)


def test_the_resource_itself_accepts_what_is_not_built_yet() -> None:
    value = manifest(topology__maxNodes=2, model__source="azureml://models/m")
    assert check_manifest(Manifest("", 1, value, {}), with_unbuilt=False) == []


@pytest.mark.parametrize(
    ("value", "schema", "says"),
    [
        ("90s", {"type": "integer"}, "must be a whole number of seconds without a unit; write 90"),
        ("1.5h", {"type": "integer"}, "write 5400"),
        ("3 parsecs", {"type": "integer"}, "of seconds without a unit"),
        (8.0, {"type": "integer"}, "8.0 must be a whole number"),
        (True, {"type": "integer"}, "true must be a whole number"),
        ([], {"type": "object", "properties": {}}, "[] must be a mapping of fields"),
        ("é" * 3, {"type": "string", "maxLength": 2}, "has 3 characters; at most 2 fit"),
        ("", {"type": "string", "minLength": 2}, "must have at least 2 characters"),
        ("a\n", {"type": "string", "pattern": "^a$"}, "does not match ^a$"),
        (
            {"a": "", "b": ""},
            {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "string"}},
            "at most 1 fit",
        ),
        (2.5, {"x-kubernetes-int-or-string": True}, "must be a whole number or a word"),
    ],
)
def test_structure_is_refused_with_what_to_write(value: Any, schema: Schema, says: str) -> None:
    (finding,) = check_structure(value, schema, ("graceSeconds",))
    assert says in finding.message


def test_output_for_programs_holds_the_same(tmp_path: Path) -> None:
    code, text = ftctl("-o", "json", write(tmp_path, manifest(nix=1)))
    assert code == 1
    assert json.loads(text) == {
        "jobs": 1,
        "problems": [
            {
                "file": str(tmp_path / "job.yaml"),
                "line": 24,
                "path": "spec.nix",
                "message": "is not a known field; remove it",
                "severity": "error",
            }
        ],
    }


def test_files_folders_and_standard_input_are_read_together(tmp_path: Path) -> None:
    write(tmp_path, manifest(), manifest(name="b"))
    text = yaml.safe_dump(manifest(name="c"))
    code, out = ftctl("-f", tmp_path, "-f", "-", tmp_path / "job.yaml", stdin=text)
    assert (code, out) == (0, "5 FineTuneJobs checked, no problem\n")


def test_a_retired_size_is_a_note_with_its_successor(tmp_path: Path) -> None:
    topology = {"gpusPerNode": 1, "processesPerNode": None, "instanceType": "Standard_NC6s_v3"}
    uris = {"checkpoint": {"uri": "pvc://c/a"}, "output": {"uri": "pvc://o/a"}}
    sources = {"model": {"source": "hf://a/b"}, "dataset": {"source": "hf://a/c"}}
    changes: dict[str, Any] = {"backend": {"type": "kubernetes"}, **sources, **uris}
    code, text = ftctl(write(tmp_path, manifest(**changes, topology=topology)))
    assert code == 0, text
    assert "note: " in text
    assert "no forecast of memory: size Standard_NC6s_v3: Azure retired it on 2025-09-30" in text


def test_finding_no_job_at_all_is_a_problem(tmp_path: Path) -> None:
    file = write(tmp_path, {"apiVersion": "v1", "kind": "Service"})
    code, out = ftctl(file)
    assert code == 1
    assert f"no FineTuneJob in {file}" in out


def test_giving_nothing_is_a_usage_error() -> None:
    assert ftctl()[0] == 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        pytest.param({}, "local", id="files of this machine"),
        pytest.param({"dataset.source": "hf://a/rows"}, "local", id="only the model is a file"),
        pytest.param(
            {"dataset.source": "hf://a/rows", "model.source": "hf://a/model"},
            "kubernetes",
            id="hub",
        ),
    ],
)
def test_a_manifest_without_a_backend_is_checked_for_its_default(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    file = write(tmp_path, manifest(backend=None, **changes))

    result = CliRunner().invoke(app, ["validate", str(file)])

    assert result.stderr == f"{file}: no spec.backend; checked for {name}\n"
    is_valid = name == "local"
    assert (result.exit_code == 0) == is_valid, result.stdout


@pytest.mark.parametrize("sources", ["file://./x", "hf://a/x"])
def test_render_of_a_manifest_without_a_backend_is_for_this_machine(
    tmp_path: Path, sources: str
) -> None:
    changes = {"dataset.source": sources, "model.source": sources}
    file = write(tmp_path, manifest(backend=None, **changes))

    result = CliRunner().invoke(app, ["render", str(file)])

    assert result.stdout.startswith("# backend local, attempt 1"), result.stderr


def test_a_backend_that_is_not_installed_is_named_with_those_that_are(tmp_path: Path) -> None:
    value = manifest(backend__type="slurm", model__source="hf://a/b", dataset__source="hf://a/c")
    code, out = ftctl(write(tmp_path, value))
    assert code == 1
    assert (
        "spec.backend.type slurm is not installed here; use azureml or kubernetes or local" in out
    )


def test_a_status_in_a_manifest_is_a_note(tmp_path: Path) -> None:
    code, out = ftctl(write(tmp_path, {**manifest(), "status": {"phase": "Running"}}))
    assert code == 0
    assert out.startswith("note: ")
    assert "status is written by the controller" in out


def test_validate_opens_no_file_that_a_manifest_names(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    file = write(tmp_path, manifest())
    script = (
        "import sys\n"
        f"folder = {str(tmp_path)!r}\n"
        "sys.addaudithook(lambda event, args: event in ('open', 'os.listdir', 'os.scandir') and "
        "str(args[0]).startswith(folder) and print(args[0]))\n"
        f"sys.argv = ['ftctl', 'validate', {str(file)!r}]\n"
        "from finetune_operator.cli.app import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{file}\n1 FineTuneJob checked, no problem\n"


def test_load_job_returns_the_job_with_its_defaults_and_its_place(tmp_path: Path) -> None:
    file = write(tmp_path, {"apiVersion": "v1", "kind": "Service"}, manifest(training__maxSteps=3))
    loaded, where = load_job(file)
    assert loaded == job(training__maxSteps=3)
    assert (where.file, where.directory, where.line) == (str(file), tmp_path, 4)


def test_load_job_gives_a_backends_problem_its_line(tmp_path: Path) -> None:
    _, where = load_job(write(tmp_path, manifest()))
    lines = (tmp_path / "job.yaml").read_text().splitlines()
    at = where.locate(Problem("spec.model.source", "is missing")).line
    inside = where.locate(Problem("spec.model.source.config[0]", "is missing")).line
    assert at is not None
    assert "file://./model" in lines[at - 1]
    assert inside == at


def test_load_job_puts_another_backend_in_its_place(tmp_path: Path) -> None:
    file = write(tmp_path, manifest(backend={"type": "kubernetes", "kubernetes": {"profile": "a"}}))
    loaded, _ = load_job(file, backend="local")
    assert loaded.spec.backend.type == "local"
    assert loaded.spec.backend.kubernetes is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([manifest(), manifest(name="b")], "contains 2 FineTuneJobs; use a file with exactly one"),
        ([{"apiVersion": "v1", "kind": "Service"}], "contains 0 FineTuneJobs"),
        ([manifest(capacity="spot")], "spec.capacity"),
    ],
)
def test_load_job_refuses(tmp_path: Path, values: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidJobError) as refused:
        load_job(write(tmp_path, *values))
    assert says in str(refused.value)
    assert refused.value.problems


def test_ftctl_tells_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"ftctl {__version__}\n")


def test_ftctl_prints_an_error_and_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-m", "finetune_operator", "crd", "-o", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"{file}/finetunejobs.yaml cannot be written (File exists)\n"
