"""The verdict on a pod: its state, and why it waits or has ended."""

from dataclasses import dataclass, field
from enum import StrEnum

from finetune_operator.backends.kubernetes.pod_facts import PodFacts
from finetune_operator.backends.root_cause import (
    NO_EXIT_CODE,
    PERMANENT_CODES,
    root_cause_order,
)
from finetune_trainer.config import ExitCode, FailureClass, Termination


class PodState(StrEnum):
    """State of a pod."""

    WAITING = "Waiting"  # its trainer has not started
    RUNNING = "Running"  # its trainer runs
    LEAVING = "Leaving"  # it was deleted, and its trainer may still save
    UNREACHABLE = "Unreachable"  # its trainer ran when its node last responded
    LINGERING = "Lingering"  # its trainer has ended, and the pod has not
    LOST = "Lost"  # its node did not end it, and its trainer can no longer write
    ENDED = "Ended"


_MAY_WRITE = frozenset({PodState.WAITING, PodState.RUNNING, PodState.LEAVING, PodState.UNREACHABLE})


@dataclass(frozen=True)
class End:
    """How a pod's trainer ended.

    Attributes:
        failure_class: Its class.
        exit_code: Exit code of the trainer; NO_EXIT_CODE if it never ran, or none was reported.
        report: The trainer's own termination message, if it left one.
        is_decided: Whether the cluster has decided the class, so that no exit code overrides it.
    """

    failure_class: FailureClass
    exit_code: int = NO_EXIT_CODE
    report: Termination | None = None
    is_decided: bool = False


@dataclass(frozen=True)
class Verdict:
    """State of a pod, and the cause of it.

    Attributes:
        reason: A CamelCase word for the cause; empty if a pod runs, or waits without an obstacle.
        sentence: The cause in the words of the cluster or the trainer.
        remedy: What to do; empty if the sentence includes it, or no action is needed.
        end: How its trainer ended; None before that.
    """

    pod: PodFacts = field(repr=False)
    state: PodState
    reason: str = ""
    sentence: str = ""
    remedy: str = ""
    end: End | None = None

    @property
    def message(self) -> str:
        """Sentence and remedy."""
        return f"{self.sentence}; {self.remedy}" if self.remedy else self.sentence

    @property
    def may_write(self) -> bool:
        """Whether a trainer in the pod may write checkpoints, now or later."""
        return self.state in _MAY_WRITE

    @property
    def holds_node(self) -> bool:
        """Whether the pod still occupies its node."""
        return self.state not in (PodState.ENDED, PodState.LOST)

    @property
    def must_be_ended(self) -> bool:
        """Whether the pod outlives its trainer, so that the operator must end it."""
        return self.state is PodState.LINGERING

    @property
    def runs(self) -> bool:
        """Whether its trainer runs, as last reported."""
        return self.may_write and self.pod.trainer.state == "running"

    @property
    def is_done(self) -> bool:
        """Whether its trainer has ended with exit code 0."""
        return self.end is not None and self.end.exit_code == ExitCode.DONE

    @property
    def is_victim(self) -> bool:
        """Whether the pod was deleted, and may therefore have ended with the others."""
        code = self.end.exit_code if self.end is not None else NO_EXIT_CODE
        is_disrupted = self.pod.disruption.status == "True"
        if self.state is PodState.LOST and self.pod.is_unreachable:
            return False
        return bool(self.pod.deleted) and not is_disrupted and code not in PERMANENT_CODES

    @property
    def may_be_replaced(self) -> bool:
        """Whether the pod is gone, and the end of its trainer was never reported."""
        return self.pod.is_gone and self.pod.trainer.state != "terminated"

    @property
    def counts_as_failed(self) -> bool:
        """Whether the batch Job's controller counts the pod as failed."""
        return self.pod.phase == "Failed"

    @property
    def order(self) -> tuple[int, int]:
        """Sort key in the search for the root cause of an attempt; the lowest is the root cause."""
        end = self.end or End(FailureClass.UNKNOWN)
        code = ExitCode.KILLED if end.is_decided else end.exit_code
        return root_cause_order(code, is_victim=self.is_victim), self.pod.index

    @property
    def termination(self) -> Termination | None:
        """The termination for the attempt; None before the trainer has ended."""
        if self.end is None:
            return None
        judged = Termination(
            failure_class=self.end.failure_class,
            exit_code=self.end.exit_code,
            message=self.message,
        )
        if self.end.report is None:
            return judged
        known = {"failure_class", "exit_code", "message"}
        return self.end.report.model_copy(update=judged.model_dump(include=known))
