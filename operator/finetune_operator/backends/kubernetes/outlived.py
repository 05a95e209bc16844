"""Decide when the operator ends pods that outlive their trainers, such as pods with a sidecar.

Called by `live_attempts` with each observation. A trainer's end is reported about a second before
the end of its pod, so that most pods need no action. All state is in memory: after a restart the
time counts again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.backends.kubernetes.verdict import Verdict

PATIENCE_SECONDS = 30.0
_MOST_NAMED = 3
_OVER = frozenset({AttemptPhase.SUCCEEDED, AttemptPhase.FAILED})


class OutlivedTrainers:
    """Attempts whose trainers have all ended before their pods, by the uid of the batch Job.

    Args:
        now: Returns the current time, with a time zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._since: dict[str, datetime] = {}

    def withhold(
        self, uid: str, seen: Observation, pods: Sequence[Verdict], *, is_ending: bool
    ) -> Observation:
        """Return the observation, or an unknown phase while the pods may still end by themselves.

        An observation with a pod that may write is returned as it is. A success whose pods another
        client deletes must be recorded at once, because their end may never be counted.

        Args:
            uid: Uid of the batch Job.
            seen: Observation of the attempt.
            pods: Verdicts on its pods.
            is_ending: Whether the batch Job is already ending.
        """
        if seen.all_gone or seen.phase not in _OVER or any(one.may_write for one in pods):
            self.forget(uid)
            return seen
        has_succeeded = seen.phase is AttemptPhase.SUCCEEDED
        is_urgent = not is_ending and any(one.pod.deleted for one in pods)
        if has_succeeded and is_urgent:
            return replace(seen, outlived_by="its pods are deleted, and the operator ends its Job")
        lingering = [one for one in pods if one.must_be_ended]
        if not lingering:
            self.forget(uid)
            return seen
        now = self._now()
        left = PATIENCE_SECONDS - (now - self._since.setdefault(uid, now)).total_seconds()
        if left <= 0:
            text = _containers(lingering)
            message = f"{seen.message}; {text}" if seen.message else text
            return replace(seen, message=message, outlived_by=text)
        if has_succeeded or not (is_ending or is_urgent):
            return Observation(AttemptPhase.UNKNOWN, requeue_seconds=left)
        return seen

    def forget(self, uid: str) -> None:
        """Drop the state of an attempt without such pods."""
        self._since.pop(uid, None)


def _containers(lingering: Sequence[Verdict]) -> str:
    """Return a clause that names the containers that still run."""
    names = [
        f"container {container.name} of pod {one.pod.name}"
        for one in lingering
        for container in one.pod.containers
        if container.state == "running"
    ] or [f"pod {one.pod.name}" for one in lingering]
    shown = ", ".join(names[:_MOST_NAMED])
    if (rest := len(names) - _MOST_NAMED) > 0:
        shown += f" and {rest} more"
    verb = "has" if len(names) == 1 else "have"
    return f"{shown} {verb} not ended with the trainers, and the operator ends the pods"
