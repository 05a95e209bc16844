"""/healthz fails where work stands still, and nowhere else."""

import asyncio

import pytest

from configmap_backend import OpeningBackend
from fake_api import FakeApi
from finetune_operator.kernel.handlers import JobEvents, KopfOptions, OnEvent
from finetune_operator.kernel.term import Term
from finetune_operator.kube.client import KubeClient
from live_world import SETTINGS, FollowedJobs
from virtual_time import run

STUCK_SECONDS = 300


class DeafJobs(FollowedJobs):
    """Asks for nothing any more, half an hour after it was started."""

    def start(self) -> None:
        super().start()
        self._deaf_at = asyncio.get_running_loop().time() + 1800

    def overdue_seconds(self) -> float:
        return max(0.0, asyncio.get_running_loop().time() - self._deaf_at)


def deaf(client: KubeClient, options: KopfOptions, on_event: OnEvent) -> JobEvents:
    return DeafJobs(client, options, on_event)


def test_what_a_backend_holds_open_is_closed_at_the_end_of_a_term() -> None:
    async def work() -> None:
        settings = SETTINGS.model_copy(
            update={"backends": ("opening=configmap_backend:OpeningBackend",)}
        )
        OpeningBackend.ended.clear()
        task = asyncio.create_task(Term(FakeApi(), settings, listen=FollowedJobs).run())
        await asyncio.sleep(60)
        assert OpeningBackend.ended == []
        task.cancel()
        await asyncio.wait({task})
        assert OpeningBackend.ended == ["closed"]

    run(work())


@pytest.mark.parametrize(
    ("minutes", "complaints"),
    [
        pytest.param(30, [], id="idle"),
        pytest.param(34, [], id="late"),
        pytest.param(
            36, ["the watch of finetunejobs.finetune.dev has not moved for 360 s"], id="stuck"
        ),
    ],
)
def test_a_watch_of_jobs_that_asks_for_nothing_is_stuck_though_the_lists_go_on(
    minutes: int, complaints: list[str]
) -> None:
    async def work() -> list[str]:
        settings = SETTINGS.model_copy(update={"resync_seconds": 300.0})
        term = Term(FakeApi(), settings, listen=deaf)
        task = asyncio.create_task(term.run())
        await asyncio.sleep(minutes * 60)
        found = term.health().complaints(STUCK_SECONDS)
        task.cancel()
        return found

    assert run(work()) == complaints
