"""Facts about a run: the trainer's report in its tags, and the run history's after its end.

`polling` requests it and `states` evaluates it. Other clients may write tags, too, so an unreadable
tag counts as absent.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from finetune_operator.backends.azureml.names import NO_REPORT, Report, report_of
from finetune_operator.backends.azureml.places import CHECKPOINTS
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.budget import Priority
from finetune_operator.backends.root_cause import PERMANENT_CODES, ended_silently, root_cause
from finetune_operator.errors import BackendError
from finetune_trainer.config import ContractModel, ExitCode, FailureClass, Termination

log = logging.getLogger(__name__)

T = TypeVar("T", bound=ContractModel)

GONE = ""  # the job does not exist
RUNNING, COMPLETED, FAILED, CANCELED = "Running", "Completed", "Failed", "Canceled"
_LATE_SECONDS = 5.0

_OF_SERVICE = frozenset({"ServiceError", "SystemError", "TransientError", "RequestThrottled"})
_PREEMPTION_ERROR = re.compile(r"\bPreemptionError\b")
_PREEMPTED = re.compile(r"PreemptionError|pre-?empt(ed|ion)", re.IGNORECASE)
_TIME_LIMIT = re.compile(r"time(d |-)?out|time limit|max\w* (run )?duration", re.IGNORECASE)
_EXIT_CODE = re.compile(
    r"\b(?:exit(?:ed)?(?: with)?(?: exit)?(?: status)?(?: code)?|return code)"
    r"[\s:=]{1,2}(-?\d{1,3})\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Seen:
    """Result of one request about an attempt; missing values are empty.

    Attributes:
        state: State in Azure ML's spelling; `GONE` if the job does not exist.
        report: Contents of its tags.
        url: Its page.
        checkpoints: URI of the folder of its checkpoints.
    """

    state: str
    report: Report = NO_REPORT
    url: str = ""
    checkpoints: str = ""
    created: datetime | None = None
    nodes: int = 0


@dataclass(frozen=True)
class RunEnd:
    """The end of a run according to the run history; each field may be empty.

    Attributes:
        code: Error code, such as `UserError`.
        text: Error text.
        cancelled_by: The user who cancelled it, unless that was its creator.
        cancel_reason: Reason that the user gave.
    """

    code: str = ""
    text: str = ""
    cancelled_by: str = ""
    cancel_reason: str = ""


NO_END = RunEnd()


async def see_run(
    workspace: Workspace, name: str, priority: Priority = Priority.READ
) -> tuple[Seen | None, str]:
    """Return MLflow's view of a run, and the reason if the view is empty.

    It is empty for a run that does not run, because MLflow does not distinguish its states, and if
    MLflow refuses the request.

    Raises:
        TransientError: There is no response.
    """
    path = "/mlflow/v2.0{ws}/api/2.0/mlflow/runs/get"
    try:
        run = (await workspace.get(path, {"run_id": name}, priority))["run"]
        status, found = run["info"]["status"], run["data"].get("tags") or ()
        tags = {one["key"]: one["value"] for one in found}
    except (KeyError, TypeError) as error:
        return None, f"its progress cannot be read: the response of MLflow has no {error}"
    except BackendError as error:
        if error.retryable:
            raise
        return None, f"its progress cannot be read: {error}"
    return (Seen(RUNNING, report_of(tags)) if status == "RUNNING" else None), ""


async def see_job(workspace: Workspace, name: str, priority: Priority = Priority.READ) -> Seen:
    """Return Azure ML's view of a job; two requests must agree that it is deleted.

    Raises:
        TransientError: There is no response.
        BackendError: The request is refused.
    """
    job = await workspace.job(name, priority)
    if job is None:  # a new job may not be visible yet
        await asyncio.sleep(_LATE_SECONDS)
        job = await workspace.job(name, priority)
    return Seen(GONE) if job is None else seen_of(job)


def seen_of(job: RawJob) -> Seen:
    """Convert a response about a job."""
    checkpoints = job.outputs.get(CHECKPOINTS, "")
    report = report_of(job.tags)
    return Seen(job.status, report, job.url, checkpoints, job.created, job.nodes)


def ended(
    state: str, end: RunEnd, last_words: Mapping[int, Termination], url: str, *, is_ours: bool
) -> Observation:
    """Return how a run ended, without the fields that are equal for every end.

    Args:
        state: State in Azure ML's spelling.
        end: The end according to the run history.
        last_words: Termination messages by node number.
        url: Page of the run.
        is_ours: Whether the operator has stopped it.
    """
    if state == GONE:
        return Observation(AttemptPhase.UNKNOWN, message="Azure ML no longer has the job")
    if state == COMPLETED:
        rank_0, message = last_words.get(0), "Azure ML reports that the job has completed"
        return Observation(AttemptPhase.SUCCEEDED, termination=rank_0, message=message)
    if state == CANCELED:
        return _cancelled(end, last_words, is_ours=is_ours)
    return _failed(end, last_words, url)


def _cancelled(end: RunEnd, last_words: Mapping[int, Termination], *, is_ours: bool) -> Observation:
    """Return how a cancelled run ended; a cancel by anyone else counts as a user's decision."""
    if is_ours:
        text = "the job was cancelled on the operator's request, before it could report anything"
        return _failure(FailureClass.PREEMPTED, text, last_words)
    reason = f" ({end.cancel_reason})" if end.cancel_reason else ""
    if _TIME_LIMIT.search(end.cancel_reason or end.text):
        text = f"Azure ML has cancelled the job at a time limit of its own{reason}"
        return _failure(FailureClass.SERVICE_FAILED, text)
    text = (
        f"{end.cancelled_by or 'a user'} cancelled the job in Azure ML{reason}; to continue, apply "
        "it under another name or after deleting this one"
    )
    return _failure(FailureClass.DO_NOT_RESTART, text)


def _failed(end: RunEnd, last_words: Mapping[int, Termination], url: str) -> Observation:
    """Return how a failed run ended.

    A preempted node explains the failure of its peers, but not of a node that never ran.
    """
    cause = end.text or end.code or "without a reason"
    message = f"Azure ML reports that the job failed ({cause}); see {url}"
    is_permanent = any(one.exit_code in PERMANENT_CODES for one in last_words.values())
    preempted = _PREEMPTION_ERROR if last_words else _PREEMPTED  # the error text may quote a log
    if preempted.search(end.text) and not is_permanent:
        return _failure(FailureClass.PREEMPTED, f"Azure ML has preempted nodes ({cause})")
    failure = FailureClass.SERVICE_FAILED if end.code in _OF_SERVICE else FailureClass.UNKNOWN
    if not last_words and (code := exit_code_in(end.text)) is not None:
        last_words = {0: ended_silently("a node", code, more=f"; see its log in {url}")}
    return _failure(failure, message, last_words)


def exit_code_in(text: str) -> int | None:
    """Return the exit code in an error text, in the shell's form; None without one."""
    for found in _EXIT_CODE.finditer(text):
        code = int(found[1])
        code = code if code >= 0 else 128 - code
        if 0 < code < 256:
            return code
    return None


def _failure(
    failure: FailureClass, message: str, last_words: Mapping[int, Termination] | None = None
) -> Observation:
    """Return the failure of the root cause, with the class to use if no node reports one."""
    node = root_cause(last_words or {})
    cause = None if node is None or last_words is None else last_words[node]
    if cause is None or cause.exit_code == ExitCode.DONE:
        return Observation(AttemptPhase.FAILED, failure_class=failure, message=message)
    where = f"node {node}" if last_words and len(last_words) > 1 else ""
    return Observation(AttemptPhase.FAILED, termination=cause, node=where, message=cause.message)
