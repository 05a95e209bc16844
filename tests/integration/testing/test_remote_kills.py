"""Lives of jobs on the remote twin over HTTP, while the operator's process is killed at random."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest

from fake_service import RemoteService, served
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from remote_backend.http_backend import ENV_URL
from remote_backend.service import RunState
from support.cluster.operators import Api, OperatorProcess
from support.plugin.remote_http import HASTY_POLL_SECONDS
from support.plugin.remote_lives import Lives
from support.plugin.remote_world import RemoteWorld, let_go

pytestmark = pytest.mark.full

JOBS = 15
KILLS = 3
PACE = 1 / 240
"""An hour of `make remote-lives`, in virtual time, takes 15 s here."""

LIFE_SECONDS = 2.5
"""An operator that leads is killed after at most so long."""


class ProcessWorld(RemoteWorld):
    """An API server, the service behind HTTP, and an operator that is a process.

    Args:
        client: Of the API server.
        kubeconfig: The operator's.
        namespace: Of the jobs.
        service: Who runs their attempts.
        url: Of the service.
        backend: Class of `remote_http`.
    """

    def __init__(
        self,
        client: KubeClient,
        kubeconfig: str,
        namespace: str,
        service: RemoteService,
        url: str,
        backend: str,
    ) -> None:
        super().__init__(client, namespace, service)
        self._kubeconfig = kubeconfig
        self._url = url
        self._backend = backend
        self._operator = self._start()

    @classmethod
    @asynccontextmanager
    async def start(
        cls, api: Api, namespace: str, backend: str = "HastyBackend"
    ) -> AsyncIterator[Self]:
        """Have service and operator at work."""
        service = RemoteService()
        async with await HttpClient.connect(api.kubeconfig) as client, served(service) as url:
            world = cls(client, api.kubeconfig, namespace, service, url, backend)
            try:
                yield world
            finally:
                await world.end()
                await let_go(client, namespace)

    async def apply(self, name: str = "tiny", **overrides: Any) -> None:
        waits = {
            "restartPolicy__backoff": {"baseSeconds": 0, "maxSeconds": 1},
            "deadlines__terminationGraceSeconds": 1,
        }
        await super().apply(name, **{**waits, **overrides})

    async def kill(self) -> None:
        await asyncio.to_thread(self._operator.kill)
        self.deaths += 1
        self._operator = self._start()

    async def synced(self) -> None:
        """Wait until the operator leads and has listed everything."""
        await asyncio.to_thread(self._operator.wait_for, "synced")

    async def end(self) -> int:
        """Ask the operator to end, and return its exit code."""
        return await asyncio.to_thread(self._operator.end)

    def _start(self) -> OperatorProcess:
        return OperatorProcess(
            self._kubeconfig,
            self._namespace,
            backends=f"remote=support.plugin.remote_http:{self._backend}",
            environ={ENV_URL: self._url},
            max_retry_seconds=1,
        )


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    with api.namespace("remote") as name:
        yield name


async def _die(world: ProcessWorld, chance: random.Random) -> None:
    """Kill one operator after the other, some before they lead."""
    for _ in range(KILLS):
        if chance.random() < 0.8:
            await world.synced()
        await asyncio.sleep(chance.uniform(0, LIFE_SECONDS))
        await world.kill()


@pytest.mark.parametrize(
    "cluster", [pytest.param("real", marks=pytest.mark.cluster)], indirect=True
)
def test_lives_of_many_jobs_are_whole_though_the_operator_is_killed_again_and_again(
    api: Api, namespace: str
) -> None:
    async def work() -> None:
        async with ProcessWorld.start(api, namespace) as world:
            lives = Lives(world, 0, JOBS, changed=0.6, pace=PACE)
            outcome = await lives.run(_die(world, random.Random(0)))
            assert not outcome.faults, outcome.told
            assert world.deaths == KILLS

    asyncio.run(work())


def test_a_submit_costs_two_requests_and_an_operator_that_has_ended_asks_for_nothing(
    api: Api, namespace: str
) -> None:
    async def work() -> None:
        async with ProcessWorld.start(api, namespace, "PatientBackend") as world:
            service, names = world.service, [f"job-{number}" for number in range(20)]
            for name in names:
                await world.apply(name)
            async with asyncio.timeout(30):
                while len(service.runs) < len(names):
                    await asyncio.sleep(0.05)
            asked = Counter(name for verb, name in service.requests if verb != "list")
            assert set(asked) == set(service.runs)
            assert max(asked.values()) <= 2
            for name in list(service.runs)[: len(names) // 2]:  # the others have not ended
                service.start(name)
                service.end(name, RunState.COMPLETED)
            assert await world.end() == 0
            requests = len(service.requests)
            await asyncio.sleep(8 * HASTY_POLL_SECONDS)
            assert len(service.requests) == requests

    asyncio.run(work())
