"""Report that it is unknown whether an attempt trains if a node of it does not respond.

Called by `live_attempts` with each observation. The node controller marks the pods of a node whose
kubelet is silent. Training continues if only the kubelet is cut off, so rank 0's progress decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from finetune_operator.backends.base import AttemptPhase, Observation, Obstacle
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.backends.kubernetes.verdict import PodState, Verdict
from finetune_trainer.config import Phase

PATIENCE_SECONDS = 45.0
"""Time without a new step or phase; longer if progress is rarely read."""


@dataclass(frozen=True)
class _Advance:
    """The newest step and phase of rank 0, and when they were first seen."""

    place: tuple[Phase, int] | None
    at: datetime


class SilentNodes:
    """Attempts with a pod on a node that does not respond, by the uid of the batch Job.

    Args:
        now: Returns the current time, with a time zone.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._advances: dict[str, _Advance] = {}

    def judge(
        self, uid: str, seen: Observation, pods: Sequence[Verdict], interval_seconds: float
    ) -> Observation:
        """Return the observation of a running attempt, without its progress if that is unknown."""
        text, since = warning_about(pods), _since(pods)
        if since is None or seen.phase is not AttemptPhase.RUNNING:
            self.forget(uid)
            return seen
        report, now = seen.progress, self._now()
        place = (report.phase, report.step) if report is not None else None
        last = self._advances.get(uid) or _Advance(place, min(since, now))
        if place not in (None, last.place):
            last = _Advance(place, now)
        self._advances[uid] = last
        patience = max(PATIENCE_SECONDS, 2 * interval_seconds)
        left = patience - (now - last.at).total_seconds()
        if left > 0:
            return replace(seen, requeue_seconds=min(left, seen.requeue_seconds or left))
        obstacle = Obstacle(KubernetesReason.NODE_NOT_RESPONDING, "")
        return replace(seen, progress=None, is_training=None, unheard=text, obstacle=obstacle)

    def forget(self, uid: str) -> None:
        """Drop the state of an attempt without such a pod."""
        self._advances.pop(uid, None)


def warning_about(pods: Sequence[Verdict]) -> str:
    """Return node, time and remedy of the first pod whose node does not respond; or empty."""
    silent = _silent(pods)
    return silent[0].message if silent else ""


def _since(pods: Sequence[Verdict]) -> datetime | None:
    times = [one.pod.ready.since for one in _silent(pods)]
    return min(map(datetime.fromisoformat, filter(None, times)), default=None)


def _silent(pods: Sequence[Verdict]) -> list[Verdict]:
    return [one for one in pods if one.state is PodState.UNREACHABLE]
