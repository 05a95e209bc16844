"""The azureml backend without Azure: what it would submit, what it refuses, what it never does."""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from finetune_operator.api.problems import Severity
from finetune_operator.api.v1alpha1 import FineTuneProfileSpec
from finetune_operator.backends import registry
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.azureml.sdk import credential
from finetune_operator.backends.base import Attempt
from finetune_operator.cli.app import app
from finetune_operator.errors import BackendError
from finetune_operator.kube.resources import FINE_TUNE_PROFILES
from support.api.builders import job, manifest, planned
from support.azureml.azureml_cases import (
    CASES,
    GOLDENS,
    JOB,
    REGISTERED,
    SETTINGS,
    backend,
    config_of,
    profile,
)
from support.kernel.kernel_world import World
from support.kubernetes import kubernetes_cases


@pytest.mark.parametrize("name", CASES)
def test_what_is_submitted_is_what_the_golden_shows(name: str) -> None:
    golden = (GOLDENS / f"{name}.yaml").read_text()
    assert CASES[name].text() == golden, (
        "look at the change, then run: "
        "PYTHONPATH=tests python tests/support/azureml/azureml_cases.py"
    )


def test_every_golden_is_of_a_job_that_its_profile_allows() -> None:
    for name, case in CASES.items():
        assert case.backend.validate(job(**{**JOB, **case.job})) == [], name


def command_job(**overrides: Any) -> Mapping[str, Any]:
    """Return what is submitted for a job that differs so from `JOB`."""
    (made,) = backend().render(planned(**{**JOB, **overrides}), Attempt(1)).objects
    return made


def test_a_job_is_named_by_its_uid_and_attempt_in_the_workspace_of_its_profile() -> None:
    request = backend().render(planned(uid="u-1", **JOB), Attempt(3))
    (made,) = request.objects
    assert (request.backend, request.job_uid, request.attempt) == ("azureml", "u-1", 3)
    assert request.name == (
        f"/subscriptions/{SETTINGS['subscriptionId']}/resourceGroups/ml/providers/"
        "Microsoft.MachineLearningServices/workspaces/tuning/jobs/tiny-u-1-3"
    )
    assert made["name"] == "tiny-u-1-3"
    assert made["tags"]["finetune.uid"] == "u-1"


def test_without_a_uid_nothing_is_named_by_an_empty_one() -> None:
    (made,) = backend().render(planned(uid="", **JOB), Attempt(1)).objects
    assert made["name"] == "tiny-1"
    assert "finetune.uid" not in made["tags"]
    assert made["outputs"]["output"]["path"].endswith("/paths/finetune/default/tiny/output")


def test_the_same_plan_and_attempt_make_the_same_request() -> None:
    for case in CASES.values():
        assert case.request() == case.request()


def test_every_mount_of_the_configuration_is_an_argument_of_the_command() -> None:
    for name, case in CASES.items():
        request = case.request()
        (made,) = request.objects
        program, _, arguments = made["command"].partition("launch.azureml ")
        assert program == "python -P -m finetune_trainer."
        given = [f"{key}=${{{{inputs.{key}}}}}" for key in made["inputs"]]
        given += [f"{key}=${{{{outputs.{key}}}}}" for key in made["outputs"]]
        assert arguments.split(" ") == given, name
        used = set(re.findall(r'"mount://([a-z0-9_]+)[/"]', config_of(request).to_json()))
        assert used == {*made["inputs"], *made["outputs"], "scratch"}, name


def test_rows_of_one_folder_are_one_mount_and_keep_their_names() -> None:
    rows = "azureml://datastores/rows/paths"
    overrides = {
        "dataset": {
            "source": f"{rows}/a/train.jsonl.gz",
            "evalSource": f"{rows}/a/eval.parquet",
            "also": [{"source": f"{rows}/a"}, {"source": f"{rows}/top.csv"}],
        }
    }
    made = command_job(**overrides)
    config = config_of(backend().render(planned(**{**JOB, **overrides}), Attempt(1)))
    assert {key: one["path"] for key, one in made["inputs"].items()} == {
        "data": f"{rows}/a",
        "also_1": f"{rows}/",
    }
    assert [one.path for one in config.data.sources] == [
        "mount://data/train.jsonl.gz",
        "mount://data",
        "mount://also_1/top.csv",
    ]
    assert config.data.eval is not None
    assert config.data.eval.path == "mount://data/eval.parquet"


def test_everything_is_mounted_and_nothing_waits_for_the_end_of_the_job() -> None:
    for case in CASES.values():
        (made,) = case.request().objects
        assert {one["mode"] for one in made["inputs"].values()} == {"ro_mount"}
        assert {one["mode"] for one in made["outputs"].values()} == {"rw_mount"}


def test_what_is_written_each_second_stays_on_the_nodes_own_disk() -> None:
    config = config_of(CASES["amlcompute-two-nodes"].request())
    for path in (config.run_dir, config.termination_path, config.data.cache_dir):
        assert path.startswith("mount://scratch/")


def test_the_profile_alone_says_whether_another_jobs_checkpoint_is_loaded() -> None:
    resumed = {**JOB, "checkpoint__resumeFrom": "azureml://datastores/rows/paths/old/step-9"}
    for allowed in (True, False):
        made = backend(profile({"foreignCheckpoints": allowed}))
        config = config_of(made.render(planned(**resumed), Attempt(1)))
        assert config.checkpoint.allow_foreign is allowed
        assert config.checkpoint.resume_from == "mount://resume"


@pytest.mark.parametrize(
    ("overrides", "allow", "expected"),
    [
        pytest.param(
            {"model__source": "azureml://models/theirs/versions/1"},
            {"models": ["ours-*"]},
            "spec.model.source theirs is a model that the profile does not allow (allowed: ours-*)",
            id="a model",
        ),
        pytest.param(
            {"model__source": "azureml://registries/theirs/models/m/versions/1"},
            {"registries": []},
            "spec.model.source theirs is a registry that the profile does not allow",
            id="a registry",
        ),
        pytest.param(
            {"backend__azureml__experiment": "theirs"},
            {"experiments": ["team-*"]},
            "spec.backend.azureml.experiment theirs is an experiment that the profile does not",
            id="an experiment",
        ),
    ],
)
def test_a_profile_lists_models_registries_and_experiments(
    overrides: dict[str, Any], allow: dict[str, Any], expected: str
) -> None:
    named = {**JOB, **overrides}
    assert backend(profile({})).validate(job(**named)) == []
    (found,) = backend(profile(allow)).validate(job(**named))
    assert str(found).startswith(expected)
    last = {"step": 3, "uri": "azureml://x", "time": "2026-01-01T00:00:00Z", "worldSize": 1}
    resumed = job(**{**named, "status.checkpoint.last": last})
    assert [one.severity for one in backend(profile(allow)).validate(resumed)] == [Severity.WARNING]


def test_the_identity_of_the_machine_is_used_only_by_its_client_id() -> None:
    pytest.importorskip("azure.identity", reason="needs the extra azureml")
    for client_id, is_used in ((None, False), ("11111111-1111-1111-1111-111111111111", True)):
        chain = credential({}, client_id, lambda is_write: None)
        names = {type(one).__name__ for one in chain.credentials}
        assert ("ManagedIdentityCredential" in names) is is_used


DATASTORE_FORM = "use azureml://datastores/DATASTORE/paths/PATH"
REFUSED: list[tuple[Mapping[str, Any], str, str]] = [
    ({"metadata.namespace": "other"}, "spec.backend.azureml.profile",
     "default may not be used in namespace other; name another profile, or have the namespace"),
    ({"topology__nodes": 8, "training__globalBatchSize": 8}, "spec.topology.nodes",
     "8 is more than the 4 that profile default allows; use at most 4"),
    ({"topology": {"gpusPerNode": 9, "processesPerNode": None}, "training__globalBatchSize": 9},
     "spec.topology.gpusPerNode", "9 is more than the 8"),
    ({"backend__azureml__compute": "theirs"}, "spec.backend.azureml.compute",
     "theirs is a compute that the profile does not allow (allowed: gpu-*); name another"),
    ({"backend__azureml__environment": "azureml:evil:1"}, "spec.backend.azureml.environment",
     "azureml:evil:1 is an environment that the profile does not allow; name another"),
    ({"topology__instanceType": "Standard_ND96"}, "spec.topology.instanceType",
     "Standard_ND96 is a size that the profile does not allow (allowed: small); name another"),
    ({"backend__azureml__serverless": True, "topology__instanceType": "small"},
     "spec.backend.azureml.serverless", "true is not allowed by profile default; name a compute"),
    ({"dataset__source": "azureml://datastores/theirs/paths/x"}, "spec.dataset.source",
     "theirs is a datastore that the profile does not allow (allowed: rows); name another"),
    ({"checkpoint__uri": "azureml://datastores/workspaceblobstore/paths/finetune"},
     "spec.checkpoint.uri", "workspaceblobstore is a datastore that the profile does not allow"),
    ({"output__uri": "azureml://datastores/rows/paths/"}, "spec.output.uri",
     "no single job may use; name a folder, such as azureml://datastores/rows/paths/{name}/output"),
    ({"checkpoint__resumeFrom": "azureml://datastores/theirs/paths/x"},
     "spec.checkpoint.resumeFrom", "theirs is a datastore"),
    ({"checkpoint": {"resumeFrom": "azureml://datastores/rows/paths/x", "allowForeign": True}},
     "spec.checkpoint.allowForeign", "have the profile's allow.foreignCheckpoints set"),
    ({"dataset__source": "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/rows/"
      "paths/x"}, "spec.dataset.source", f"{DATASTORE_FORM} or hf://ORG/NAME"),
    ({"dataset__source": "azureml://models/m/versions/1"}, "spec.dataset.source", DATASTORE_FORM),
    ({"dataset__source": "pvc://data/x.jsonl"}, "spec.dataset.source",
     "cannot be used by the azureml backend"),
    ({"dataset": {"also": [{"source": "azureml://datastores/theirs/paths/x"}]}},
     "spec.dataset.also[0].source", "theirs is a datastore"),
    ({"model__source": "azureml://models/m"}, "spec.model.source",
     "or azureml://models/NAME/versions/VERSION or azureml://registries/"),
    ({"model__source": "hf://../model"}, "spec.model.source", "is not a repository of the hub"),
    ({"model__source": "azureml://datastores/rows/paths/a/../../x"}, "spec.model.source",
     "has an empty part, . or .. in its path; remove it"),
    ({"model__source": f"{REGISTERED}/a//b"}, "spec.model.source", "has an empty part"),
    ({"output__uri": "azureml://datastores/rows/paths//x"}, "spec.output.uri", "an empty part"),
    ({"output__uri": "azureml://datastores/rows/paths/%78"}, "spec.output.uri",
     "has '%', which is not taken literally; rename the path"),
    ({"output__uri": REGISTERED}, "spec.output.uri", DATASTORE_FORM),
    ({"output__uri": "hf://me/model"}, "spec.output.uri", DATASTORE_FORM),
    ({"method__lora": {"startFrom": "hf://me/adapter"}}, "spec.method.lora.startFrom",
     DATASTORE_FORM),
    ({"model__tokenSecretRef": {"name": "hub", "key": "t"}}, "spec.model.tokenSecretRef",
     "remove it, because everyone who can read the job in Azure ML would see it"),
    ({"podTemplate": {"metadata": {"labels": {"a": "b"}}}}, "spec.podTemplate",
     "has no effect on Azure ML; remove it"),
    ({"queue": {"name": "team"}}, "spec.queue", "set backend.azureml.priority"),
    ({"observability": {"trackers": [{"type": "wandb", "project": "p"}]}},
     "spec.observability.trackers", "remove it; Azure ML has the curves in its own MLflow"),
    ({"restartPolicy": {"restartsInPlace": 1}}, "spec.restartPolicy.restartsInPlace", "use 0"),
    ({"topology__rdma": "required"}, "spec.topology.rdma", "use auto"),
    ({"topology__placement": "spread"}, "spec.topology.placement", "use pack"),
    ({"backend__azureml__serverless": True}, "spec.topology.instanceType",
     "is missing, and serverless compute needs a VM size; set it"),
    ({"backend__azureml__serverless": True, "topology__instanceType": "small",
      "capacity": "spotPreferred"}, "spec.capacity", "use spot or onDemand"),
    ({"backend__azureml__profile": "nope"}, "spec.backend.azureml.profile", "nope is looked up"),
]  # fmt: skip


def limited() -> AzureMLBackend:
    """Return the backend with a profile that allows a little."""
    allow = {"namespaces": ["default", "team-*"], "computes": ["gpu-*"], "sizes": ["small"]}
    return backend(profile(allow))


@pytest.mark.parametrize(("overrides", "path", "says"), REFUSED)
def test_a_job_gets_nothing_that_its_profile_does_not_allow(
    overrides: dict[str, Any], path: str, says: str
) -> None:
    (found,) = limited().validate(job(**{**JOB, **overrides}))
    assert found.path == path
    assert says in found.message


def test_a_namespace_that_may_not_use_a_profile_sees_no_value_of_it() -> None:
    asked: dict[str, Any] = {"backend__azureml__compute": "theirs"}
    asked |= {"topology__instanceType": "big"}
    asked |= {"topology__nodes": 8, "training__globalBatchSize": 8}
    (found,) = limited().validate(job(**{**JOB, **asked, "metadata.namespace": "other"}))
    assert str(found) == (
        "spec.backend.azureml.profile default may not be used in namespace other; name another "
        "profile, or have the namespace added to its allow.namespaces"
    )


ALLOWED: list[Mapping[str, Any]] = [
    {"metadata.namespace": "team-a"},
    {"backend__azureml__compute": "gpu-2", "topology__instanceType": "small"},
    {"backend__azureml": {"compute": "cpu-cluster", "environment": "azureml:trainer:1"}},
    {"capacity": "spot"},
    {"model__source": REGISTERED},
    {"model__source": "azureml://models/m/versions/1/weights"},
    {"method__lora": {"startFrom": "azureml://models/adapter/versions/2"}},
    {"output__uri": "azureml://datastores/rows/paths/models/{name}/"},
]  # fmt: skip


@pytest.mark.parametrize("overrides", ALLOWED)
def test_a_job_gets_what_its_profile_allows(overrides: Mapping[str, Any]) -> None:
    assert limited().validate(job(**{**JOB, **overrides})) == []


def test_without_a_compute_of_the_profile_a_job_names_one() -> None:
    made = backend(profile({"computes": ["gpus"]}, compute=None))
    (found,) = made.validate(job(**JOB))
    assert str(found) == (
        "spec.backend.azureml.compute is missing, and profile default has no default; name one"
    )
    assert made.validate(job(**{**JOB, "backend__azureml__compute": "gpus"})) == []


@pytest.mark.parametrize(("overrides", "path", "says"), REFUSED)
def test_what_is_refused_is_not_rendered_either_so_that_nothing_of_it_is_sent(
    overrides: dict[str, Any], path: str, says: str
) -> None:
    with pytest.raises(BackendError) as refused:
        limited().render(planned(**{**JOB, **overrides}), Attempt(1))
    assert str(refused.value).startswith(f"{path} ")
    assert says in str(refused.value)


def test_a_configuration_that_no_variable_can_hold_is_refused_with_what_to_shorten() -> None:
    noise = random.Random(0)
    text = "".join(chr(noise.randrange(0x4E00, 0x9FFF)) for _ in range(65_536))
    (found,) = backend().validate(job(**{**JOB, "model__chatTemplate": text}))
    assert found.path == "spec"
    assert "at most 122880 reach a job of Azure ML; shorten model.chatTemplate" in found.message
    # What repeats itself is compressed.
    assert backend().validate(job(**{**JOB, "model__chatTemplate": "{{ x }}" * 9_000})) == []


def test_a_profile_of_another_backend_is_told_by_what_it_has() -> None:
    (found,) = backend(kubernetes_cases.profile(), "default").validate(job(**JOB))
    assert str(found) == (
        "spec.backend.azureml.profile default has allow.claims, image, without effect in this "
        "backend; name a profile for it"
    )
    (found,) = kubernetes_cases.backend(profile({"sizes": ["a"]})).validate(
        job(**kubernetes_cases.JOB)
    )
    assert str(found) == (
        "spec.backend.kubernetes.profile default has allow.datastores, allow.sizes, azureml, "
        "without effect in this backend; name a profile for it"
    )


def test_what_only_pods_have_is_refused_in_a_profile_rather_than_ignored() -> None:
    spec = profile().model_dump(by_alias=True) | {"nodes": {"agentPools": ["a"]}}
    (found,) = backend(FineTuneProfileSpec.model_validate(spec)).validate(job(**JOB))
    assert "default has nodes, without effect in this backend" in found.message


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        pytest.param({}, "must set exactly one of image", id="neither"),
        pytest.param({"image": "a", "azureml": SETTINGS}, "must set exactly one of", id="both"),
        pytest.param(
            {"azureml": {**SETTINGS, "environment": "trainer"}},
            "must name an environment and its version",
            id="environment without version",
        ),
        pytest.param(
            {"azureml": {**SETTINGS, "resourceGroup": "a/b"}}, "resourceGroup", id="two groups"
        ),
        pytest.param(
            {"azureml": {**SETTINGS, "env": {"MLFLOW_RUN_ID": "1"}}},
            "sets a variable reserved for Azure ML and the operator",
            id="a variable of Azure ML",
        ),
        pytest.param(
            {
                "azureml": {
                    **SETTINGS,
                    "identity": {"type": "amlToken", "clientId": SETTINGS["subscriptionId"]},
                }
            },
            "has no effect with type amlToken",
            id="an identity with the other's id",
        ),
    ],
)
def test_a_profile_with_one_flaw_has_one_problem(
    spec: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    file = written(tmp_path, profile_manifest(spec))
    done = CliRunner().invoke(app, ["validate", "-o", "json", file])
    (problem,) = json.loads(done.stdout)["problems"]
    assert says in f"{problem['path']} {problem['message']}"


def written(folder: Path, *values: Mapping[str, Any]) -> str:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump_all(json.loads(json.dumps(values)), sort_keys=False))
    return str(file)


def profile_manifest(spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneProfile"}
    shown = profile().model_dump(by_alias=True, exclude_defaults=True, mode="json")
    return {**head, "metadata": {"name": "default"}, "spec": spec if spec is not None else shown}


def test_folders_of_two_jobs_are_compared_by_workspace_datastore_and_path() -> None:
    uri = "azureml://datastores/rows/paths/x/{name}"
    fields = {**JOB, "checkpoint__uri": uri, "backend__azureml__profile": "default"}
    checkpoint, output = backend().writes(job(**fields))
    subscription = SETTINGS["subscriptionId"]
    assert checkpoint.place == ("azureml", subscription, "ml", "tuning", "rows", "x", "tiny")
    assert output.place[-5:] == ("workspaceblobstore", "finetune", "default", "tiny", "output")
    assert output.field == "spec.output.uri"
    same = backend(profile(workspace="TUNING"), "mine").writes(
        job(**{**fields, "backend__azureml__profile": "mine"})
    )
    assert same[0].place == checkpoint.place
    (unknown,) = backend(None, "other").writes(job(**fields))
    assert unknown.place == ("azureml profile", "default", "rows", "x", "tiny")


def test_ftctl_uses_the_profile_beside_the_job(tmp_path: Path) -> None:
    made = manifest(**JOB)
    file = written(tmp_path, profile_manifest(), made)
    run = CliRunner().invoke
    assert run(app, ["validate", file]).stdout == "1 FineTuneJob checked, no problem\n"
    (document,) = yaml.safe_load_all(run(app, ["render", file]).stdout)
    assert (document["type"], document["compute"]) == ("command", "azureml:cpu-cluster")
    alone = written(tmp_path, made)
    assert "default is looked up in the cluster" in run(app, ["validate", alone]).stdout
    refused = run(app, ["render", alone])
    assert refused.exit_code == 1


def test_without_the_azure_sdk_a_job_says_what_to_install_and_no_attempt_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)

    async def apply() -> World:
        world = World()
        target = f"{AzureMLBackend.__module__}:{AzureMLBackend.__name__}"
        world.start_process([EntryPoint("azureml", target, registry.GROUP)])
        listed = profile_manifest()
        listed["metadata"]["resourceVersion"] = "1"
        world.cache(FINE_TUNE_PROFILES).replace([listed], "1")
        await world.apply(**JOB)
        await world.settle()
        return world

    world = asyncio.run(apply())
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert "pip install 'finetune-operator[azureml]'" in accepted["message"]
    assert world.condition("Stalled")["status"] == "True"
    assert not world.job["status"].get("attempt")
    assert "finalizers" not in world.job["metadata"]


def test_no_part_of_the_azure_sdk_is_imported_before_a_job_is_to_be_submitted() -> None:
    code = (
        "import sys, asyncio; from support.azureml import azureml_cases;"
        "azureml_cases.CASES['serverless-spot'].text();"
        "from finetune_operator.testing.suite import Lent;"
        "backend = azureml_cases.backend();"
        "asyncio.run(backend.start(Lent())); asyncio.run(backend.close());"
        "print([name for name in sys.modules if name.split('.')[0] in ('azure', 'msal')])"
    )
    folder = Path(__file__).parents[3]
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    assert shown.stdout.strip() == "[]"
