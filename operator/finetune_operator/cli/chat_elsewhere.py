"""Refuse a model that is not on this machine, with the commands that copy it here.

`ftctl chat` calls it for jobs of a cluster and of services.
"""

import asyncio
import json
import shlex
from collections.abc import Sequence
from typing import NoReturn

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.azureml.names import BACKEND as AZUREML
from finetune_operator.backends.azureml.places import OUTPUT
from finetune_operator.backends.kubernetes.volumes import CLAIM, claim_path
from finetune_operator.cli.top_cluster import get_job
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.http import HttpClient
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import ConditionType, find, is_true

_POD = "ftctl-chat"
_MOUNT = "/claim"


def refuse_in_cluster(key: Key) -> NoReturn:
    """Refuse a job of the cluster that kubectl uses.

    Raises:
        FineTuneError: always; the message has the commands, or states that the job is not finished.
    """
    refuse_elsewhere(asyncio.run(_read(key)))


def refuse_elsewhere(job: FineTuneJob) -> NoReturn:
    """Refuse a job whose model is not on this machine.

    Raises:
        FineTuneError: always; see `refuse_in_cluster`.
    """
    name, status = f"{job.metadata.namespace}/{job.metadata.name}", job.status
    if not is_true(status, ConditionType.COMPLETE):
        failed = find(status, ConditionType.FAILED)
        reason = f"has failed: {failed.message}" if failed and failed.status == "True" else ""
        state = reason or f"is not finished ({status.phase.value})"
        raise FineTuneError(f"the job {name} {state}; only a finished job has a model")
    uri = next((one for one in status.artifacts if one.endswith("/adapter")), None)
    uri = uri or next(iter(status.artifacts), "")
    if uri.startswith(CLAIM):
        where, commands = _on_claim(job, uri)
    elif job.spec.backend.type == AZUREML:
        where, commands = uri, _of_azureml(job)
    else:
        where = uri or f"on backend {job.spec.backend.type}, which reports no folder"
        commands = ["ftctl chat FOLDER"]
    lines = "\n".join(f"  {command}" for command in commands)
    raise FineTuneError(
        f"the model of the job {name} is not on this machine: {where}\nCopy it here, then name the "
        f"copy:\n{lines}"
    )


async def _read(key: Key) -> FineTuneJob:
    async with await HttpClient.connect() as client:
        return FineTuneJob.model_validate(await get_job(client, key))


def _on_claim(job: FineTuneJob, uri: str) -> tuple[str, Sequence[str]]:
    """Return the place of a model on a claim, and commands that copy it through a pod."""
    place, name = claim_path(uri), shlex.quote(job.metadata.name)
    kubectl = f"kubectl -n {shlex.quote(job.metadata.namespace)}"
    source = shlex.quote(f"{_POD}:{_MOUNT}/{place.path}")
    where = f"{uri}, on the claim {place.claim} or on a volume of that name in the job's profile"
    return where, (
        f"echo {shlex.quote(json.dumps(_pod(place.claim)))} | {kubectl} create -f -",
        f"{kubectl} wait pod/{_POD} --for=condition=Ready",
        f"{kubectl} cp {source} {name}",
        f"{kubectl} delete pod {_POD} --grace-period=1",
        f"ftctl chat {name}",
    )


def _pod(claim: str) -> dict[str, object]:
    """Return a pod that mounts a claim; namespaces with restricted pods admit it."""
    container = {
        "name": "copy",
        "image": "busybox",
        "command": ["sleep", "3600"],
        "volumeMounts": [{"name": "claim", "mountPath": _MOUNT, "readOnly": True}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "claim", "persistentVolumeClaim": {"claimName": claim}}],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": _POD}, "spec": spec}


def _of_azureml(job: FineTuneJob) -> Sequence[str]:
    """Return the commands that download the output of an Azure ML job."""
    handle = handle_of(job.status)
    parts = (handle.name if handle else "").strip("/").split("/")
    known = dict(zip(parts[::2], parts[1::2], strict=False))
    name = job.metadata.name
    options = {
        "--name": known.get("jobs", "JOB"),
        "--resource-group": known.get("resourceGroups", "GROUP"),
        "--workspace-name": known.get("workspaces", "WORKSPACE"),
        "--output-name": OUTPUT,
        "--download-path": name,
    }
    words = (f"{option} {shlex.quote(value)}" for option, value in options.items())
    return (
        f"az ml job download {' '.join(words)}",
        f"ftctl chat {shlex.quote(f'{name}/named-outputs/{OUTPUT}')}",
    )
