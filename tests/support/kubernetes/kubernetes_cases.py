"""Jobs and profiles of the kubernetes backend, one aspect each; run it to write their goldens.

    PYTHONPATH=tests python tests/support/kubernetes/kubernetes_cases.py

The manifests in `goldens/kubernetes` are what `ftctl render` prints for them, so a change of what
is created is seen in review.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.api.v1alpha1 import FineTuneProfile, FineTuneProfileSpec
from finetune_operator.backends.base import Attempt, BackendContext, Request
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from support.api.builders import planned

GOLDENS = Path(__file__).parents[2] / "goldens" / "kubernetes"

JOB: Mapping[str, Any] = {
    "model__source": "hf://org/model",
    "dataset__source": "pvc://data/train.jsonl",
    "output__uri": "pvc://models/{name}",
    "checkpoint__uri": "pvc://checkpoints/{name}",
    "backend": {"type": "kubernetes"},
}
ALLOW: Mapping[str, Any] = {
    "namespaces": ["*"],
    "claims": ["data", "models", "checkpoints"],
    "maxNodes": 4,
}


def profile(**changes: Any) -> FineTuneProfileSpec:
    """Return a small profile that lets the job `JOB` pass; `allow` is added to what it allows."""
    allow = {**ALLOW, **changes.pop("allow", {})}
    value = {"image": "registry.test/trainer:1", "allow": allow, **changes}
    return FineTuneProfileSpec.model_validate(value)


def backend(spec: FineTuneProfileSpec | None = None, name: str = "default") -> KubernetesBackend:
    """Return the backend as `ftctl` makes it, with one profile known."""
    made = FineTuneProfile.model_validate(
        {"metadata": {"name": name}, "spec": (spec or profile()).model_dump(by_alias=True)}
    )
    return KubernetesBackend(BackendContext(Path(), profiles={name: made}))


@dataclass(frozen=True)
class Case:
    """One golden.

    Attributes:
        job: What differs from `JOB`.
        profile: What differs from `profile()`.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    profile: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 1

    def request(self) -> Request:
        """Return what the backend would create."""
        plan = planned(**{**JOB, **self.job})
        return backend(profile(**self.profile)).render(plan, Attempt(self.attempt))

    def text(self) -> str:
        """Return it as it stands in the golden."""
        objects = json.loads(json.dumps(self.request().objects))
        return str(yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=96))


GPUS = {"nodes": 2, "gpusPerNode": 8, "processesPerNode": None}

CASES: Mapping[str, Case] = {
    "one-node-on-the-cpu": Case(),
    "two-nodes-spot": Case(
        job={
            "topology": {**GPUS, "instanceType": "Standard_ND96isr_H100_v5"},
            "training__globalBatchSize": 64,
            "capacity": "spot",
            "model__tokenSecretRef": {"name": "hub", "key": "token"},
            "deadlines": {"hangSeconds": 600, "terminationGraceSeconds": 90},
        },
        profile={
            "allow": {"secrets": ["hub"]},
            "nodes": {"agentPools": ["gpu1", "gpu2"]},
            "resources": {"cpu": "48", "memory": "900Gi", "sharedMemory": "64Gi"},
        },
        attempt=2,
    ),
    "rdma-spread-service": Case(
        job={
            "topology": {**GPUS, "rdma": "required", "placement": "spread"},
            "training__globalBatchSize": 64,
            "capacity": "spotPreferred",
        },
        profile={
            "rankZeroName": "service",
            "resources": {"rdma": {"name": "rdma/ib", "count": 8}},
            "network": {"policy": False},
        },
    ),
    "rdma-packed": Case(
        job={"topology": GPUS, "training__globalBatchSize": 64},
        profile={
            "resources": {
                "gpu": "nvidia.com/h100",
                "rdma": {"name": "rdma/shared_ib"},
                "other": {"example.com/nic": "1"},
            },
            "nodes": {"topologyKey": "example.com/infiniband-island"},
        },
    ),
    "trackers": Case(
        job={
            "observability": {
                "trackers": [
                    {
                        "type": "wandb",
                        "project": "support",
                        "entity": "team",
                        "secretRef": {"name": "wandb", "key": "api-key"},
                    },
                    {"type": "mlflow", "project": "support", "url": "https://mlflow.test/a"},
                ]
            }
        },
        profile={
            "allow": {
                "secrets": ["wandb"],
                "trackers": ["https://api.wandb.ai", "https://mlflow.test/a"],
            }
        },
    ),
    "queue-template-identity": Case(
        job={
            "queue": {"name": "team", "priorityClass": "high"},
            "backend__kubernetes": {"serviceAccountName": "reader", "image": "registry.test/own:3"},
            "podTemplate": {
                "metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}},
                "spec": {
                    "nodeSelector": {"disk": "fast"},
                    "tolerations": [{"key": "team", "operator": "Exists"}],
                    "imagePullSecrets": [{"name": "registry"}],
                    "volumes": [{"name": "extra", "emptyDir": {}}],
                    "containers": [
                        {
                            "name": "trainer",
                            "env": [{"name": "WANDB_MODE", "value": "offline"}],
                            "volumeMounts": [{"name": "extra", "mountPath": "/extra/disk"}],
                            "resources": {"requests": {"cpu": "2", "memory": "1Gi"}},
                        }
                    ],
                },
            },
        },
        profile={
            "workloadIdentity": True,
            "priorityClassName": "training",
            "runtimeClassName": "nvidia",
            "schedulerName": "other",
            "imagePullSecrets": ["shared-registry"],
            "imagePullPolicy": "Always",
            "env": {"HF_HUB_OFFLINE": "1"},
            "command": ["/opt/venv/bin/python", "-m", "finetune_trainer"],
            "cacheDirectory": "/cache/models",
            "nodes": {
                "selector": {"pool": "train"},
                "tolerations": [{"key": "train", "operator": "Exists", "effect": "NoSchedule"}],
                "topologyKey": "",
            },
            "volumes": [
                {
                    "name": "cache",
                    "mountPath": "/cache",
                    "source": {"persistentVolumeClaim": {"claimName": "hub-cache"}},
                },
                {
                    "name": "blob",
                    "mountPath": "/blob",
                    "subPath": "teams/{namespace}",
                    "readOnly": True,
                    "source": {
                        "csi": {
                            "driver": "blob.csi.azure.com",
                            "volumeAttributes": {"containerName": "data"},
                        }
                    },
                },
            ],
            "network": {
                "metricsReaders": [
                    {"namespace": "prometheus", "labels": {"app": "prometheus"}},
                ]
            },
            "allow": {
                "serviceAccounts": ["reader"],
                "images": ["registry.test/*"],
                "secrets": ["registry"],
                "metadata": ["team", "note"],
                "priorityClasses": ["high"],
                "env": ["WANDB_*"],
                "maxResources": {"cpu": "4", "memory": "2Gi"},
                "scheduling": True,
            },
        },
    ),
}


if __name__ == "__main__":
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        (GOLDENS / f"{name}.yaml").write_text(case.text(), encoding="utf-8")
