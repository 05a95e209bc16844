"""What became of one pod: its last words, or what its status tells where it left none. Pure."""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from finetune_operator.backends.aks.names import CONTAINER, INDEX_LABEL
from finetune_operator.backends.guilt import TOLD_TO_LEAVE, innocence, told_to_leave
from finetune_operator.kube.resources import Object
from finetune_trainer.config import ExitCode, FailureClass, Termination

_LONGEST_TAIL = 400


@dataclass(frozen=True)
class PodEnd:
    """How a pod ended.

    Attributes:
        index: Number of its node.
        words: Why.
        node: Where it ran; empty if nowhere.
        innocence: How little that explains of the others' ends.
    """

    index: int
    words: Termination
    node: str
    innocence: int


def index_of(pod: Object) -> int:
    """Return the number of the pod's node."""
    return int(pod["metadata"].get("labels", {}).get(INDEX_LABEL, "0"))


def is_alive(pod: Object) -> bool:
    """Say whether a process of it may run; on a node that does not answer it may."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def condition(made: Object, kind: str) -> Any:
    """Return the condition of that type; an empty mapping where there is none."""
    found = made.get("status", {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})


def container_state(pod: Object, state: str) -> Any:
    """Return `waiting`, `running` or `terminated` of the trainer; None if it is not in it."""
    for one in pod.get("status", {}).get("containerStatuses") or ():
        if one["name"] == CONTAINER:
            return one.get("state", {}).get(state)
    return None


def end_of(pod: Object) -> PodEnd:
    """Return how a pod that is not alive ended."""
    name = pod["metadata"]["name"]
    node = pod.get("spec", {}).get("nodeName", "")
    ended = container_state(pod, "terminated")
    disruption = _disruption(pod)
    if disruption and not _has_words(ended):
        where = f" on {node}" if node else ""
        text = f"pod {name}{where} was taken away ({disruption})"
        words = _words(ExitCode.PREEMPTED, FailureClass.PREEMPTED, text)
        return PodEnd(index_of(pod), words, node, innocence(ExitCode.KILLED, is_victim=False))
    words = _said(name, ended) if ended else _unsaid(name, pod)
    is_victim = "deletionTimestamp" in pod["metadata"] and not disruption
    guilt = innocence(words.exit_code, is_victim=is_victim)
    return PodEnd(index_of(pod), words, node, guilt)


def _disruption(pod: Object) -> str:
    """Return why the cluster took the pod away; empty if it did not.

    The kubelet evicts pods that use up their node, which is the job's own fault.
    """
    target, status = condition(pod, "DisruptionTarget"), pod.get("status", {})
    if target.get("status") != "True" or status.get("reason") == "Evicted":
        return ""
    return str(target.get("message") or target.get("reason") or "DisruptionTarget")


def _has_words(ended: Any) -> bool:
    return bool(ended) and _parse(ended.get("message", "")) is not None


def _said(name: str, ended: Any) -> Termination:
    """Join what the trainer said with the exit code that the kubelet saw."""
    code, message = int(ended["exitCode"]), ended.get("message", "")
    said = _parse(message)
    if said is None:
        return _without_words(name, code, str(ended.get("reason", "")), message)
    if said.exit_code == code:
        return said
    failure = said.failure_class
    if failure is FailureClass.COMPLETED:
        failure = FailureClass.ERROR
    text = f"pod {name} ended with exit code {code} after it said: {said.message}"
    changed = {"exit_code": code, "message": text, "failure_class": failure}
    return said.model_copy(update=changed)


def _without_words(name: str, code: int, reason: str, tail: str) -> Termination:
    last = tail.strip()[-_LONGEST_TAIL:]
    if reason == "OOMKilled":
        text = (
            f"pod {name} was killed as it reached its memory limit; lower "
            "spec.training.microBatchSize or maxSeqLength, or give the pods more memory"
        )
        return _words(ExitCode.KILLED, FailureClass.OUT_OF_MEMORY, text)
    if code == ExitCode.DONE:
        text = f"pod {name} ended with exit code 0 without last words"
        return _words(code, FailureClass.COMPLETED, text)
    if code == ExitCode.KILLED:
        text = f"pod {name} was killed (SIGKILL) without last words"
        return _words(code, FailureClass.WORKER_LOST, text)
    if code in TOLD_TO_LEAVE:
        return told_to_leave(f"pod {name}", code)
    said = f" ({reason})" if reason not in ("", "Error") else ""
    told = f"; it said last: {last}" if last else "; see its log"
    text = f"pod {name} ended with exit code {code}{said} without last words{told}"
    return _words(code, FailureClass.ERROR, text)


def _unsaid(name: str, pod: Object) -> Termination:
    """Return the words for a pod whose container never ended, as it never ran or its node died."""
    status = pod.get("status", {})
    if status.get("phase") == "Succeeded":
        text = f"pod {name} ended with exit code 0 without last words"
        return _words(ExitCode.DONE, FailureClass.COMPLETED, text)
    reason = status.get("reason") or "no reason given"
    told = f": {status['message'].strip()}" if status.get("message") else ""
    text = f"pod {name} failed ({reason}){told}"
    return _words(ExitCode.KILLED, FailureClass.WORKER_LOST, text)


def _parse(message: str) -> Termination | None:
    try:
        return Termination.model_validate_json(message)
    except ValidationError:
        return None  # the end of the log, which Kubernetes puts in its place


def _words(code: int, failure: FailureClass, message: str) -> Termination:
    return Termination(failure_class=failure, exit_code=code, message=message)
