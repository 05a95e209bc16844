"""Keep the pods of an attempt that have ended until the attempt is over, also when they are gone.

A suspended Job's controller deletes its pods without a trace, and may do so before anybody looks
at the attempt. They are kept only in memory: after a restart the operator knows only that the pods
were preempted, if it had given the attempt up.
"""

from collections.abc import Sequence

from finetune_operator.backends.aks.child_names import owner_of
from finetune_operator.backends.aks.pod_termination import is_alive
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.resources import Object


class EndedPods:
    """Pods that have ended, of the attempts that are open.

    Args:
        cache: Of all pods; each that ends is noted when its watch says so.
    """

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._of_attempt: dict[str, dict[str, Object]] = {}  # by the attempt's uid, then the pod's
        cache.listen(self._note_changed)

    def open(self, uid: str) -> None:
        """Keep the pods of an attempt from now on."""
        self._of_attempt.setdefault(uid, {})

    def forget(self, uid: str) -> None:
        """Drop the pods of an attempt that is over."""
        self._of_attempt.pop(uid, None)

    def with_gone(self, uid: str, pods: Sequence[Object]) -> list[Object]:
        """Return the pods that are there, and before them those that have ended and are gone."""
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
