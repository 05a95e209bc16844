"""`tests/live/first_hour.py` with stand-ins for Azure and a cluster, and the page about it."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.planner.plan import make_plan
from support.first_hour import stand_in
from support.first_hour.preconditions import PROGRAMS
from support.first_hour.shell import TAG
from support.first_hour.steps import STEPS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "first-hour-on-azure.md"
PROVIDER = (
    "azure:///subscriptions/s/resourceGroups/mc_group/providers/Microsoft.Compute/"
    "virtualMachineScaleSets/aks-spot-1-vmss/virtualMachines/7"
)
USAGE = {"cores": 100, "lowPriorityCores": 100, "dsv5": 100, "t4": 100}
AZUREML = """\
spec:
  azureml:
    subscriptionId: 0-0
    resourceGroup: ml
    workspace: tuning
    clientId: 1-1
"""

Rules = list[tuple[str, list[tuple[int, str]]]]


def outputs_of(*values: Any) -> list[tuple[int, str]]:
    return [(0, json.dumps(one)) for one in values]


def size(name: str, family: str) -> dict[str, Any]:
    vcpus = [{"name": "vCPUs", "value": "4"}]
    return {"name": name, "family": family, "restrictions": [], "capabilities": vcpus}


def status(attempt: int, **fields: Any) -> dict[str, Any]:
    return {"status": {"attempt": attempt, **fields}}


WAITS: dict[str, Any] = {"status": {}}
COMPLETE = status(1, conditions=[{"type": "Complete", "status": "True"}], progress={"loss": 1.5})
SAVED = status(1, checkpoint={"last": {"step": 10}})
ENDED = {"number": 1, "failureClass": "Preempted"}
TRAINS = status(
    2,
    attempts=[ENDED, {"number": 2, "resumedStep": 10}],
    progress={"step": 12},
    restarts={"counted": 0},
)
PODS = {
    "items": [
        {"metadata": {"name": f"lost-1-{one}", "namespace": "ns"}, "spec": {"nodeName": f"n{one}"}}
        for one in range(2)
    ]
}

FAILS = {
    "get finetunejob lost": outputs_of(
        SAVED,
        status(1, conditions=[{"type": "Failed", "status": "True", "message": "no space"}]),
    )
}


class Azure:
    """Programs on a PATH of their own, which record their calls."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.output = folder / "bin", folder / "out"
        self.programs.mkdir()
        self._calls = self.programs / "calls.jsonl"
        self._calls.write_text("")
        self._has_group = False
        source = Path(stand_in.__file__).read_text()
        for name in (*PROGRAMS, "git"):
            (self.programs / name).write_text(f"#!{sys.executable} -SE\n{source}")
            (self.programs / name).chmod(0o755)

    def run(self, *arguments: str, **outputs: list[tuple[int, str]]) -> Any:
        """Run the script; `outputs` by pattern take precedence over healthy outputs."""
        self._has_group |= bool(self.calls("az group create"))
        rules: Rules = [*outputs.items(), *self._healthy()]
        self._calls.write_text("")
        (self.programs / "rules.json").write_text(json.dumps(rules))
        script = [sys.executable, str(ROOT / "tests" / "live" / "first_hour.py")]
        where = ["--folder", str(self.output), "--poll-seconds", "0"]
        return subprocess.run(
            [*script, *where, *arguments],
            env={"PATH": str(self.programs), "PYTHONPATH": str(ROOT / "tests")},
            capture_output=True,
            text=True,
        )

    def hour(self, *arguments: str, **outputs: list[tuple[int, str]]) -> Any:
        place = ("--location", "westeurope", "--registry", "reg.azurecr.io")
        return self.run(*place, *arguments, **outputs)

    def remember(self, *passed: str, name: str = TAG, roles: Sequence[str] = ()) -> None:
        """Write the state of an earlier call."""
        self.output.mkdir()
        steps = {one: {"result": "passed", "seconds": 1, "found": ""} for one in passed}
        stored = {"name": name, "id": "own", "roles": roles, "steps": steps}
        (self.output / "state.json").write_text(json.dumps(stored))
        (self.output / "kubeconfig").write_text("")
        self._has_group = True

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "state.json").read_text())
        return found

    def calls(self, part: str = "") -> list[str]:
        """Return the calls of the last run that contain `part`, in order."""
        commands = [json.loads(one)["command"] for one in self._calls.read_text().splitlines()]
        return [one for one in commands if part in one]

    def inputs(self, part: str) -> list[str]:
        calls = map(json.loads, self._calls.read_text().splitlines())
        return [one["stdin"] for one in calls if part in one["command"]]

    def _healthy(self) -> Rules:
        usages = [
            {"name": {"value": name}, "currentValue": "0", "limit": str(limit)}
            for name, limit in USAGE.items()
        ]
        tag = self.state["id"] if (self.output / "state.json").exists() else ""
        identity = {"principalId": "p", "clientId": "c"}
        return [
            ("az account show", outputs_of({"name": "sub", "id": "0"})),
            ("az group exists", outputs_of(self._has_group)),
            ("az group show", outputs_of({"tags": {TAG: tag}})),
            ("list-skus .*D4s", outputs_of([size("Standard_D4s_v5", "dsv5")])),
            ("list-skus .*NC4", outputs_of([size("Standard_NC4as_T4_v3", "t4")])),
            ("list-usage", outputs_of(usages)),
            ("az version", outputs_of({"azure-cli": "2.80.0"})),
            ("az aks list", outputs_of([])),
            ("nodepool list", outputs_of([])),
            ("az aks show", outputs_of({"oidcIssuerProfile": {"issuerUrl": "https://issuer"}})),
            ("az identity show", outputs_of(identity)),
            ("role assignment create", outputs_of({"id": "/roles/1"})),
            ("kubectl version --client", outputs_of({"clientVersion": {"gitVersion": "v1.34"}})),
            ("kubectl version", outputs_of({"serverVersion": {"gitVersion": "v1.33"}})),
            ("config current-context", [(0, "finetune-first-hour")]),
            ("make e2e", [(0, "==== 31 passed, 2 skipped in 900.00s ====")]),
            ("get finetunejob (whole|gpu)", outputs_of(WAITS, COMPLETE)),
            ("get finetunejob lost .*files", outputs_of(SAVED, SAVED, TRAINS)),
            ("get finetunejob lost .*blobfuse", outputs_of(SAVED, TRAINS)),
            ("get finetunejob spot", outputs_of(WAITS, SAVED, TRAINS)),
            ("get pods", outputs_of(PODS)),
            ("get node n1", outputs_of({"spec": {"providerID": PROVIDER}})),
            ("helm version", [(0, "v4.0.0")]),
            ("git rev-parse", [(0, "abcdef0123")]),
        ]


@pytest.fixture
def azure(tmp_path: Path) -> Azure:
    return Azure(tmp_path)


def test_without_yes_it_checks_and_lists_the_resources_and_creates_none(azure: Azure) -> None:
    done = azure.hour()
    assert done.returncode == 0, done.stderr
    assert [" ".join(one.split()[:3]) for one in azure.calls()] == [
        "az account show",
        "az acr repository",
        "az acr repository",
        "az group exists",
        "az vm list-skus",
        "az vm list-skus",
        "az vm list-usage",
    ]
    assert "an AKS cluster (tier Free) with 2 nodes Standard_D4s_v5" in done.stdout
    assert "add --yes" in done.stdout
    assert not (azure.output / "state.json").exists()


@pytest.mark.parametrize(
    ("pattern", "output", "sentence", "last"),
    [
        pytest.param(
            "account show",
            (1, "Please run az login"),
            "login: the Azure CLI",
            "account",
            id="login",
        ),
        pytest.param("acr repository", (1, "x"), "images: reg.azurecr.io/fin", "acr", id="images"),
        pytest.param("group exists", (0, "true"), "was not created from", "group show", id="group"),
        pytest.param("list-skus", (0, "[]"), "is unavailable in", "list-skus", id="size"),
        pytest.param(
            "list-usage",
            (0, '[{"name": {"value": "dsv5"}, "currentValue": "5", "limit": "9"}]'),
            "quota: quota dsv5 in westeurope has 4 free vCPUs of the 8 needed",
            "list-usage",
            id="quota",
        ),
    ],
)
def test_the_first_failed_precondition_ends_the_call(
    azure: Azure, pattern: str, output: tuple[int, str], sentence: str, last: str
) -> None:
    done = azure.hour("--yes", **{pattern: [output]})
    assert sentence in done.stderr
    assert done.returncode == 1
    assert last in azure.calls()[-1]
    assert not (azure.output / "state.json").exists()


def test_a_missing_program_is_named(azure: Azure) -> None:
    (azure.programs / "helm").unlink()
    done = azure.hour("--yes")
    assert done.stderr.startswith("programs: helm not on the PATH")
    assert azure.calls() == []


def test_the_steps_run_in_order_and_the_table_is_written(azure: Azure, tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(AZUREML)
    done = azure.hour("--yes", "--azureml-profile", str(profile))
    assert done.returncode == 0, done.stdout + done.stderr
    marks = (
        "az group create",
        "az aks create",
        "make e2e",
        "helm upgrade --install finetune-operator",
        "ftctl doctor --cluster",
        "delete pod lost-1-1 --force",
        "az aks nodepool add",
        "az vmss simulate-eviction",
        "az identity create",
        "az role assignment create",
        "kubectl exec",
        "python -m pytest tests/live",
    )
    shown = [mark for one in azure.calls() for mark in marks if mark in one]
    assert shown == [
        *marks[:6],
        marks[5],
        marks[6],
        *marks[6:10],
        marks[3],
        *marks[10:],
    ]
    (evicted,) = azure.calls("simulate-eviction")
    assert "--resource-group mc_group --name aks-spot-1-vmss --instance-id 7" in evicted
    assert "clientId" not in azure.inputs("kubectl exec")[0]
    assert len(azure.calls("nodepool delete")) == 2
    assert azure.state["roles"] == ["/roles/1"]

    result = (azure.output / "result.md").read_text()
    assert "westeurope, Standard_D4s_v5, Standard_NC4as_T4_v3; commit abcdef0123" in result
    assert result.count("| passed |") == len(STEPS)
    assert "31 passed, 2 skipped" in result
    lost = r"lost: Preempted, training again after \d+ s from step 10, 0 counted restarts"
    assert re.search(lost, result)


def test_jobs_train_on_each_storage_class_and_without_a_profile_azure_ml_is_skipped(
    azure: Azure,
) -> None:
    done = azure.hour("--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    result = (azure.output / "result.md").read_text()
    assert "| `azureml` | skipped | 0 | no --azureml-profile |" in result
    assert azure.calls("role assignment") == []
    objects = [one for text in azure.inputs("apply") for one in json.loads(text)["items"]]
    claims = {
        one["metadata"]["namespace"]: one["spec"]["storageClassName"]
        for one in objects
        if one["kind"] == "PersistentVolumeClaim"
    }
    assert claims == {
        "first-hour-files": "azurefile-csi-premium",
        "first-hour-blobfuse": "azureblob-fuse-premium",
    }
    jobs = [one for one in objects if one["kind"] == "FineTuneJob"]
    for job in jobs:
        make_plan(FineTuneJob.model_validate(job))
    (profile,) = (one for one in objects if one["kind"] == "FineTuneProfile")
    FineTuneProfile.model_validate(profile)
    names = [one["metadata"]["name"] for one in jobs]
    assert names == ["whole", "lost", "whole", "lost", "gpu", "spot"]
    assert jobs[-1]["spec"]["capacity"] == "spot"


def test_a_failed_step_ends_the_call_and_the_next_call_resumes_there(azure: Azure) -> None:
    done = azure.hour("--yes", **FAILS)
    assert done.returncode == 1
    result = (azure.output / "result.md").read_text()
    assert re.search(r"`files` \| failed \| \d+ \| lost Failed: no space \|", result)
    assert "| `gpu` | not run yet |  |  |" in result
    (bundle,) = azure.calls("--bundle")
    assert bundle.startswith("ftctl doctor lost --cluster --namespace first-hour-files")

    (azure.output / "kubeconfig").write_text("")
    done = azure.hour("--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert azure.calls("aks create") == azure.calls("make e2e") == []
    assert azure.calls("config current-context") == ["kubectl config current-context"]
    assert (azure.output / "result.md").read_text().count("| passed |") == len(STEPS) - 2


def test_an_eviction_that_counts_as_a_restart_fails_its_step(azure: Azure) -> None:
    counted = {"status": {**TRAINS["status"], "restarts": {"counted": 1}}}
    azure.remember(*(one for one in STEPS if one != "spot"))
    done = azure.hour("--yes", **{"get finetunejob spot": outputs_of(SAVED, counted)})
    assert done.returncode == 1
    assert "the eviction counted as a restart" in (azure.output / "result.md").read_text()


def test_clean_deletes_the_resources_of_earlier_calls_alone(azure: Azure) -> None:
    azure.remember("cluster", name="mine", roles=["/roles/1"])
    done = azure.run("--clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert azure.calls() == [
        "az group exists --name mine --output json",
        "az group show --name mine --output json",
        "az role assignment delete --ids /roles/1 --output json",
        "az group delete --name mine --yes --output json",
    ]
    assert [one.name for one in azure.output.glob("*")] == ["commands.log"]


def test_clean_leaves_a_group_of_others_alone(azure: Azure) -> None:
    assert "no state of an earlier call" in azure.run("--clean").stdout
    assert azure.calls() == []

    azure.remember("cluster")
    done = azure.run("--clean", **{"group show": outputs_of({"tags": {TAG: "other"}})})
    assert done.returncode == 1
    assert "not created from this checkout; not deleted" in done.stdout
    assert azure.calls("group delete") == []


def test_a_name_other_than_in_the_earlier_call_is_refused(azure: Azure) -> None:
    azure.remember("cluster", name="mine")
    done = azure.hour("--yes", "--name", "yours")
    assert "resource group: an earlier call used --name mine" in done.stderr


def test_the_page_lists_the_steps_of_the_script() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE) == list(STEPS)
