"""Retain the ended pods of an attempt until it finishes, even after they are deleted.

A suspended Job's controller deletes its pods without a trace, perhaps before the attempt is
observed. The pods are retained only in memory. After a restart the operator knows only that they
were preempted, and only if it had failed the suspended Job itself.
"""

from collections.abc import Sequence
from dataclasses import replace

from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import PodFacts, facts_of_pod
from finetune_operator.backends.kubernetes.verdict import Verdict
from finetune_operator.kube.cache import Key, ObjectCache


class EndedPods:
    """Pods of the open attempts that have ended, or were deleted.

    Args:
        cache: Cache of all pods; a pod is recorded when its watch reports its end or its deletion.
    """

    def __init__(self, cache: ObjectCache) -> None:
        self._cache = cache
        self._of_attempt: dict[str, dict[str, PodFacts]] = {}  # by attempt uid, then by pod uid
        cache.listen(self._note_changed)

    def open(self, uid: str) -> None:
        """Retain the pods of an attempt from now on."""
        self._of_attempt.setdefault(uid, {})

    def forget(self, uid: str) -> None:
        """Drop the pods of a finished attempt."""
        self._of_attempt.pop(uid, None)

    def including_gone(self, uid: str, pods: Sequence[PodFacts]) -> list[Verdict]:
        """Return the verdicts on the existing pods, preceded by those on pods that are gone."""
        for pod in pods:
            self._note(pod)
        there, kept = {pod.uid for pod in pods}, self._of_attempt.get(uid, {})
        gone = [replace(pod, is_gone=True) for pod in kept.values() if pod.uid not in there]
        return [judge(pod) for pod in (*gone, *pods)]

    def _note_changed(self, key: Key) -> None:
        if (cached := self._cache.get(key)) is not None:
            self._note(facts_of_pod(cached))

    def _note(self, pod: PodFacts) -> None:
        kept = self._of_attempt.get(pod.owner_uid)
        if kept is not None and (pod.deleted or not judge(pod).may_write):
            kept[pod.uid] = pod
