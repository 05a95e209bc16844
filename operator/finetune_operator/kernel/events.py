"""Kubernetes Events of jobs, each posted at most once.

Events are for people (`kubectl describe`). No decision reads them, and a failure to post one is
only logged. An Event that a crash prevented is not posted later: the status, which is written
first, has the same content.
"""

import hashlib
import logging
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from finetune_operator.api.v1alpha1 import API_VERSION, KIND, ObjectMeta
from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.kube.api_errors import AlreadyExistsError, ApiError, NotLeadingError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import EVENTS, Object
from finetune_operator.reconcile.conditions import ConditionType, Reason, find, is_finished, is_true
from finetune_operator.reconcile.suspects import new_suspects
from finetune_trainer.config import redact

log = logging.getLogger(__name__)

COMPONENT = "finetune-operator"
_REMEMBERED = 4096
_REPORTED = (
    ConditionType.RUNNING,
    ConditionType.SUSPENDED,
    ConditionType.COMPLETE,
    ConditionType.FAILED,
    ConditionType.STALLED,
)
_BAD = frozenset({ConditionType.FAILED, ConditionType.STALLED})


class EventType(StrEnum):
    """The two types of Kubernetes."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class JobEvent:
    """Content of an Event.

    Attributes:
        reason: One CamelCase word.
        message: One sentence.
        subject: What identifies an Event whose message may change; it is still posted only once.
    """

    type: EventType
    reason: str
    message: str
    subject: str = ""

    def __post_init__(self) -> None:
        """Remove credentials from the message, which may come from a log or a service."""
        object.__setattr__(self, "message", redact(self.message))

    @property
    def identity(self) -> str:
        """Text that distinguishes the Event from all others of the job."""
        return self.subject or f"{self.type}/{self.reason}/{self.message}"


def warning(text: str) -> JobEvent:
    """Return the Event of an `Observation.warning`."""
    return JobEvent(EventType.WARNING, "AttemptDisturbed", text)


def events_between(old: FineTuneJobStatus, new: FineTuneJobStatus) -> list[JobEvent]:
    """Return the Events for the changes from one status to the next."""
    events: list[JobEvent] = []
    ended = {attempt.number for attempt in new.attempts if attempt.end_time} - {
        attempt.number for attempt in old.attempts if attempt.end_time
    }
    if not is_finished(new):
        events += [
            JobEvent(
                EventType.WARNING,
                attempt.failure_class or "AttemptEnded",
                f"attempt {attempt.number} ended: {attempt.message}",
            )
            for attempt in new.attempts
            if attempt.number in ended and not is_true(new, ConditionType.SUSPENDED)
        ]
    created = new.backend_ref
    if created is not None and created != old.backend_ref:
        message = f"attempt {new.attempt} is {created.kind} {created.name}"
        events.append(JobEvent(EventType.NORMAL, "AttemptCreated", message))
    events += _overruling(old, new)
    events += [
        JobEvent(EventType.WARNING, "RankHoldsBack", suspect.message, subject=subject)
        for subject, suspect in new_suspects(old, new)
    ]
    for kind in _REPORTED:
        found = find(new, kind)
        if found is None or not is_true(new, kind):
            continue
        before = find(old, kind)
        is_same = before is not None and before.status == "True" and before.reason == found.reason
        if is_same or (kind is ConditionType.STALLED and is_true(new, ConditionType.FAILED)):
            continue
        type_ = EventType.WARNING if kind in _BAD else EventType.NORMAL
        events.append(JobEvent(type_, found.reason, found.message))
    return events


def _overruling(old: FineTuneJobStatus, new: FineTuneJobStatus) -> list[JobEvent]:
    """Return the Event about a job that another writer has marked as finished."""
    found, before = find(new, ConditionType.READY), find(old, ConditionType.READY)
    if found is None or found.reason != Reason.ENDED_BY_OTHERS:
        return []
    if before is not None and before.reason == found.reason:
        return []
    return [JobEvent(EventType.WARNING, found.reason, found.message)]


class EventPoster:
    """Posts Events of jobs under names derived from their content, so that each exists once.

    Args:
        client: Sends the requests.
        instance: Name of this replica.
    """

    def __init__(self, client: KubeClient, instance: str) -> None:
        self._client = client
        self._instance = instance
        self._posted: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def post(self, metadata: ObjectMeta, event: JobEvent) -> bool:
        """Post an Event about the job with this metadata, unless it was posted before.

        Errors of the API server are logged, not raised.

        Returns:
            Whether the Event exists.
        """
        remembered = (metadata.uid, event.identity)
        if remembered in self._posted:
            self._posted.move_to_end(remembered)
            return True
        body = self._body(metadata, event)
        try:
            await self._client.create(EVENTS, body, metadata.namespace)
        except AlreadyExistsError:
            pass  # posted by an earlier process
        except (ApiError, NotLeadingError) as error:
            extra = {"job": f"{metadata.namespace}/{metadata.name}", "error": str(error)}
            log.warning("event not posted", extra=extra)
            return False
        self._posted[remembered] = None
        while len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)
        return True

    def _body(self, metadata: ObjectMeta, event: JobEvent) -> Object:
        content = f"{metadata.uid}/{event.identity}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "metadata": {
                "name": f"{metadata.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
                "namespace": metadata.namespace,
            },
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata.name,
                "namespace": metadata.namespace,
                "uid": metadata.uid,
            },
            "type": event.type.value,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": COMPONENT, "host": self._instance},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
