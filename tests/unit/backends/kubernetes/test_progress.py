"""Progress is pulled beside the work: a pod that is silent keeps nobody waiting."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_operator.backends.base import Attempt, BackendContext, Handle
from finetune_operator.backends.kubernetes import kept
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.pod_facts import trim_pod
from finetune_operator.backends.kubernetes.progress import Pace, ProgressReader
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.resources import FINE_TUNE_PROFILES, JOBS, PODS, Object, Resource
from finetune_trainer.config import Phase, Progress, Suspect, SuspectCause
from support.api.builders import planned, ref_to
from support.kernel.fake_api import FakeApi
from support.kubernetes.kubernetes_cases import JOB, profile

INTERVAL = 15.0


@asynccontextmanager
async def served(progress: Progress | None, asked: list[str]) -> AsyncIterator[int]:
    """Serve what rank 0 would, or never answer; yield the port."""
    release = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().strip())
        if progress is None:
            await release.wait()
        else:
            body = progress.to_json().encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        release.set()
        server.close()


def test_a_run_that_trains_is_asked_once_in_an_interval() -> None:
    asked: list[str] = []

    async def look() -> None:
        reader = ProgressReader(first_seconds=0.0)
        async with served(Progress(phase=Phase.TRAINING, step=7), asked) as port:
            word = await reader.read("a", "127.0.0.1", port, INTERVAL)
            if word.progress is None:  # a slow machine: it comes in a moment
                await asyncio.sleep(word.requeue_seconds)
                word = await reader.read("a", "127.0.0.1", port, INTERVAL)
            again = await reader.read("a", "127.0.0.1", port, INTERVAL)
        assert word.progress is not None
        assert word.progress.step == 7
        assert 10 < again.requeue_seconds <= INTERVAL

    asyncio.run(look())
    assert asked == ["GET /progress HTTP/1.1"]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.TOKENIZING, Phase.LOADING])
def test_a_run_before_its_first_step_is_asked_again_soon(phase: Phase) -> None:
    async def look() -> float:
        async with served(Progress(phase=phase), []) as port:
            word = await ProgressReader(first_seconds=0.0).read("a", "127.0.0.1", port, INTERVAL)
            return word.requeue_seconds

    assert asyncio.run(look()) < 1.0


def test_nobody_waits_for_a_pod_that_does_not_answer() -> None:
    async def look() -> float:
        reader = ProgressReader(first_seconds=0.0)
        async with served(None, []) as port:
            loop = asyncio.get_running_loop()
            start = loop.time()
            word = await reader.read("a", "127.0.0.1", port, INTERVAL)
            took = loop.time() - start
            reader.forget("a")
        assert word.progress is None
        return took

    assert asyncio.run(look()) < 1.0


def test_a_pod_that_refuses_is_asked_again_after_a_while() -> None:
    async def look() -> float:
        reader = ProgressReader(first_seconds=0.0)
        async with served(Progress(), []) as port:
            pass  # the port is free again, and nobody listens
        word = await reader.read("a", "127.0.0.1", port, INTERVAL)
        assert word.progress is None
        return word.requeue_seconds

    assert 2 < asyncio.run(look()) <= 3


@pytest.mark.parametrize("answers", [True, False], ids=["loads", "is silent"])
def test_who_starts_for_long_is_asked_less_often_but_as_often_as_one_that_trains(
    answers: bool,
) -> None:
    pace, now, pauses = Pace(0.0, INTERVAL), 2.0, list[float]()
    while now < 600:
        pause = pace.after_response(now, is_steady=False) if answers else pace.after_failure(now)
        pauses.append(pause)
        now += pause
    assert len(pauses) < 60
    assert pauses[0] == (0.5 if answers else 3.0)
    assert pauses == sorted(pauses)
    assert pauses[-1] == INTERVAL


def test_who_trained_a_moment_ago_is_asked_again_soon() -> None:
    pace = Pace(0.0, 3600.0)
    assert pace.after_response(1000.0, is_steady=True) == 3600
    assert pace.after_response(4600.0, is_steady=False) < 1
    assert pace.after_failure(4601.0) == 3


def test_a_pod_that_begins_to_run_is_not_asked_at_once() -> None:
    async def look() -> float:
        reader = ProgressReader(KubernetesBackend.first_progress_seconds)
        word = await reader.read("a", "127.0.0.1", 1, INTERVAL)
        assert word.progress is None
        return word.requeue_seconds

    assert asyncio.run(look()) == pytest.approx(KubernetesBackend.first_progress_seconds, abs=0.1)


@asynccontextmanager
async def saying(*parts: bytes) -> AsyncIterator[int]:
    """Answer every question with these parts, each on its way before the next; yield the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def word_of(port: int) -> Progress | None:
    """Ask until there is an answer, or the first question has failed."""
    reader = ProgressReader(first_seconds=0.0)
    word = await reader.read("a", "127.0.0.1", port, INTERVAL)
    while word.progress is None and word.requeue_seconds < 1:  # else it is a silent pod's
        await asyncio.sleep(word.requeue_seconds)
        word = await reader.read("a", "127.0.0.1", port, INTERVAL)
    reader.forget("a")
    return word.progress


def test_progress_that_comes_in_parts_is_read_to_its_end() -> None:
    said = Progress(phase=Phase.TRAINING, step=7)
    body = said.to_json().encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def look() -> Progress | None:
        async with saying(head, body[:10], body[10:]) as port:
            return await word_of(port)

    assert asyncio.run(look()) == said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(b'"compute"', b'"dreams"', id="another cause"),
        pytest.param(b'"step": 7', b'"step": 7, "later": 1', id="another field"),
    ],
)
def test_of_another_version_what_is_understood_is_read(old: bytes, new: bytes) -> None:
    suspect = Suspect(rank=1, node="n", cause=SuspectCause.COMPUTE, score=1.2, since=0.0)
    body = Progress(phase=Phase.TRAINING, step=7, suspects=(suspect,)).to_json().encode()
    assert old in body
    body = body.replace(old, new, 1)

    async def look() -> Progress | None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with saying(head, body) as port:
            return await word_of(port)

    found = asyncio.run(look())
    assert found is not None
    assert found.step == 7


def test_an_answer_that_is_cut_off_is_none() -> None:
    body = Progress(phase=Phase.TRAINING, step=7).to_json().encode()

    async def look() -> Progress | None:
        async with saying(b"HTTP/1.1 200 OK\r\n\r\n", body[:-10]) as port:
            return await word_of(port)

    assert asyncio.run(look()) is None


def test_a_pod_cannot_send_the_operator_elsewhere() -> None:
    asked: list[str] = []

    async def look() -> Progress | None:
        async with served(Progress(step=7), asked) as other:
            moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/\r\n\r\n" % other
            async with saying(moved) as port:
                return await word_of(port)

    assert asyncio.run(look()) is None
    assert asked == []


def running_pod(batch_job: Object) -> Object:
    """Return the pod of a batch Job, on this machine."""
    owner = {"uid": batch_job["metadata"]["uid"], "controller": True}
    state = {"name": "trainer", "state": {"running": {}}}
    labels = {"finetune.dev/job": "tiny", "batch.kubernetes.io/job-completion-index": "0"}
    return {
        "metadata": {
            "name": "tiny-1-0-x",
            "namespace": "default",
            "uid": "p",
            "resourceVersion": "1",
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {},
        "status": {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [state]},
    }


def filled_caches() -> dict[Resource, ObjectCache]:
    """Return the caches of a cluster with a profile and nothing else."""
    caches = {kind: ObjectCache(kind) for kind in (FINE_TUNE_PROFILES, JOBS, PODS, *kept.KINDS)}
    spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
    metadata = {"name": "default", "resourceVersion": "1"}
    caches[FINE_TUNE_PROFILES].replace([{"metadata": metadata, "spec": spec}], "1")
    for kind in (JOBS, PODS):
        caches[kind].replace([], "0")
    return caches


async def running(
    backend: KubernetesBackend, caches: dict[Resource, ObjectCache], port: int
) -> Handle:
    """Return an attempt that runs, whose rank 0 serves its progress on this port."""
    plan = planned(**{**JOB, "observability__metricsPort": port})
    handle = await backend.submit(backend.render(plan, Attempt(1)))
    made = caches[JOBS].get(Key("default", "tiny-1"))
    assert made is not None
    caches[PODS].put(trim_pod(running_pod(made)))
    return handle


def test_what_a_deleted_job_reported_is_forgotten() -> None:
    step = 71_717_171
    caches = filled_caches()

    def is_kept() -> bool:
        gc.collect()
        return any(type(one) is Progress and one.step == step for one in gc.get_objects())

    async def tell(backend: KubernetesBackend, handle: Handle) -> None:
        seen = await backend.observe(ref_to(handle))
        while seen.progress is None:  # a slow machine: it comes in a moment
            await asyncio.sleep(seen.requeue_seconds or 0.1)
            seen = await backend.observe(ref_to(handle))

    async def story() -> None:
        backend = KubernetesBackend(
            BackendContext(Path(), cluster=Cluster(FakeApi(), caches.__getitem__))
        )
        async with served(Progress(phase=Phase.TRAINING, step=step), []) as port:
            await tell(backend, await running(backend, caches, port))
        assert is_kept()
        backend.forget("uid-1")
        assert not is_kept()

    asyncio.run(story())


def test_checkpoints_are_named_by_the_uri_of_the_job() -> None:
    async def story() -> None:
        caches = filled_caches()
        backend = KubernetesBackend(
            BackendContext(Path(), cluster=Cluster(FakeApi(), caches.__getitem__))
        )
        ref = ref_to(await running(backend, caches, port=9999))
        spec = planned(**JOB).job.spec
        assert (await backend.observe(replace(ref, spec=spec))).checkpoints == spec.checkpoint.uri
        assert (await backend.observe(ref)).checkpoints == ""

    asyncio.run(story())


def test_at_the_end_of_a_term_no_question_stays_open() -> None:
    async def look() -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            asked.set()
            await reader.read()
            left.set()
            writer.close()

        caches = filled_caches()
        cluster = Cluster(FakeApi(), caches.__getitem__)
        backend = KubernetesBackend(BackendContext(Path(), cluster=cluster))
        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            handle = await running(backend, caches, port)
            await backend.observe(ref_to(handle))
            await asyncio.sleep(KubernetesBackend.first_progress_seconds)
            await backend.observe(ref_to(handle))
            await asked.wait()
            assert not left.is_set()
            async with asyncio.timeout(1.5):  # the question itself gives up after 2 s
                await backend.close()
                await left.wait()

    asyncio.run(look())
