"""Keep the terminations of pods that are gone before their attempt is over.

A suspended Job's controller deletes its pods without a trace. They are kept only in memory: after a
restart the operator knows only that the pods were preempted.
"""

from collections.abc import Sequence
from dataclasses import replace

from finetune_operator.backends.aks.pod_termination import is_alive
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.kube.resources import Object


class KeptTerminations:
    """Terminations of failed attempts that are not over yet, by their uid."""

    def __init__(self) -> None:
        self._seen: dict[str, Observation] = {}

    def remembered(self, uid: str, seen: Observation, pods: Sequence[Object]) -> Observation:
        """Return the observation, with an earlier termination where all ended pods are gone."""
        if seen.phase is not AttemptPhase.FAILED:
            return seen
        if any(not is_alive(pod) for pod in pods):
            self._seen[uid] = seen
            return seen
        if (before := self._seen.get(uid)) is None:
            return seen
        return replace(
            seen, termination=before.termination, node=before.node, message=before.message
        )

    def forget(self, uid: str) -> None:
        """Drop what is known of an attempt that is over."""
        self._seen.pop(uid, None)
