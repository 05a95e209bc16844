"""`ftctl doctor`: what it finds, what it tells to install, and its exit code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune_operator.cli.app import app
from finetune_operator.cli.doctor import examine, install_command, needed_extras, packages
from finetune_operator.cli.findings import Finding, State

REQUIREMENTS = [
    "pydantic<3,>=2.11",
    'torch==2.13.*; extra == "trainer"',
    "peft<0.22,>=0.21; extra == 'trainer'",
    'deepspeed<0.20,>=0.19; extra == "deepspeed"',
    'finetune-operator[trainer,qlora]; extra == "gpu"',
    'pytest>=9; extra == "testing"',
    'kopf<2,>=1.45; extra == "operator"',
    'gguf>=0.17; extra == "demo"',
]


JOB = """
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: tiny}
spec:
  model: {source: hf://example/tiny}
  dataset: {source: hf://example/rows}
  training: {maxSteps: 2, globalBatchSize: 2, learningRate: 1e-3}
  topology: {gpusPerNode: 0}
"""


def installed(*names: str) -> Callable[[str], str | None]:
    return lambda name: "1.0" if name in names else None


def test_doctor_tells_needed_from_optional_packages() -> None:
    found = packages(REQUIREMENTS, installed("pydantic", "torch"))

    assert [(one.topic, one.name, one.state) for one in found] == [
        ("ftctl", "pydantic", State.OK),
        ("trainer", "torch", State.OK),
        ("trainer", "peft", State.MISSING),
        ("deepspeed", "deepspeed", State.ABSENT),
    ]


def test_doctor_gives_one_command_for_all_that_is_missing() -> None:
    found = packages(REQUIREMENTS, installed())
    trainer = [one for one in found if one.topic == "trainer"]

    assert install_command(trainer) == (
        f'"{sys.executable}" -m pip install "torch==2.13.*" "peft<0.22,>=0.21"'
    )


@pytest.mark.parametrize(
    ("manifest", "missing"),
    [
        pytest.param("backend: {type: local}", {"torch", "peft"}, id="local"),
        pytest.param(
            "backend: {type: local}\n  strategy: {type: zero2}",
            {"torch", "peft", "deepspeed"},
            id="ZeRO",
        ),
        pytest.param("backend: {type: kubernetes}", set(), id="cluster"),
    ],
)
def test_doctor_proposes_what_the_job_of_a_manifest_lacks(
    manifest: str, missing: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB + f"  {manifest}\n")

    found = packages(REQUIREMENTS, installed("pydantic"), needed_extras(file))

    assert {one.name for one in found if one.state is State.MISSING} == missing


def test_doctor_has_no_checks_of_a_manifest_in_a_cluster(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "job.yaml"), "--cluster"])

    assert result.exit_code == 2
    assert "FILE has no effect" in result.stderr


def test_doctor_gives_no_command_where_nothing_is_missing() -> None:
    assert install_command([Finding("trainer", "torch", State.OK, "2.13.0")]) == ""


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        pytest.param({"HF_TOKEN": "hf_secret"}, State.OK, id="in the environment"),
        pytest.param({}, State.ABSENT, id="nowhere"),
    ],
)
def test_doctor_says_whether_there_is_a_hub_token_and_never_which(
    environ: dict[str, str], state: State, tmp_path: Path
) -> None:
    found = examine({"HF_HOME": str(tmp_path), **environ}, tmp_path)

    [token] = [one for one in found if one.name == "hub token"]
    assert token.state is state
    assert "hf_secret" not in repr(found)


def test_doctor_finds_a_hub_token_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_secret")

    found = examine({"HF_HOME": str(tmp_path)}, tmp_path)

    [token] = [one for one in found if one.name == "hub token"]
    assert token.state is State.OK


def test_doctor_prints_json_that_names_the_state_of_everything() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])

    found = {one["name"]: one for one in json.loads(result.stdout)}
    assert found["torch"]["state"] == "ok"
    assert found["local"]["topic"] == "backends"
    assert result.exit_code == 0


def test_doctor_lists_what_is_there_for_a_reader() -> None:
    result = CliRunner().invoke(app, ["doctor"])

    assert "python" in result.stdout
    assert "GiB free" in result.stdout
    assert result.exit_code == 0
