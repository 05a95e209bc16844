"""Plugins that do not fit are named in their jobs, and the others go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.api_errors import NotFoundError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object, Resource
from finetune_operator.reconcile.decide import RECHECK_SECONDS
from support.api.builders import manifest
from support.kernel.configmap_backend import RETRY_AFTER_SECONDS, WIDGETS, ThrottledBackend
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START, nothing
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run


@asynccontextmanager
async def operated(*backends: str) -> AsyncIterator[FakeApi]:
    """Have the operator work with these plugins beside those of this package."""
    api = FakeApi()
    api.now = _time
    settings = SETTINGS.model_copy(update={"backends": backends})
    task = asyncio.create_task(LeaderTerm(api, settings, listen=FollowedJobs, now=_time).run())
    try:
        yield api
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def apply(api: FakeApi, backend: str) -> None:
    fields = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
    made = manifest(name=f"by-{backend}", backend={"type": backend}, **fields)
    await api.create(FINE_TUNE_JOBS, defaulted(made), "ns")


async def condition(api: FakeApi, backend: str, kind: str) -> Object:
    status = (await api.get(FINE_TUNE_JOBS, f"by-{backend}", "ns")).get("status", {})
    found = [one for one in status.get("conditions", ()) if one["type"] == kind]
    return found[0] if found else {}


def _time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


def test_a_plugin_that_keeps_other_fields_of_a_shared_kind_is_named_and_the_first_goes_on() -> None:
    async def work() -> None:
        plugins = ("configmap:ConfigMapBackend", "greedy:GreedyBackend")
        named = (one.partition(":") for one in plugins)
        points = [f"{name}=support.kernel.configmap_backend:{kind}" for name, _, kind in named]
        async with operated(*points) as api:
            await apply(api, "greedy")
            await apply(api, "configmap")
            await asyncio.sleep(15)
            stalled = await condition(api, "greedy", "Stalled")
            assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
            assert stalled["message"].startswith(
                "spec.backend.type greedy keeps other fields of configmaps than configmap does, "
                "and they share a cache; uninstall either, or let both declare the same "
                "Watch"
            )
            assert (await condition(api, "configmap", "Accepted"))["status"] == "True"

    run(work())


def test_a_plugin_that_is_left_out_keeps_no_other_one_out() -> None:
    async def work() -> None:
        plugins = (
            "configmap:ConfigMapBackend",
            "hoarder:HoardingBackend",
            "unserved:UnservedBackend",
        )
        named = (one.partition(":") for one in plugins)
        points = [f"{name}=support.kernel.configmap_backend:{kind}" for name, _, kind in named]
        async with operated(*points) as api:
            await apply(api, "hoarder")
            await apply(api, "unserved")
            await asyncio.sleep(15)
            assert (await condition(api, "hoarder", "Stalled"))["reason"] == "BackendFailed"
            assert (await condition(api, "unserved", "Accepted"))["status"] == "True"

    run(work())


def is_unserved(verb: str, resource: Resource, name: str) -> None:
    if resource == WIDGETS:
        raise NotFoundError(404, "NotFound", "the server could not find the resource")


def test_a_plugin_that_watches_an_unknown_kind_is_named_until_that_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        plugins = ("configmap:ConfigMapBackend", "unserved:UnservedBackend")
        named = (one.partition(":") for one in plugins)
        points = [f"{name}=support.kernel.configmap_backend:{kind}" for name, _, kind in named]
        async with operated(*points) as api:
            api.before = is_unserved
            await apply(api, "unserved")
            await apply(api, "configmap")
            await asyncio.sleep(45)
            stalled = await condition(api, "unserved", "Stalled")
            assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
            assert stalled["message"].startswith(
                "spec.backend.type unserved: the operator cannot see what runs in this namespace "
                "(the server could not find the resource); have the cluster serve "
                "widgets.example.com, or use another backend"
            )
            (said,) = (one for one in caplog.records if one.message == "kind is not served")
            assert vars(said)["used_by"] == "unserved"
            assert (await condition(api, "configmap", "Accepted"))["status"] == "True"
            api.before = nothing
            await asyncio.sleep(2 * RECHECK_SECONDS)
            assert (await condition(api, "unserved", "Stalled"))["status"] == "False"

    run(work())


def test_a_deleted_job_of_a_kind_that_is_gone_says_why_it_stays() -> None:
    async def work() -> None:
        async with operated("unserved=support.kernel.configmap_backend:UnservedBackend") as api:
            await apply(api, "unserved")
            await asyncio.sleep(15)
            api.before = is_unserved
            api.break_watches()
            await asyncio.sleep(5)
            await api.delete(FINE_TUNE_JOBS, "by-unserved", "ns")
            await asyncio.sleep(2 * RECHECK_SECONDS)
            stalled = await condition(api, "unserved", "Stalled")
            assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
            assert "have the cluster serve widgets.example.com" in stalled["message"]
            assert "then remove the finalizer finetune.dev/backend" in stalled["message"]
            api.before = nothing
            await asyncio.sleep(2 * RECHECK_SECONDS)
            assert api.objects(FINE_TUNE_JOBS) == []

    run(work())


def test_a_plugin_for_an_earlier_contract_is_named_with_the_cure() -> None:
    async def work() -> None:
        async with operated(
            "first-version=support.kernel.configmap_backend:FirstVersionBackend"
        ) as api:
            await apply(api, "first-version")
            await asyncio.sleep(15)
            stalled = await condition(api, "first-version", "Stalled")
            assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
            assert (
                "has watches that are not of type finetune_operator.kube.watch.Watch; it needs a "
                "version for this release of finetune-operator"
            ) in stalled["message"]

    run(work())


def test_a_service_that_asks_to_wait_is_not_asked_again_before() -> None:
    async def work() -> None:
        async with operated("throttled=support.kernel.configmap_backend:ThrottledBackend") as api:
            await apply(api, "throttled")
            await asyncio.sleep(2 * RETRY_AFTER_SECONDS)

    ThrottledBackend.asked.clear()
    run(work())
    first, second = ThrottledBackend.asked
    assert RETRY_AFTER_SECONDS <= second - first < RETRY_AFTER_SECONDS + 5
