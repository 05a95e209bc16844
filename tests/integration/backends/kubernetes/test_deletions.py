"""A job is deleted after each of the operator's writes about it: nothing of it is left behind.

Many jobs of one story live at once; of each another write is the last. Pods are played, without a
node; the controllers are real.
"""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.kube.api_errors import ConflictError, NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    EVENTS,
    FINE_TUNE_JOBS,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
)
from finetune_trainer.config import Phase, Progress
from support.cluster.operators import Api, OperatorProcess, phase_of, wait_until
from support.cluster.played_pods import ProgressServer, end_pod, own_address, run_pod
from support.cluster.proxies import WriteProxy
from support.kernel.loop_thread import loop_thread
from support.kubernetes.kubernetes_cases import JOB, profile

STORIES = 30
"""More than a whole story has writes: 20 to 25, as some are left out when there is more to say."""
KINDS_OF_WRITE = {
    *(
        f"POST {kind.plural}"
        for kind in (SERVICES, NETWORK_POLICIES, JOBS, ENDPOINT_SLICES, EVENTS)
    ),
    *(f"PATCH {kind.plural}" for kind in (FINE_TUNE_JOBS, JOBS, ENDPOINT_SLICES)),
}
CHILDREN = (JOBS, PODS, SERVICES, NETWORK_POLICIES, ENDPOINT_SLICES)
NUMBER = re.compile(r"story-(\d+)")
WRITES = ("create", "update", "patch", "delete")
LONGEST_SECONDS = 120
QUIET_SECONDS = 2
FEW = 2
OVER = ("Failed", "gone")


class Deleter:
    """Deletes the job `story-N` after the N-th write about it, before the operator is answered."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self.writes: dict[int, list[str]] = defaultdict(list)
        self.deleted: set[int] = set()
        self._namespace = namespace
        self._thread = ThreadPoolExecutor(1)
        self._api = self._thread.submit(Api, kubeconfig).result()

    def done(self, method: str, path: str, answer: bytes) -> None:
        found = NUMBER.search(f"{path} {answer.decode()}")
        assert found is not None, path
        number = int(found[1])
        made = self.writes[number]
        made.append(f"{method} {path.partition(f'/{self._namespace}/')[2]}")
        if len(made) == number:
            # The proxy's loop waits meanwhile, as the operator does.
            self._thread.submit(self._api.delete, self._namespace, f"story-{number}").result()
            self.deleted.add(number)

    def spared(self, stories: "Iterable[Story]") -> set[str]:
        """Return the names of the jobs that were not deleted."""
        return {one.name for one in stories if one.number not in self.deleted}

    def close(self) -> None:
        self._thread.submit(self._api.close).result()
        self._thread.shutdown()


@contextmanager
def deleting(api: Api, namespace: str) -> Iterator[Deleter]:
    made = Deleter(api.kubeconfig, namespace)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def progress_served() -> Iterator[ProgressServer]:
    served = ProgressServer(Progress(phase=Phase.TRAINING, step=1, total_steps=10))
    with loop_thread() as loop:
        serving = served.serving(own_address())
        loop.run(serving.__aenter__())
        try:
            yield served
        finally:
            loop.run(serving.__aexit__(None, None, None))


class Story:
    """One job's life: it trains, is suspended, goes on, and fails for good as it loses a pod."""

    def __init__(self, client: KubeClient, namespace: str, number: int) -> None:
        self.number = number
        self.name = f"story-{number}"
        self._client = client
        self._namespace = namespace

    def begin(self, api: Api, metrics_port: int) -> None:
        """Apply the job; its profile is called as the namespace."""
        api.apply(
            self._namespace,
            self.name,
            **{
                **JOB,
                "backend": {"type": "kubernetes", "kubernetes": {"profile": self._namespace}},
            },
            topology__nodes=2,
            observability={"metricsPort": metrics_port},
            restart_policy={"maxRestarts": 0},
        )

    async def go_on(self, job: Object, pods: Iterable[Object]) -> None:
        """Let happen what comes next; whatever of it is gone by now does not happen."""
        with suppress(NotFoundError, ConflictError):
            await self._next(job, [one for one in pods if _is_alive(one)])

    async def _next(self, job: Object, pods: list[Object]) -> None:
        waiting = [pod for pod in pods if "podIP" not in pod["status"]]
        for pod in waiting:
            await run_pod(self._client, pod, own_address())
        if phase_of(job) == "Suspended":
            await self._suspend(False)
        if waiting or not pods or phase_of(job) != "Running":
            return
        if _attempt(pods[0]) == 1:
            await self._suspend(True)
        else:
            await end_pod(self._client, pods[-1], 137)

    async def _suspend(self, value: bool) -> None:
        change: dict[str, Any] = {"spec": {"suspend": value}}
        await self._client.patch(FINE_TUNE_JOBS, self.name, self._namespace, change)


def _is_alive(pod: Object) -> bool:
    is_ending = "deletionTimestamp" in pod["metadata"]
    return not is_ending and pod["status"].get("phase") in ("Pending", "Running")


def _attempt(pod: Object) -> int:
    return int(pod["metadata"]["labels"][ATTEMPT_LABEL])


async def tell(client: KubeClient, namespace: str, stories: Iterable[Story]) -> None:
    """Play all stories until each has failed or is deleted."""
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:
            jobs = {
                one["metadata"]["name"]: one
                for one in (await client.list(FINE_TUNE_JOBS, namespace)).items
            }
            stories = [one for one in stories if phase_of(jobs.get(one.name)) not in OVER]
            if not stories:
                return
            pods: dict[str, list[Object]] = defaultdict(list)
            for pod in (await client.list(PODS, namespace)).items:
                pods[pod["metadata"]["labels"][JOB_LABEL]].append(pod)
            await asyncio.gather(*(one.go_on(jobs[one.name], pods[one.name]) for one in stories))
            await asyncio.sleep(0.3)


def left(api: Api, namespace: str) -> set[str]:
    """Return the jobs of which a child is there."""
    listed = [api.run(api.client.list(kind, namespace)).items for kind in CHILDREN]
    return {one["metadata"]["labels"][JOB_LABEL] for found in listed for one in found}


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_deleted_after_each_of_the_operators_writes_a_job_leaves_nothing(
    api: Api, tmp_path: Path
) -> None:
    with (
        api.namespace("deletions") as namespace,
        api.profile(namespace, profile()),
        deleting(api, namespace) as deleter,
        progress_served() as rank_zero,
        WriteProxy(api.kubeconfig, tmp_path, deleter.done) as proxy,
        OperatorProcess(proxy.kubeconfig, namespace, backends="") as operator,
    ):
        operator.wait_for("synced")
        stories = [Story(api.client, namespace, number) for number in range(1, STORIES + 1)]
        for story in stories:
            story.begin(api, rank_zero.port)
        api.run(tell(api.client, namespace, stories))
        # The garbage collector asks every 30 s which kinds there are; it may not know ours yet.
        # A kind that another test has taken away since may hold it up for another round or two.
        # The operator may write after the end of a job, and the job is then deleted.
        with suppress(AssertionError):
            wait_until(lambda: left(api, namespace) == deleter.spared(stories), 150)
        assert left(api, namespace) == deleter.spared(stories)
        wait_until(lambda: operator.health()["queue"] == 0, 30)
        before = operator.calls(*WRITES)
        time.sleep(QUIET_SECONDS)
        assert operator.calls(*WRITES) == before
        assert operator.health()["queue"] == 0
        assert operator.said("reconcile raised an unexpected error") == []
        failures = Counter(one["job"] for one in operator.said("reconcile failed"))
        assert all(number <= FEW for number in failures.values()), failures
    whole = [one for one in stories if one.number not in deleter.deleted]
    assert whole, "no story was told to its end, so that not each write is known"
    for story in whole:
        made = deleter.writes[story.number]
        assert {one.partition("/")[0] for one in made} >= KINDS_OF_WRITE
        assert {*range(1, len(made) + 1)} <= deleter.deleted | {one.number for one in whole}
