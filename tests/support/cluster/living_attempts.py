"""How many attempts of each job have a pod that lives, from the first moment to the last."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL
from finetune_operator.kube.resources import PODS, Object
from support.kernel.loop_thread import loop_thread


@dataclass
class LivingAttempts:
    """What a watch of all pods has told.

    Attributes:
        most: By job, the most attempts of which a pod lived at one time.
    """

    most: dict[str, int] = field(default_factory=dict)
    _alive: dict[str, tuple[str, str]] = field(default_factory=dict)

    def note(self, kind: str, pod: Object) -> None:
        """Take in what became of a pod; of one on its way out a process may still run."""
        labels, uid = pod["metadata"].get("labels") or {}, pod["metadata"]["uid"]
        self._alive.pop(uid, None)
        if kind != "DELETED" and JOB_LABEL in labels and judge(read_pod(pod)).may_write:
            self._alive[uid] = labels[JOB_LABEL], labels[ATTEMPT_LABEL]
        attempts: dict[str, set[str]] = defaultdict(set)
        for job, attempt in self._alive.values():
            attempts[job].add(attempt)
        for job, found in attempts.items():
            self.most[job] = max(self.most.get(job, 0), len(found))


async def _watch(kubeconfig: str, namespace: str, seen: LivingAttempts) -> None:
    async with await HttpClient.connect(kubeconfig) as client:
        version = (await client.list(PODS, namespace)).resource_version
        while True:
            async for event in client.watch(PODS, namespace, resource_version=version):
                version = event.object["metadata"]["resourceVersion"]
                if event.type != "BOOKMARK":
                    seen.note(event.type, event.object)


@contextmanager
def living_attempts(kubeconfig: str, namespace: str) -> Iterator[LivingAttempts]:
    """Watch the pods of a namespace, in which no job runs yet; a watch that broke is an error."""
    seen = LivingAttempts()
    with loop_thread() as loop:
        watching = asyncio.run_coroutine_threadsafe(_watch(kubeconfig, namespace, seen), loop.loop)
        try:
            yield seen
            assert not watching.done(), watching.result()
        finally:
            watching.cancel()
            loop.run(asyncio.sleep(0.1))  # its connection closes behind it
