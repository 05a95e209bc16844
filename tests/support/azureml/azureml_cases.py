"""Jobs and profiles of the azureml backend, each about one thing; run it to write their goldens.

    PYTHONPATH=tests python tests/support/azureml/azureml_cases.py

A golden holds the job as `ftctl render` prints it, and then the trainer's configuration that is
packed into one of its variables.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.api.v1alpha1 import FineTuneProfile, FineTuneProfileSpec
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.base import Attempt, BackendContext, Request
from finetune_trainer.config import ENV_TRAIN_CONFIG, TrainConfig, unpack
from support.api.builders import planned

GOLDENS = Path(__file__).parents[2] / "goldens" / "azureml"

JOB: Mapping[str, Any] = {
    "model__source": "hf://org/model",
    "dataset__source": "azureml://datastores/rows/paths/support/train.jsonl",
    "backend": {"type": "azureml"},
}
SETTINGS: Mapping[str, Any] = {
    "subscriptionId": "00000000-0000-0000-0000-000000000000",
    "resourceGroup": "ml",
    "workspace": "tuning",
    "compute": "cpu-cluster",
    "environment": "azureml:trainer:1",
}
ALLOW: Mapping[str, Any] = {"namespaces": ["*"], "datastores": ["rows"], "maxNodes": 4}


def profile(allow: Mapping[str, Any] | None = None, **settings: Any) -> FineTuneProfileSpec:
    """Return a small profile that lets the job `JOB` pass; both arguments add to it."""
    made = {key: value for key, value in {**SETTINGS, **settings}.items() if value is not None}
    value = {"azureml": made, "allow": {**ALLOW, **(allow or {})}}
    return FineTuneProfileSpec.model_validate(value)


def backend(spec: FineTuneProfileSpec | None = None, name: str = "default") -> AzureMLBackend:
    """Return the backend as `ftctl` makes it, with one profile known."""
    return backend_with({}, spec, name)


def backend_with(
    environ: Mapping[str, str],
    spec: FineTuneProfileSpec | None = None,
    name: str = "default",
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> AzureMLBackend:
    """Return the backend as `ftctl` makes it in that environment, with one profile known."""
    made = FineTuneProfile.model_validate(
        {"metadata": {"name": name}, "spec": (spec or profile()).model_dump(by_alias=True)}
    )
    return AzureMLBackend(BackendContext(Path(), environ, profiles={name: made}, now=now))


def config_of(request: Request) -> TrainConfig:
    """Return the trainer's configuration in a request."""
    return unpack(request.objects[0]["environment_variables"][ENV_TRAIN_CONFIG])


@dataclass(frozen=True)
class Case:
    """One golden.

    Attributes:
        job: What differs from `JOB`.
        settings: What differs from `SETTINGS`.
        allow: What differs from `ALLOW`.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    allow: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1

    @property
    def backend(self) -> AzureMLBackend:
        """The backend with the case's profile."""
        return backend(profile(self.allow, **self.settings))

    def request(self) -> Request:
        """Return what the backend would create."""
        return self.backend.render(planned(**{**JOB, **self.job}), Attempt(self.attempt))

    def text(self) -> str:
        """Return it as it stands in the golden."""
        request = self.request()
        (command_job,) = json.loads(json.dumps(request.objects))
        command_job["environment_variables"][ENV_TRAIN_CONFIG] = "the next document, packed"
        config = json.loads(config_of(request).to_json())
        documents = [command_job, config]
        return str(yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True, width=96))


GPUS = {"gpusPerNode": 8, "processesPerNode": None}
REGISTERED = "azureml://registries/azureml/models/Phi-4-mini-instruct/versions/1"

CASES: Mapping[str, Case] = {
    "amlcompute-one-node": Case(),
    "amlcompute-two-nodes": Case(
        job={
            "topology": {**GPUS, "nodes": 2},
            "training__globalBatchSize": 64,
            "capacity": "spotPreferred",
            "checkpoint__uri": "azureml://datastores/rows/paths/checkpoints/{name}",
            "dataset": {
                "evalSource": "azureml://datastores/rows/paths/support/eval.jsonl",
                "also": [{"source": "azureml://datastores/rows/paths/more"}],
            },
            "backend__azureml": {
                "compute": "h100-cluster",
                "environment": "azureml://registries/shared/environments/trainer/versions/3",
                "experiment": "support",
                "priority": "high",
            },
        },
        settings={"sharedMemory": "64g", "env": {"NCCL_DEBUG": "WARN"}},
        allow={"computes": ["h100-*"], "environments": ["azureml://registries/shared/*"]},
        attempt=2,
    ),
    "kubernetes-instance-type": Case(
        job={
            "topology": {**GPUS, "instanceType": "gpu8"},
            "training__globalBatchSize": 64,
            "backend__azureml": {"compute": "aks"},
        },
        settings={
            "identity": {"type": "managed", "clientId": "22222222-2222-2222-2222-222222222222"}
        },
        allow={"computes": ["aks"], "sizes": ["gpu*"]},
    ),
    "serverless-spot": Case(
        job={
            "topology": {**GPUS, "instanceType": "Standard_ND96isr_H100_v5"},
            "training__globalBatchSize": 64,
            "capacity": "spot",
            "backend__azureml": {"serverless": True},
        },
        settings={"compute": None, "identity": {"type": "amlToken"}},
        allow={"serverless": True, "sizes": ["Standard_ND*"]},
    ),
    "registered-models": Case(
        job={
            "model__source": f"{REGISTERED}/mlflow_model_folder/data/model",
            "method__lora": {"startFrom": "azureml://models/support-adapter/versions/7"},
            "checkpoint": {
                "resumeFrom": "azureml://datastores/rows/paths/old/step-9",
                "allowForeign": True,
            },
            "output__uri": "azureml://datastores/rows/paths/models/{namespace}/{name}",
        },
        settings={"datastore": "kept"},
        allow={"foreignCheckpoints": True},
    ),
}


if __name__ == "__main__":
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        (GOLDENS / f"{name}.yaml").write_text(case.text(), encoding="utf-8")
