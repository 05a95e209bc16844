"""Determine how a pod ended, from its termination message or else from its status. Pure."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from finetune_operator.backends.kubernetes.child_names import CONTAINER, INDEX_LABEL
from finetune_operator.backends.root_cause import (
    ended_silently,
    root_cause_order,
    with_seen_exit_code,
)
from finetune_operator.kube.resources import Object
from finetune_trainer.config import ExitCode, FailureClass, Termination

_LONGEST_TAIL = 400
# Messages of the runtime, the shell and Python about an image that cannot run any trainer.
_WRONG_IMAGE = {
    "exec format error": "is built for another processor than the node's",
    "executable file not found": "does not have the trainer",
    ": not found": "does not have the trainer",
    "No module named finetune_trainer": "does not have the trainer",
    "No module named 'finetune_trainer'": "does not have the trainer",
}


@dataclass(frozen=True)
class PodTermination:
    """How a pod ended.

    Attributes:
        index: Number of its node.
        termination: The termination.
        node: Name of its node; empty if it never ran.
        order: Sort key from `root_cause_order`.
    """

    index: int
    termination: Termination
    node: str
    order: int


def index_of(pod: Object) -> int:
    """Return the number of the pod's node."""
    return int(pod["metadata"].get("labels", {}).get(INDEX_LABEL, "0"))


def is_alive(pod: Object) -> bool:
    """Return whether a process of the pod may run, even on a node that does not respond."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def condition(obj: Object, kind: str) -> Any:
    """Return the condition of that type, or an empty mapping if it is absent."""
    found = obj.get("status", {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})


def container_state(pod: Object, state: str) -> Any:
    """Return the trainer's `waiting`, `running` or `terminated`; None if it is in another state."""
    for one in pod.get("status", {}).get("containerStatuses") or ():
        if one["name"] == CONTAINER:
            return one.get("state", {}).get(state)
    return None


def termination_of(pod: Object) -> PodTermination:
    """Return how a terminated pod ended."""
    name = pod["metadata"]["name"]
    node = pod.get("spec", {}).get("nodeName", "")
    ended = container_state(pod, "terminated")
    disruption = _disruption(pod)
    if disruption and (not ended or _parse(ended.get("message", "")) is None):
        where = f" on {node}" if node else ""
        text = f"pod {name}{where} was disrupted ({disruption})"
        termination = _termination(ExitCode.PREEMPTED, FailureClass.PREEMPTED, text)
        order = root_cause_order(ExitCode.KILLED, is_victim=False)
        return PodTermination(index_of(pod), termination, node, order)
    index = index_of(pod)
    termination = _from_container(name, index, ended) if ended else _from_status(name, pod)
    is_victim = "deletionTimestamp" in pod["metadata"] and not disruption
    order = root_cause_order(termination.exit_code, is_victim=is_victim)
    return PodTermination(index, termination, node, order)


def _disruption(pod: Object) -> str:
    """Return why the cluster disrupted the pod; empty if it did not.

    An eviction by the kubelet does not count, because the pod exhausted its node: the fault is the
    job's.
    """
    target, status = condition(pod, "DisruptionTarget"), pod.get("status", {})
    if target.get("status") != "True" or status.get("reason") == "Evicted":
        return ""
    return str(target.get("message") or target.get("reason") or "DisruptionTarget")


def _from_container(name: str, index: int, ended: Any) -> Termination:
    """Combine the trainer's termination message with the exit code from the kubelet."""
    code, message = int(ended["exitCode"]), ended.get("message", "")
    parsed = _parse(message)
    if parsed is None:
        return _without_message(name, index, code, str(ended.get("reason", "")), message)
    return with_seen_exit_code(f"pod {name}", parsed, code)


def _without_message(name: str, index: int, code: int, reason: str, tail: str) -> Termination:
    """Return how a pod without the trainer's message ended.

    Node 0 always leaves a message, because every launcher runs rank 0 there; other nodes may not.
    """
    last = tail.strip()[-_LONGEST_TAIL:]
    if reason == "OOMKilled":
        text = (
            f"pod {name} was killed because it reached its memory limit; lower "
            "spec.training.microBatchSize or maxSeqLength, or give the pods more memory"
        )
        return _termination(ExitCode.KILLED, FailureClass.OUT_OF_MEMORY, text)
    if (fault := _fault_of_image(tail)) is not None:
        text = (
            f"the image of pod {name} {fault} ({last}); set an image that `make images` has built "
            "for the nodes in spec.image of the job's FineTuneProfile"
        )
        return _termination(ExitCode.CONFIG, FailureClass.CONFIG_ERROR, text)
    if code == ExitCode.DONE and index == 0 and not last:
        text = (
            f"pod {name} ended with exit code 0 and without a termination message, "
            "so there is no evidence that it trained; see its log, and make "
            "spec.image and spec.command of the job's FineTuneProfile run the trainer"
        )
        return _termination(ExitCode.CONFIG, FailureClass.CONFIG_ERROR, text)
    reported = f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    more = f"; its last output: {last}" if last else "; see its log"
    return ended_silently(f"pod {name}", code, reason=reported, more=more)


def _fault_of_image(tail: str) -> str | None:
    """Return the fault of an image by the last output line, or None if it can run."""
    lines = tail.strip().splitlines() or [""]
    return next((fault for phrase, fault in _WRONG_IMAGE.items() if phrase in lines[-1]), None)


def _from_status(name: str, pod: Object) -> Termination:
    """Return the termination of a pod whose container never ran, or whose node died."""
    status = pod.get("status", {})
    if status.get("phase") == "Succeeded":
        text = f"pod {name} ended with exit code 0 without a termination message"
        return _termination(ExitCode.DONE, FailureClass.COMPLETED, text)
    reason = status.get("reason") or "no reason given"
    more = f": {status['message'].strip()}" if status.get("message") else ""
    text = f"pod {name} failed ({reason}){more}"
    return _termination(ExitCode.KILLED, FailureClass.WORKER_LOST, text)


def _parse(message: str) -> Termination | None:
    try:
        return Termination.model_validate_json(message)
    except ValidationError:
        return None  # then the text is the end of the log


def _termination(code: int, failure: FailureClass, message: str) -> Termination:
    return Termination(failure_class=failure, exit_code=code, message=message)
