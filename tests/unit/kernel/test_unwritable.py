"""A stored job whose status the API server refuses (422) is retried, and delays no other job."""

import asyncio
from datetime import datetime, timedelta

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Resource
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run

NUM_UNWRITABLE = 30
MINUTES = 20


def _time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


def test_a_stored_job_whose_status_writes_are_refused_stalls_alone() -> None:
    refused = dict[str, int]()
    is_fixed = False

    def refuse(verb: str, resource: Resource, name: str) -> None:
        if is_fixed and name == "bad-00":
            return
        if verb == "patch" and resource == FINE_TUNE_JOBS and name.startswith("bad"):
            refused[name] = refused.get(name, 0) + 1
            raise InvalidError(422, "Invalid", "spec.podTemplate.spec: Invalid value")

    async def work() -> float:
        nonlocal is_fixed
        api = FakeApi()
        api.now = _time
        api.before = refuse
        for number in range(NUM_UNWRITABLE):
            await _apply(api, f"bad-{number:02}")
        settings = SETTINGS.model_copy(update={"workers": 1})
        term = asyncio.create_task(LeaderTerm(api, settings, listen=FollowedJobs, now=_time).run())
        await asyncio.sleep(60 * MINUTES)
        began = asyncio.get_running_loop().time()
        await _apply(api, "good")
        async with asyncio.timeout(60):
            while not any(one["metadata"]["name"] == "good-1" for one in api.objects(CONFIG_MAPS)):
                await asyncio.sleep(0.1)
        seconds = asyncio.get_running_loop().time() - began
        is_fixed = True
        await api.patch(FINE_TUNE_JOBS, "bad-00", "ns", {"spec": {"suspend": True}})
        await asyncio.sleep(5)
        fixed = await api.get(FINE_TUNE_JOBS, "bad-00", "ns")
        assert fixed["status"]["phase"] == "Suspended"
        term.cancel()
        await asyncio.gather(term, return_exceptions=True)
        assert len(api.objects(CONFIG_MAPS)) == 1
        return seconds

    assert run(work()) < 5
    assert len(refused) == NUM_UNWRITABLE
    assert max(refused.values()) <= MINUTES / 5


async def _apply(api: FakeApi, name: str) -> None:
    job = manifest(
        name=name,
        backend={"type": "configmap"},
        model__source="hf://a/b",
        dataset__source="hf://a/c",
    )
    await api.create(FINE_TUNE_JOBS, defaulted(job), "ns")
