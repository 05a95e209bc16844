"""What the API server does not show: others are served, and nothing is concluded from it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.backends.kubernetes import kept
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.resources import (
    CONFIG_MAPS,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    Object,
)
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_cases import JOB, profile

PLACES = ("team-a", "team-b")
BOTH = ("list", "watch")


class Scene:
    """A server, and an operator that serves two namespaces of it."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.api.now = self._now
        self.term: LeaderTerm
        self._task: asyncio.Task[None] | None = None

    def restart(self, namespaces: Sequence[str] = PLACES) -> None:
        self.stop()
        settings = SETTINGS.model_copy(update={"namespaces": tuple(namespaces)})
        self.term = LeaderTerm(self.api, settings, listen=FollowedJobs, now=self._now)
        self._task = asyncio.create_task(self.term.run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def apply(self, namespace: str, name: str = "tiny") -> None:
        backend = {"type": "configmap"}
        made = manifest(model__source="hf://a/b", dataset__source="hf://a/c", backend=backend)
        made["metadata"] |= {"name": name, "namespace": namespace}
        await self.api.create(FINE_TUNE_JOBS, defaulted(made), namespace)

    async def play(self, namespace: str, **data: str) -> None:
        await self.api.patch(CONFIG_MAPS, "tiny-1", namespace, {"data": data})

    async def trains(self, namespace: str) -> Object:
        """Start an operator, and return the status of a job once it trains."""
        self.restart()
        await self.apply(namespace)
        await asyncio.sleep(5)
        await self.play(namespace, phase="Running", ready="1", step="3")
        await asyncio.sleep(30)
        return self.status(namespace)

    def attempts(self, namespace: str) -> list[str]:
        made = self.api.objects(CONFIG_MAPS)
        return [
            one["metadata"]["name"] for one in made if one["metadata"]["namespace"] == namespace
        ]

    def status(self, namespace: str) -> Object:
        made = self.api.objects(FINE_TUNE_JOBS)
        (job,) = [one for one in made if one["metadata"]["namespace"] == namespace]
        status: Object = job["status"]
        return status

    def condition(self, namespace: str, kind: str) -> Object:
        found = self.status(namespace)["conditions"]
        return next(one for one in found if one["type"] == kind)

    def _now(self) -> datetime:
        return START + timedelta(seconds=asyncio.get_running_loop().time())


def play(script: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        scene = Scene()
        try:
            await script(scene)
        finally:
            scene.stop()

    run(work())


def test_a_kind_that_can_be_done_without_keeps_no_job_waiting() -> None:
    async def script(scene: Scene) -> None:
        scene.api.refused = {(kind, "team-a"): BOTH for kind in kept.KINDS}
        spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
        made = {"metadata": {"name": "default"}, "spec": spec}
        await scene.api.create(FINE_TUNE_PROFILES, made)
        scene.restart()
        body = manifest(**JOB)
        body["metadata"] |= {"namespace": "team-a"}
        await scene.api.create(FINE_TUNE_JOBS, defaulted(body), "team-a")
        await asyncio.sleep(120)
        assert [one["metadata"]["name"] for one in scene.api.objects(JOBS)] == ["tiny-1"]
        assert scene.condition("team-a", "Stalled")["status"] == "False"
        assert set(scene.term.health().refused) == {f"{kind} team-a" for kind in kept.KINDS}

    play(script)


@pytest.mark.parametrize("order", [PLACES, PLACES[::-1]])
def test_a_namespace_that_is_gone_keeps_no_other_from_being_served(order: Sequence[str]) -> None:
    async def script(scene: Scene) -> None:
        await scene.apply("team-a")
        scene.api.refused = {(FINE_TUNE_JOBS, "team-b"): BOTH, (CONFIG_MAPS, "team-b"): BOTH}
        scene.restart(order)
        await asyncio.sleep(5)
        assert scene.attempts("team-a") == ["tiny-1"]
        await scene.play("team-a", phase="Running", ready="1", step="3")
        await asyncio.sleep(3600)
        assert scene.status("team-a")["phase"] == "Running"
        health = scene.term.health()
        assert health.is_ready
        assert health.complaints(300) == []
        assert health.refused == {
            "finetunejobs.finetune.dev team-b": (
                "finetunejobs.finetune.dev is forbidden: cannot list in team-b"
            ),
            "configmaps team-b": "configmaps is forbidden: cannot list in team-b",
        }

    play(script)


def test_a_namespace_that_comes_back_is_served_soon_and_told_once_each_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(scene: Scene) -> None:
        scene.api.refused = {(FINE_TUNE_JOBS, "team-b"): BOTH, (CONFIG_MAPS, "team-b"): BOTH}
        scene.restart()
        await asyncio.sleep(600)
        scene.api.refused = {}
        await scene.apply("team-b")
        await asyncio.sleep(15)
        assert scene.attempts("team-b") == ["tiny-1"]
        assert scene.term.health().refused == {}

    with caplog.at_level(logging.INFO):
        play(script)
    told = [one.getMessage() for one in caplog.records]
    for message in (
        "list forbidden",
        "watch forbidden",
        "list allowed again",
        "watch allowed again",
    ):
        assert told.count(message) == 1


def test_a_place_where_no_job_may_be_listed_is_alive_and_not_ready() -> None:
    async def script(scene: Scene) -> None:
        scene.api.refused = {(FINE_TUNE_JOBS, None): BOTH}
        scene.restart(())
        await asyncio.sleep(3600)
        assert not scene.term.health().is_ready
        assert scene.term.health().complaints(300) == []
        scene.api.refused = {}
        await asyncio.sleep(15)
        assert scene.term.health().is_ready

    play(script)


@pytest.mark.parametrize("verbs", [("list", "watch"), ("list",), ("watch",)])
def test_children_that_are_not_shown_count_neither_as_gone_nor_as_never_made(
    verbs: Sequence[str],
) -> None:
    async def script(scene: Scene) -> None:
        scene.restart()
        await scene.apply("team-a")
        await scene.apply("team-b")
        await asyncio.sleep(5)
        for place in PLACES:
            await scene.play(place, phase="Running", ready="1", step="3")
        await asyncio.sleep(30)
        before = scene.status("team-b")["attempts"]
        scene.api.refused = {(CONFIG_MAPS, "team-b"): verbs}
        scene.restart()
        await asyncio.sleep(5)
        await scene.play("team-a", phase="Failed", code="137", gone="yes")
        await asyncio.sleep(600)
        assert scene.attempts("team-a") == ["tiny-1", "tiny-2"]
        assert scene.attempts("team-b") == ["tiny-1"]
        status = scene.status("team-b")
        assert (status["attempts"], status["phase"]) == (before, "Running")
        stalled = scene.condition("team-b", "Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
        assert stalled["message"] == (
            "spec.backend.type configmap: the operator cannot see what runs in this namespace "
            f"(configmaps is forbidden: cannot {verbs[0]} in team-b); give it that right; "
            "attempt 1 is left alone: it continues if it runs, and its outcome is reported "
            "once it can be seen"
        )
        scene.api.refused = {}
        await scene.play("team-b", phase="Failed", code="137", gone="yes")
        await asyncio.sleep(400)  # only a watch that has ended well, or spoken, is allowed again
        assert scene.attempts("team-b") == ["tiny-1", "tiny-2"]
        assert scene.condition("team-b", "Stalled")["status"] == "False"

    play(script)


def test_a_refusal_of_a_moment_at_the_start_starts_no_attempt_twice_and_writes_nothing() -> None:
    async def script(scene: Scene) -> None:
        before = await scene.trains("team-a")
        scene.api.refused = {(CONFIG_MAPS, "team-a"): BOTH, (FINE_TUNE_JOBS, "team-b"): BOTH}
        scene.restart()
        await asyncio.sleep(8)
        scene.api.refused = {}
        await asyncio.sleep(30)
        assert scene.attempts("team-a") == ["tiny-1"]
        assert scene.status("team-a") == before
        await scene.play("team-a", phase="Succeeded", code="0", gone="yes")
        await asyncio.sleep(2)
        assert scene.status("team-a")["phase"] == "Succeeded"

    play(script)


def test_what_was_known_is_kept_while_a_running_operator_may_not_look() -> None:
    async def script(scene: Scene) -> None:
        before = await scene.trains("team-a")
        scene.api.refused = {(CONFIG_MAPS, "team-a"): BOTH, (FINE_TUNE_JOBS, "team-a"): BOTH}
        await asyncio.sleep(3600)
        scene.api.refused = {}
        await asyncio.sleep(60)
        assert scene.attempts("team-a") == ["tiny-1"]
        after = scene.status("team-a")
        assert (after["attempts"], after["phase"]) == (before["attempts"], "Running")
        assert scene.condition("team-a", "Stalled")["status"] == "False"

    play(script)
