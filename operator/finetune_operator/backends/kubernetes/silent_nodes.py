"""Judge an attempt with a node that does not respond: it trains, is unheard, or has lost the node.

Called by `live_attempts` with each observation of a running attempt. The node controller marks the
pods of a node whose kubelet is silent. Training continues if only the kubelet is cut off, so rank
0's progress decides. All periods count on the loop's clock.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune_operator.backends.base import Effect, Observation, Obstacle
from finetune_operator.backends.kubernetes.child_names import AttemptFacts
from finetune_operator.backends.kubernetes.lost_pods import LostPods
from finetune_operator.backends.kubernetes.reasons import KubernetesReason
from finetune_operator.backends.kubernetes.verdict import PodState, Verdict
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_trainer.config import FailureClass, Phase, Progress, Termination

PATIENCE_SECONDS = 45.0
"""Time without a new step or phase after which it is unknown whether an attempt trains."""

LOST_SECONDS = 60.0
"""Shortest time without a new step after which an attempt has lost its node."""

LOST_STEPS = 5
"""The same in steps, for an attempt whose steps take longer."""

LONG_PHASE_SECONDS = 900.0
"""The same in phases without steps, such as an evaluation, and while no step was measured."""

HEARD_SECONDS = 60.0
"""Rank 0 must have responded at most this time, and two reads, before the node was marked."""


@dataclass
class _Advance:
    """The newest progress of rank 0; times are of the loop's clock.

    Attributes:
        place: Phase, step and newest checkpoint.
        at: When they were first seen.
        stepped_at: When the step last changed; None if no change was seen.
        step_seconds: Duration of a step between the last two changes of it; None if unknown.
        heard_at: When rank 0 last responded.
        is_unproven: Whether a node was silent at the first observation by this process, and rank 0
            has not advanced since.
    """

    place: tuple[Phase, int, int] | None
    at: float
    stepped_at: float | None = None
    step_seconds: float | None = None
    heard_at: float = -math.inf
    is_unproven: bool = False

    def note(self, report: Progress | None, heard_at: float | None, now: float) -> None:
        """Record the newest progress, and when rank 0 last responded."""
        if heard_at is not None:
            self.heard_at = heard_at
        if report is None:
            return
        saved = report.checkpoint.step if report.checkpoint is not None else -1
        place, last = (report.phase, report.step, saved), self.place
        if place == last:
            return
        if last is not None:
            self.is_unproven = False
            if report.step > last[1]:
                if self.stepped_at is not None:
                    self.step_seconds = (now - self.stepped_at) / (report.step - last[1])
                self.stepped_at = now
        self.place, self.at = place, now


class SilentNodes:
    """Running attempts, by the uid of the batch Job.

    Args:
        lost: First sights of the pods.
    """

    def __init__(self, lost: LostPods) -> None:
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._advances: dict[str, _Advance] = {}

    def judge(
        self,
        uid: str,
        seen: Observation,
        pods: Sequence[Verdict],
        facts: AttemptFacts,
        heard_at: float | None,
    ) -> Observation:
        """Return the observation of a running attempt, by its advance if a node is silent.

        Args:
            uid: Uid of the batch Job.
            seen: Observation of the attempt.
            pods: Verdicts on its pods.
            facts: Facts of the attempt.
            heard_at: When rank 0 last responded, on the loop's clock; None if never.
        """
        silent, now = _silent(pods), self._loop.time()
        advance = self._advances.setdefault(uid, _Advance(None, now, is_unproven=bool(silent)))
        advance.note(seen.progress, heard_at, now)
        if not silent:
            return seen
        silent_seconds = self._lost.silent_seconds(one.pod for one in silent)
        interval = facts.status_interval_seconds
        idle_seconds = now - advance.at
        unheard_in = max(PATIENCE_SECONDS, 2 * interval) - idle_seconds
        if advance.is_unproven:
            unheard_in = 0.0
        lost_in = max(
            facts.unreachable_seconds - silent_seconds,
            _limit_of(advance, interval) - idle_seconds,
        )
        if not self._may_be_lost(silent, facts, advance, silent_seconds):
            lost_in = math.inf
        waits = [one for one in (unheard_in, lost_in) if 0 < one < math.inf]
        seen = replace(seen, requeue_seconds=earliest(seen.requeue_seconds, *waits))
        if lost_in <= 0:
            return replace(seen, gives_up=_loss_of(silent[0]))
        return seen if unheard_in > 0 else self._unheard(seen, silent, facts)

    def forget(self, uid: str) -> None:
        """Drop the state of an attempt that does not run."""
        self._advances.pop(uid, None)

    def _may_be_lost(
        self,
        silent: Sequence[Verdict],
        facts: AttemptFacts,
        advance: _Advance,
        silent_seconds: float,
    ) -> bool:
        """Whether the next attempt may start, and a lack of progress shows that this one hangs."""
        if not facts.unreachable_seconds or not all(one.pod.is_fenced for one in silent):
            return False
        before = HEARD_SECONDS + 2 * facts.status_interval_seconds
        was_heard = advance.heard_at >= self._loop.time() - silent_seconds - before
        return advance.place is not None and was_heard and not self._lost.is_cut_off

    def _unheard(
        self, seen: Observation, silent: Sequence[Verdict], facts: AttemptFacts
    ) -> Observation:
        first = silent[0]
        obstacle = Obstacle(KubernetesReason.NODE_NOT_RESPONDING, "")
        if self._lost.is_cut_off:
            obstacle = Obstacle(KubernetesReason.CONTROL_PLANE_CUT_OFF, _CUT_OFF)
        elif not (facts.unreachable_seconds and first.pod.is_fenced):
            obstacle = replace(obstacle, effect=Effect.STALLED, message=_UNFENCED)
        return replace(
            seen, progress=None, is_training=None, unheard=first.message, obstacle=obstacle
        )


_CUT_OFF = (
    "most nodes with training pods stopped responding together, so the control plane is cut off "
    "from them, and no other attempt is started; check the API server and the network of the nodes"
)
_UNFENCED = (
    "no other attempt can start before the pod has ended, because the folders of the job may be on "
    "that node alone; delete the node, or taint it node.kubernetes.io/out-of-service:NoExecute if "
    "its machine is off"
)


def obstacle_of_unfenced(pods: Sequence[Verdict]) -> Obstacle | None:
    """Return the obstacle to the next attempt if a silent node may hold its folders; or None."""
    for one in _silent(pods):
        if not one.pod.is_fenced:
            message = f"{one.sentence}; {_UNFENCED}"
            return Obstacle(KubernetesReason.NODE_NOT_RESPONDING, message, Effect.STALLED)
    return None


def warning_about(pods: Sequence[Verdict]) -> str:
    """Return node, time and remedy of the first pod whose node does not respond; or empty."""
    states = (PodState.UNREACHABLE, PodState.LOST)
    return next((one.message for one in pods if one.state in states), "")


def earliest(*delays: float | None) -> float | None:
    """Return the shortest delay; None if there is none."""
    return min((one for one in delays if one is not None), default=None)


def _limit_of(advance: _Advance, interval_seconds: float) -> float:
    """Return the longest time without progress of an attempt that has not lost its node."""
    step_seconds = advance.step_seconds
    if advance.place is None or advance.place[0] is not Phase.TRAINING or step_seconds is None:
        return LONG_PHASE_SECONDS
    return max(LOST_SECONDS, LOST_STEPS * step_seconds, 2 * interval_seconds)


def _loss_of(pod: Verdict) -> Termination:
    message = (
        f"{pod.sentence}, and the attempt has not progressed since; its processes may still run "
        f"there, and cannot write to the folders of the next attempt; {pod.remedy}"
    )
    return Termination(
        failure_class=FailureClass.NODE_LOST, exit_code=NO_EXIT_CODE, message=message
    )


def _silent(pods: Sequence[Verdict]) -> list[Verdict]:
    return [one for one in pods if one.state is PodState.UNREACHABLE]
