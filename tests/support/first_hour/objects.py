"""Objects of the first hour on Azure: namespaces, claims and jobs, and reads of a status."""

import uuid

from support.first_hour.shell import STORAGE, Object, Options

CLAIM, PROFILE = "data", "first-hour"


def namespace_of(kind: str) -> str:
    """Return the namespace for jobs on a storage class."""
    return f"first-hour-{kind}"


def namespace_object(name: str) -> Object:
    """Return a namespace that admits only pods of the restricted standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def copy_objects(namespace: str, options: Options, kind: str) -> tuple[Object, Object]:
    """Return the claim of a namespace, and a pod that mounts it."""
    claim = {
        "storageClassName": STORAGE[kind],
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "100Gi"}},  # the smallest premium share
    }
    container = {
        "name": "copy",
        "image": options.images["trainer"],
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
    pod = {
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}],
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return (
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": claim,
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "copy", "namespace": namespace},
            "spec": pod,
        },
    )


def job_object(namespace: str, name: str, spec: Object) -> Object:
    """Return a FineTuneJob of the quickstart's model on two nodes, changed in `spec`.

    Its folders are new, because a job does not continue from the files of a deleted job.
    """
    folder = f"{name}-{uuid.uuid4().hex[:8]}"
    training = {"globalBatchSize": 2, "maxSeqLength": 256, "learningRate": 3e-3}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": f"pvc://{CLAIM}/quickstart/model"},
            "dataset": {"source": f"pvc://{CLAIM}/quickstart/train.jsonl"},
            "method": {"type": "lora", "lora": {"r": 8, "alpha": 16}},
            "topology": {"nodes": 2, "gpusPerNode": 0},
            "checkpoint": {"uri": f"pvc://{CLAIM}/checkpoints/{folder}", "everySteps": 10},
            "output": {"uri": f"pvc://{CLAIM}/models/{folder}"},
            "observability": {"statusIntervalSeconds": 5},
            "backend": {"type": "kubernetes", "kubernetes": {"profile": PROFILE}},
            **spec,
            "training": {**training, **spec["training"]},
        },
    }


def is_complete(job: Object) -> bool:
    """Whether the job is Complete."""
    conditions = {one["type"]: one["status"] for one in job["status"].get("conditions", ())}
    return conditions.get("Complete") == "True"


def has_checkpoint(job: Object) -> bool:
    """Whether the job has committed a checkpoint."""
    return bool((job["status"].get("checkpoint") or {}).get("last"))


def attempts_in(job: Object) -> dict[int, Object]:
    """Return the attempts by number."""
    return {one["number"]: one for one in job["status"].get("attempts", ())}
