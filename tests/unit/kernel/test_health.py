"""/healthz fails where work stands still, and nowhere else."""

import asyncio

import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs, JobEvents, ListenOptions, OnEvent
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Resource
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import nothing
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run

STUCK_SECONDS = 300


class DeafJobs(FollowedJobs):
    """Asks for nothing any more, half an hour after it was started."""

    def start(self) -> None:
        super().start()
        self._deaf_at = asyncio.get_running_loop().time() + 1800

    def asked_at(self) -> float | None:
        return min(asyncio.get_running_loop().time(), self._deaf_at)


class KindlessJobs(FollowedJobs):
    """Looks for the kind when it starts, and never again."""

    async def _follow(self, place: str | None) -> None:
        try:
            await self._client.list(FINE_TUNE_JOBS, place)
        except NotFoundError:
            await self._stopped.wait()
            return
        await super()._follow(place)

    def start(self) -> None:
        self._stopped = asyncio.Event()
        super().start()

    def stop(self) -> None:
        self._stopped.set()


def kindless(client: KubeClient, options: ListenOptions, on_event: OnEvent) -> JobEvents:
    return KindlessJobs(client, options, on_event)


def refuse(verb: str, resource: Resource, name: str) -> None:
    if resource == FINE_TUNE_JOBS:
        raise NotFoundError(404, "NotFound", "the server could not find the requested resource")


def deaf(client: KubeClient, options: ListenOptions, on_event: OnEvent) -> JobEvents:
    return DeafJobs(client, options, on_event)


def test_a_kind_that_is_installed_after_the_operator_is_watched_soon() -> None:
    async def work() -> None:
        api = FakeApi()
        api.before = refuse
        term = LeaderTerm(api, SETTINGS, listen=kindless)
        task = asyncio.create_task(term.run())
        await asyncio.sleep(120)
        assert not term.health().is_ready
        api.before = nothing
        await asyncio.sleep(30)
        assert term.health().is_ready
        made = manifest(
            backend={"type": "configmap"}, model__source="hf://a/b", dataset__source="hf://a/c"
        )
        await api.create(FINE_TUNE_JOBS, defaulted(made), "ns")
        await asyncio.sleep(1)
        assert [one["metadata"]["name"] for one in api.objects(CONFIG_MAPS)] == ["tiny-1"]
        task.cancel()

    run(work())


@pytest.mark.parametrize(
    ("minutes", "complaints"),
    [
        pytest.param(30, [], id="idle"),
        pytest.param(34, [], id="late"),
        pytest.param(
            36, ["the watch of finetunejobs.finetune.dev has not progressed for 360 s"], id="stuck"
        ),
    ],
)
def test_a_watch_of_jobs_that_asks_for_nothing_is_stuck_though_the_lists_go_on(
    minutes: int, complaints: list[str]
) -> None:
    async def work() -> list[str]:
        settings = SETTINGS.model_copy(update={"resync_seconds": 300.0})
        term = LeaderTerm(FakeApi(), settings, listen=deaf)
        task = asyncio.create_task(term.run())
        await asyncio.sleep(minutes * 60)
        found = term.health().complaints(STUCK_SECONDS)
        task.cancel()
        return found

    assert run(work()) == complaints
