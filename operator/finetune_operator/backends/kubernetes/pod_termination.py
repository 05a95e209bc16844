"""Judge how a pod ended, from the cluster's words and the trainer's. Pure.

A trainer's own error or completion takes precedence over the cluster's words, and these over a
trainer that was stopped by a signal or left no message.
"""

from typing import NamedTuple

from pydantic import ValidationError

from finetune_operator.backends.kubernetes.pod_facts import PodFacts, Role
from finetune_operator.backends.kubernetes.verdict import End, PodState, Verdict
from finetune_operator.backends.root_cause import (
    NO_EXIT_CODE,
    STOPPED_BY_SIGNAL,
    ended_silently,
    with_seen_exit_code,
)
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
_KILLED = frozenset({ExitCode.KILLED, *STOPPED_BY_SIGNAL})
_STOPPED = frozenset({ExitCode.PREEMPTED, *_KILLED})
_LOST_CONTAINER = 255  # exit code from a container runtime that has lost the container
_LOST = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of a container whose end the kubelet or the container runtime has not seen."""

_OF_LOST_NODE = frozenset({"DeletionByPodGC", "DeletionByTaintManager"})
_OWN_LIMITS = {
    "Evicted": "raise the limit that is named here, or have the pod use less",
    "DeadlineExceeded": "another client has set activeDeadlineSeconds on the pod; remove it there",
}


class _Cause(NamedTuple):
    """Why the cluster has ended a pod."""

    failure_class: FailureClass
    reason: str
    sentence: str
    remedy: str = ""


def judge_end(pod: PodFacts, state: PodState) -> Verdict:
    """Return the verdict on a pod whose trainer has ended, or can never run."""
    report = _own_report(pod)
    if report is None or report.exit_code in _STOPPED:
        rules = (_disruption, _own_limit, _never_ran, _deletion, _lost_container)
        cause = next((found for rule in rules if (found := rule(pod)) is not None), None)
        if cause is not None:
            return _decided(pod, state, cause, report)
    report = report or _silent_end(pod)
    end = End(report.failure_class, report.exit_code, report)
    return Verdict(pod, state, report.failure_class, report.message, end=end)


def _decided(pod: PodFacts, state: PodState, cause: _Cause, report: Termination | None) -> Verdict:
    """Return the verdict by the cluster; a report of the stop adds how far the trainer came."""
    code = NO_EXIT_CODE if _was_lost(pod) else pod.trainer.exit_code or NO_EXIT_CODE
    sentence = cause.sentence
    if report is not None:
        code, sentence = report.exit_code, f"{sentence}; {report.message}"
    end = End(cause.failure_class, code, report, is_decided=True)
    return Verdict(pod, state, cause.reason, sentence, cause.remedy, end)


def _own_report(pod: PodFacts) -> Termination | None:
    """Return the trainer's termination message, with the exit code from the kubelet."""
    if pod.trainer.state != "terminated":
        return None
    try:
        report = Termination.model_validate_json(pod.trainer.message)
    except ValidationError:
        return None  # then the text is the end of the log
    return with_seen_exit_code(f"pod {pod.name}", report, pod.trainer.exit_code)


def _was_lost(pod: PodFacts) -> bool:
    """Whether no process gave the exit code of the trainer's container."""
    return pod.trainer.state != "terminated" or pod.trainer.reason in _LOST


def _disruption(pod: PodFacts) -> _Cause | None:
    found = pod.disruption
    if found.status != "True":
        return None
    reason = found.reason or "DisruptionTarget"
    text = f"{_where(pod)} was disrupted ({pod.message.strip() or found.message or reason})"
    # A node whose kubelet has reported the end of the trainer is not lost.
    is_lost = reason in _OF_LOST_NODE and _was_lost(pod)
    return _Cause(FailureClass.NODE_LOST if is_lost else FailureClass.PREEMPTED, reason, text)


def _own_limit(pod: PodFacts) -> _Cause | None:
    """Return the eviction at a limit of the pod itself; node pressure is a disruption."""
    if pod.reason not in _OWN_LIMITS:
        return None
    words = pod.message.strip() or "no reason given"
    text = f"{_where(pod)} was ended by the kubelet ({pod.reason}): {words}"
    return _Cause(FailureClass.EVICTED, pod.reason, text, _OWN_LIMITS[pod.reason])


def _never_ran(pod: PodFacts) -> _Cause | None:
    trainer = pod.trainer
    if trainer.state == "running" or trainer.started or not _was_lost(pod):
        return None
    failed = next((one for one in pod.containers if one.role is Role.INIT and one.exit_code), None)
    if failed is not None and not (pod.deleted and failed.exit_code in _KILLED):
        details = f"exit code {failed.exit_code}, {failed.reason or 'no reason given'}"
        last = failed.message.strip()[-_LONGEST_TAIL:]
        text = f"init container {failed.name} of {_where(pod)} failed ({details})"
        remedy = f"see its log: kubectl logs -n {pod.namespace} {pod.name} -c {failed.name}"
        sentence = f"{text}: {last}" if last else text
        return _Cause(FailureClass.NOT_STARTED, "InitContainerFailed", sentence, remedy)
    if pod.deleted:
        text = f"{_where(pod)} was deleted before its trainer ran"
        return _Cause(FailureClass.PREEMPTED, "Deleted", text)
    if pod.phase == "Failed" and pod.reason:
        more = f": {pod.message.strip()}" if pod.message.strip() else ""
        text = f"{_where(pod)} was rejected by the kubelet ({pod.reason}){more}"
        remedy = f"if this recurs, compare the pod with kubectl describe node {pod.node}"
        return _Cause(FailureClass.REJECTED, pod.reason, text, remedy)
    return None


def _deletion(pod: PodFacts) -> _Cause | None:
    """Return the deletion of a pod whose trainer has left no message since."""
    trainer = pod.trainer
    is_silent = _was_lost(pod) or (
        trainer.exit_code in _KILLED and trainer.reason != "OOMKilled" and _own_report(pod) is None
    )
    if not pod.deleted or not is_silent:
        return None
    text = f"{_where(pod)} was deleted, and its trainer stopped before it could save or report"
    return _Cause(FailureClass.PREEMPTED, "Deleted", text)


def _lost_container(pod: PodFacts) -> _Cause | None:
    trainer = pod.trainer
    if trainer.state != "terminated" or trainer.reason not in _LOST:
        return None
    text = f"the node of {_where(pod)} has lost the trainer's container ({trainer.reason})"
    remedy = f"if this recurs, see kubectl describe node {pod.node}"
    return _Cause(FailureClass.NODE_LOST, trainer.reason, text, remedy)


def _where(pod: PodFacts) -> str:
    return f"pod {pod.name} on {pod.node}" if pod.node else f"pod {pod.name}"


def _silent_end(pod: PodFacts) -> Termination:
    """Return how a pod without the trainer's message ended.

    Node 0 always leaves a message, because every launcher runs rank 0 there; other nodes may not.
    """
    name, code, reason = pod.name, pod.trainer.exit_code, pod.trainer.reason
    last = pod.trainer.message.strip()[-_LONGEST_TAIL:]
    if pod.trainer.state != "terminated":
        return _without_container(pod)
    if reason == "OOMKilled":
        text = (
            f"pod {name} was killed because it reached its memory limit; lower "
            "spec.training.microBatchSize or maxSeqLength, or give the pods more memory"
        )
        return _termination(ExitCode.KILLED, FailureClass.OUT_OF_MEMORY, text)
    if (fault := _fault_of_image(last)) is not None:
        text = (
            f"the image of pod {name} {fault} ({last}); set an image that `make images` has built "
            "for the nodes in spec.image of the job's FineTuneProfile"
        )
        return _termination(ExitCode.CONFIG, FailureClass.CONFIG_ERROR, text)
    if code == ExitCode.DONE and pod.index == 0 and not last:
        text = (
            f"pod {name} ended with exit code 0 and without a termination message, "
            "so there is no evidence that it trained; see its log, and make "
            "spec.image and spec.command of the job's FineTuneProfile run the trainer"
        )
        return _termination(ExitCode.CONFIG, FailureClass.CONFIG_ERROR, text)
    if code == _LOST_CONTAINER and not last:
        text = (
            f"pod {name} ended with exit code 255 without a termination message, as when the "
            f"container runtime loses a container; see kubectl describe node {pod.node}"
        )
        return _termination(code, FailureClass.WORKER_LOST, text)
    reported = f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    more = f"; its last output: {last}" if last else "; see its log"
    return ended_silently(f"pod {name}", code, reason=reported, more=more)


def _fault_of_image(tail: str) -> str | None:
    """Return the fault of an image by the last output line, or None if it can run."""
    lines = tail.splitlines() or [""]
    return next((fault for phrase, fault in _WRONG_IMAGE.items() if phrase in lines[-1]), None)


def _without_container(pod: PodFacts) -> Termination:
    """Return the end of a pod that has ended although no end of its trainer was reported."""
    if pod.phase == "Succeeded":
        text = f"pod {pod.name} ended with exit code 0 without a termination message"
        return _termination(ExitCode.DONE, FailureClass.COMPLETED, text)
    reason = pod.reason or "no reason given"
    more = f": {pod.message.strip()}" if pod.message else ""
    text = f"pod {pod.name} failed ({reason}){more}"
    return _termination(NO_EXIT_CODE, FailureClass.WORKER_LOST, text)


def _termination(code: int, failure: FailureClass, message: str) -> Termination:
    return Termination(failure_class=failure, exit_code=code, message=message)
