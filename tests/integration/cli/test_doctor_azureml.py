"""`ftctl doctor --azureml` beside a stand-in for Azure ML, asked by the SDK itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from azureml_service import running_service
from azureml_service.client import ServiceClient
from support.azureml.azureml_cases import SETTINGS

DOCTOR = (sys.executable, "-m", "finetune_operator", "doctor")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with running_service(tmp_path_factory.mktemp("azure")) as started:
        yield started


def profile_file(folder: Path, allow: dict[str, Any] | None = None, **settings: Any) -> str:
    made = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneProfile",
        "metadata": {"name": "small"},
        "spec": {"azureml": {**SETTINGS, **settings}, "allow": allow or {}},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(made))
    return str(folder / "profile.yaml")


def examined(
    service: ServiceClient, file: str, **environ: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return the exit code, and what is found by name."""
    done = subprocess.run(
        [*DOCTOR, "--json", "--azureml", "--profile", file],
        env={**os.environ, **service.environ(), **environ},
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    found = json.loads(done.stdout)
    return done.returncode, {one["name"]: (one["state"], one["detail"]) for one in found}


def test_each_thing_that_a_profile_names_is_looked_up_and_nothing_is_changed(
    service: ServiceClient, tmp_path: Path
) -> None:
    registered = "azureml://registries/shared/environments/trainer/versions/1"
    allow = {
        "computes": ["aks", "gone", "team-*"],
        "environments": ["azureml:trainer:2", registered],
        "datastores": ["rows"],
    }
    service.requests(forget=True)
    code, found = examined(service, profile_file(tmp_path, allow))
    assert code == 1
    assert {name: state for name, (state, _) in found.items()} == {
        "identity": "ok",
        "workspace tuning": "ok",
        "compute cpu-cluster": "ok",
        "compute aks": "ok",
        "compute gone": "missing",
        "environment azureml:trainer:1": "ok",
        "environment azureml:trainer:2": "missing",
        f"environment {registered}": "absent",
        "datastore workspaceblobstore": "ok",
        "datastore rows": "ok",
    }
    assert found["compute aks"][1] == "kubernetes, instance types defaultinstancetype, gpu1, gpu8"
    assert found["compute gone"][1].endswith(
        "Correct the profile, or grant this identity read access"
    )
    sent = service.requests()
    assert {one.method for one in sent if one.kind != "token"} == {"GET"}


@pytest.mark.parametrize(
    ("settings", "environ", "name", "words"),
    [
        pytest.param({"workspace": "other"}, {}, "workspace other", "was not found", id="none"),
        pytest.param({}, {"AZURE_FEDERATED_TOKEN_FILE": "/none"}, "identity", "/none", id="file"),
        pytest.param({}, {"AZURE_TENANT_ID": ""}, "identity", "AZURE_TENANT_ID", id="tenant"),
    ],
)
@pytest.mark.full
def test_nothing_is_asked_that_needs_what_is_missing(
    service: ServiceClient,
    tmp_path: Path,
    settings: dict[str, Any],
    environ: dict[str, str],
    name: str,
    words: str,
) -> None:
    code, found = examined(service, profile_file(tmp_path, **settings), **environ)
    assert code == 1
    last = list(found)[-1]
    assert last == name
    assert found[last][0] == "missing"
    assert words in found[last][1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--azureml"], 1, "add --profile FILE", id="no profile"),
        pytest.param(["--profile", "x.yaml"], 2, "without --azureml", id="without effect"),
    ],
)
def test_half_a_question_is_refused(arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run([*DOCTOR, *arguments], capture_output=True, text=True)
    assert done.returncode == code
    assert words in done.stderr
