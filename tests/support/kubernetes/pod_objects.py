"""Pods and batch Jobs as the API server returns them, in any state; `verdicts` judges the pods."""

from collections.abc import Iterable
from typing import Any

from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.resources import Object
from finetune_trainer.config import FailureClass, Termination

TIME = "2026-01-01T00:00:00Z"


def verdicts(pods: Iterable[Object]) -> list[Verdict]:
    """Return the verdict on each pod."""
    return [judge(read_pod(pod)) for pod in pods]


def batch_job(*conditions: str, nodes: int = 2, **spec: Any) -> Object:
    """Return a batch Job as the operator caches it."""
    found = [
        {"type": one, "status": "True", "reason": "Why", "message": "so"} for one in conditions
    ]
    return {
        "metadata": {"name": "tiny-1", "namespace": "default", "uid": "u", "annotations": {}},
        "spec": {"completions": nodes, "parallelism": nodes, "suspend": False, **spec},
        "status": {"conditions": found},
    }


def pod(index: int, phase: str, *, is_deleted: bool = False, **status: Any) -> Object:
    """Return the pod of a node in this phase."""
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata: Object = {"name": f"tiny-1-{index}-x", "uid": f"p{index}", "labels": labels}
    metadata |= {"namespace": "default", "creationTimestamp": TIME}
    if is_deleted:
        metadata["deletionTimestamp"] = TIME
    spec = {"nodeName": f"node-{index}"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}


def container(name: str, kind: str, **details: Any) -> Object:
    """Return the status of a container in this state."""
    return {"name": name, "state": {kind: details}}


def state(kind: str, **details: Any) -> Object:
    """Return the fields of a status whose trainer is in this state."""
    return {"containerStatuses": [container("trainer", kind, **details)]}


def running(index: int, **more: Any) -> Object:
    """Return a pod whose trainer runs."""
    return pod(index, "Running", **{**state("running", startedAt=TIME), **more})


def ended(index: int, code: int, message: str = "", /, **more: Any) -> Object:
    """Return a pod that has ended with the exit code of its trainer."""
    details = {"exitCode": code, "message": message, "reason": more.pop("why", "Error")}
    told = state("terminated", **details, startedAt=TIME)
    return pod(index, "Failed" if code else "Succeeded", **{**told, **more})


def report(code: int, failure: FailureClass, message: str = "said") -> str:
    """Return a trainer's termination message."""
    made = Termination(failure_class=failure, exit_code=code, message=message)
    return made.model_dump_json(by_alias=True, exclude_none=True)


def condition(
    kind: str, status: str = "True", reason: str = "", message: str = ""
) -> dict[str, str]:
    """Return a condition of a pod."""
    found = {"type": kind, "status": status, "lastTransitionTime": TIME}
    return found | {k: v for k, v in (("reason", reason), ("message", message)) if v}


def disrupted(reason: str, message: str = "") -> Object:
    """Return the fields of a status that the cluster has disrupted."""
    return {"conditions": [condition("DisruptionTarget", "True", reason, message)]}
