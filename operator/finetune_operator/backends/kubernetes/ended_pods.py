"""Retain the terminated pods of an attempt until it finishes, even after they are deleted.

A suspended Job's controller deletes its pods without a trace, perhaps before the attempt is
observed. The pods are retained only in memory. After a restart the operator knows only that they
were preempted, and only if it had failed the suspended Job itself.
"""

from collections.abc import Sequence

from finetune_operator.backends.kubernetes.child_names import owner_of
from finetune_operator.backends.kubernetes.pod_termination import is_alive
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.resources import Object


class EndedPods:
    """Terminated pods of the open attempts.

    Args:
        cache: Cache of all pods; a pod is recorded when its watch reports the end.
    """

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._of_attempt: dict[str, dict[str, Object]] = {}  # by attempt uid, then by pod uid
        cache.listen(self._note_changed)

    def open(self, uid: str) -> None:
        """Retain the pods of an attempt from now on."""
        self._of_attempt.setdefault(uid, {})

    def forget(self, uid: str) -> None:
        """Drop the pods of a finished attempt."""
        self._of_attempt.pop(uid, None)

    def including_deleted(self, uid: str, pods: Sequence[Object]) -> list[Object]:
        """Return the existing pods, preceded by the terminated pods that were deleted."""
        for pod in pods:
            self._note(pod)
        there = {pod["metadata"]["uid"] for pod in pods}
        kept = self._of_attempt.get(uid, {})
        return [*(pod for key, pod in kept.items() if key not in there), *pods]

    def _note_changed(self, key: Key) -> None:
        if (pod := self._cache.get(key)) is not None:
            self._note(pod)

    def _note(self, pod: Object) -> None:
        kept = self._of_attempt.get(owner_of(pod).get("uid", ""))
        if kept is not None and not is_alive(pod):
            kept[pod["metadata"]["uid"]] = pod
