"""Find pods that count as lost although they exist, because their nodes do not end them.

The kubelet of a lost node never reports the end of a pod. If the pod is fenced, its processes
cannot write to the folders of the job once the next attempt has claimed them, so that attempt may
start while they may still run. All periods count on the monotonic clock of this process from the
first sight of a change, because the clocks of nodes and API server may differ. They count again
after a restart of the operator, after the API server was unavailable, and while the control plane
is cut off from most nodes.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from finetune_operator.backends.kubernetes.pod_facts import PodFacts, facts_of_pod
from finetune_operator.kube.cache import Key
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.resources import PODS

OVERDUE_SECONDS = 30.0
"""Time after its grace period in which a deleted pod must end."""

_LEAST_NODES_CUT_OFF = 3
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class _Sight:
    """First sights of the changes of a pod, on the loop's clock.

    Attributes:
        ends_in: Grace period of its deletion; None if it was not deleted.
        deleted_at: When this deletion was first seen.
        silent_at: When it was first seen that its node does not respond; None if the node does.
    """

    uid: str
    node: str
    ends_in: float | None = None
    deleted_at: float = math.inf
    silent_at: float | None = None


class LostPods:
    """First sights of the pods of one cluster.

    Args:
        cluster: Its cache of pods, and the client that notices an unavailable API server.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls = cluster.client.calls
        self._cache = cluster.cache(PODS)
        self._sights: dict[Key, _Sight] = {}
        self._pods: Counter[str] = Counter()  # pods by node
        self._silent: Counter[str] = Counter()  # pods by silent node
        self._cut_off_at = -math.inf
        self._cache.listen(self._note)

    @property
    def is_cut_off(self) -> bool:
        """Whether most nodes with training pods do not respond: the fault is not of the nodes."""
        silent = len(self._silent)
        return silent >= _LEAST_NODES_CUT_OFF and 2 * silent > len(self._pods)

    def mark(self, pod: PodFacts) -> PodFacts:
        """Return the facts, with `is_lost` if the pod counts as lost."""
        left = self.seconds_left(pod)
        return pod if left is None or left > 0 else replace(pod, is_lost=True)

    def seconds_left(self, pod: PodFacts) -> float | None:
        """Return the seconds until the pod counts as lost; None if it never does."""
        sight = self._sight(pod)
        if sight is None or sight.ends_in is None:
            return None
        if not pod.is_fenced and pod.trainer.state != "terminated":
            return None
        return sight.ends_in + OVERDUE_SECONDS - self._age(sight.deleted_at)

    def silent_seconds(self, pods: Iterable[PodFacts]) -> float:
        """Return for how long a node of these pods has not responded; 0 if all nodes respond."""
        sights = (self._sight(pod) for pod in pods)
        times = [one.silent_at for one in sights if one is not None and one.silent_at is not None]
        return max(map(self._age, times), default=0.0)

    def _age(self, since: float) -> float:
        now = self._loop.time()
        if self.is_cut_off:
            self._cut_off_at = now
        return now - max(since, self._cut_off_at, self._calls.unavailable_at)

    def _sight(self, pod: PodFacts) -> _Sight | None:
        sight = self._sights.get(Key(pod.namespace, pod.name))
        return sight if sight is not None and sight.uid == pod.uid else None

    def _note(self, key: Key) -> None:
        if self.is_cut_off:
            self._cut_off_at = self._loop.time()
        old = self._sights.pop(key, None)
        if old is not None:
            self._count(old, -1)
        cached = self._cache.get(key)
        pod = facts_of_pod(cached) if cached is not None else None
        if pod is not None and pod.node and pod.phase not in _ENDED:
            is_same = old is not None and old.uid == pod.uid
            sight = self._seen(pod, old if is_same and old is not None else _Sight(pod.uid, ""))
            self._sights[key] = sight
            self._count(sight, 1)

    def _seen(self, pod: PodFacts, old: _Sight) -> _Sight:
        now = self._loop.time()
        silent_at = None
        if pod.is_unreachable:
            silent_at = now if old.silent_at is None else old.silent_at
        new = replace(old, node=pod.node, silent_at=silent_at)
        if pod.deleted and pod.deletion_seconds != old.ends_in:  # another deletion may hurry it
            new = replace(new, ends_in=pod.deletion_seconds, deleted_at=now)
        return new

    def _count(self, sight: _Sight, change: int) -> None:
        for pods, counts in ((self._pods, True), (self._silent, sight.silent_at is not None)):
            if counts:
                pods[sight.node] += change
                if not pods[sight.node]:
                    del pods[sight.node]
