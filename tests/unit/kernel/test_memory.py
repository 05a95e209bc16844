"""Memory of a leader term per cached job, of any form that a job may have."""

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timedelta

import orjson
import pytest

from finetune_operator.api.validation import defaulted
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.resources import FINE_TUNE_JOBS
from finetune_operator.metrics.page import render
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.kernel_world import START
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import run

MANY_LABELS = {f"a{number}": "" for number in range(4000)}


def _time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


@pytest.mark.parametrize(
    ("count", "labels"),
    [
        pytest.param(70, {}, id="small"),
        pytest.param(12, MANY_LABELS, id="many labels"),
    ],
)
def test_a_cached_job_takes_at_most_20_kib_and_twice_its_json(
    count: int, labels: dict[str, str]
) -> None:
    few, limit_of_few = run(_memory(count, labels))
    many, limit_of_many = run(_memory(2 * count, labels))
    assert many - few <= limit_of_many - limit_of_few


async def _memory(count: int, labels: dict[str, str]) -> tuple[int, int]:
    """Return the bytes of a term that has reconciled and shown these jobs, and their limit."""
    api = FakeApi()
    api.now = _time
    for number in range(count):
        job = manifest(
            name=f"job-{number:03}",
            backend={"type": "configmap"},
            suspend=True,
            model__source="hf://a/b",
            dataset__source="hf://a/c",
        )
        job["metadata"]["labels"] = labels
        await api.create(FINE_TUNE_JOBS, defaulted(job), "ns")
    await _lead(api, lambda term: None)  # writes each status
    limit = sum(20 * 1024 + 2 * len(orjson.dumps(job)) for job in api.objects(FINE_TUNE_JOBS))
    sizes = list[int]()

    def measure(term: LeaderTerm) -> None:
        assert render(term.snapshot()).count(b"finetune_job_info{") == count
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])

    gc.collect()
    tracemalloc.start()
    try:
        await _lead(api, measure)
    finally:
        tracemalloc.stop()
    return sizes[0], limit


async def _lead(api: FakeApi, check: Callable[[LeaderTerm], None]) -> None:
    """Lead until all jobs have been reconciled, check, and end."""
    term = LeaderTerm(api, SETTINGS, listen=FollowedJobs, now=_time)
    task = asyncio.create_task(term.run())
    await asyncio.sleep(5)
    assert term.health().queue == 0
    check(term)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
