"""A page of rank 0 that does not respond is distinguished from one without progress."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from finetune_trainer.config import CheckpointRef, Phase, Progress
from support.cluster.played_pods import ProgressServer
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld, pass_time

SAVED = CheckpointRef(step=1000, path="/c/step-1000", time=0.0, world_size=2)
TRAINS = Progress(phase=Phase.TRAINING, step=1199, total_steps=5000, checkpoint=SAVED)
NOT_YET = b'{"message": "rank 0 has not reported anything yet; ask again"}\n'
CLAIMS = ("trains on", "load model", "not trained yet", "nothing to save", "saves a checkpoint of")


@dataclass
class Case:
    """A job whose pods run; times of the world and of the event loop pass together."""

    world: KubernetesWorld
    page: AsyncExitStack

    async def live(self, seconds: float) -> None:
        await pass_time(self.world, seconds)

    def status(self, kind: str) -> tuple[str, str]:
        found = self.world.condition(kind)
        return found["status"], found["reason"]

    @property
    def message(self) -> str:
        return str(self.world.condition("Ready")["message"])


async def begin(case: Case, **spec: Any) -> None:
    await case.world.apply(**spec)
    await case.world.settle()
    await case.world.make_pods(1)
    await case.world.run_pods(1, *range(NODES))


def play(story: Callable[[Case], Awaitable[None]], progress: Progress | None = TRAINS) -> None:
    """Play a story with a page that serves the progress; without progress none listens."""

    async def work() -> None:
        async with AsyncExitStack() as page:
            server = ProgressServer(progress or TRAINS)
            await page.enter_async_context(server.serving(ADDRESS))
            if progress is None:
                await page.aclose()
            await story(Case(KubernetesWorld(server.port), page))

    run(work())


@asynccontextmanager
async def responding(port: int, response: bytes) -> AsyncIterator[None]:
    """Respond to each request with these bytes; without any the request stays open."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if response:
            writer.write(response)
            await writer.drain()
            await reader.read()
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(respond, ADDRESS, port)
    try:
        yield
    finally:
        server.close()


def http(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status.encode(), len(body)) + body


def is_unknown(case: Case) -> bool:
    """Whether the status claims neither that the job trains nor that it does not."""
    ready, running = case.world.condition("Ready"), case.world.condition("Running")
    if running["status"] != "Unknown":
        return False
    assert case.world.job["status"]["phase"] == "Unknown"
    assert case.status("Ready") == ("False", "ProgressUnknown")
    assert case.status("Reconciling") == ("True", "ProgressUnknown")
    assert case.status("ResourcesReady")[0] == "True"
    assert case.status("Stalled")[0] == "False"
    assert ready["message"].startswith("it is not known whether attempt 1 trains: ")
    assert not [claim for claim in CLAIMS if claim in ready["message"]]
    return True


def test_a_page_that_never_responds_is_named_with_the_error() -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(50)
        assert case.status("Ready") == ("False", "Starting")
        await case.live(40)
        assert is_unknown(case)
        url = f"http://{ADDRESS}:{case.world.job['spec']['observability']['metricsPort']}/progress"
        assert f"{url} does not respond (connection refused); check the pod's node" in case.message
        assert case.message.endswith("; it has not reported a step")

    play(story, None)


def test_the_last_step_and_its_time_are_reported_and_the_status_stays_as_it_is() -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(30)
        assert case.status("Ready") == ("True", "Training")
        before = case.world.job["status"]
        await case.page.aclose()
        await case.live(55)
        assert case.status("Ready") == ("True", "Training")
        await case.live(50)
        assert is_unknown(case)
        after = case.world.job["status"]
        assert after["progress"] == before["progress"]
        time = before["progress"]["lastUpdateTime"]
        assert case.message.endswith(f"; its last report was of step 1199 at {time}")
        writes = case.world.writes_but_events
        await case.live(3600)
        assert case.world.writes_but_events == writes
        assert case.world.job["status"] == after

    play(story)


def test_a_page_that_responds_again_ends_the_doubt() -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(90)
        assert is_unknown(case)
        port = case.world.job["spec"]["observability"]["metricsPort"]
        async with ProgressServer(TRAINS).serving(ADDRESS, port):
            await case.live(30)
        assert case.world.job["status"]["phase"] == "Running"
        assert case.status("Running") == ("True", "Training")
        assert case.world.job["status"]["progress"]["step"] == 1199

    play(story, None)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        pytest.param(b"", "no response within 2 s", id="silent"),
        pytest.param(http("503 Unavailable", b"upstream error"), "HTTP status 503", id="a proxy"),
        pytest.param(http("403 Forbidden", b"denied"), "HTTP status 403", id="denied"),
        pytest.param(
            http("200 OK", b"<html>"),
            "its response is not the progress of a run",
            id="another page",
        ),
    ],
)
def test_each_kind_of_failure_is_named(response: bytes, error: str) -> None:
    async def story(case: Case) -> None:
        await begin(case)
        port = case.world.job["spec"]["observability"]["metricsPort"]
        async with responding(port, response):
            await case.live(90)
            assert is_unknown(case)
            assert f"does not respond ({error}" in case.message

    play(story, None)


def test_a_page_without_progress_is_of_a_job_that_starts() -> None:
    async def story(case: Case) -> None:
        await begin(case)
        port = case.world.job["spec"]["observability"]["metricsPort"]
        async with responding(port, http("503 Service Unavailable", NOT_YET)):
            await case.live(300)
            assert case.status("Running") == ("False", "Starting")
            assert case.message == (
                "all nodes of attempt 1 run; ranks connect and load model and data"
            )
            await case.world.change(suspend=True)
            await case.live(1)
            assert "has not trained yet and stops without a checkpoint" in case.message

    play(story, None)


@pytest.mark.parametrize("progress", [None, TRAINS], ids=["never heard", "heard before"])
def test_a_stop_promises_no_checkpoint_and_denies_none(progress: Progress | None) -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(20)
        await case.page.aclose()
        await case.live(100)
        assert is_unknown(case)
        await case.world.change(suspend=True)
        await case.live(1)
        assert case.status("Running")[0] == "Unknown"
        assert "it is not known what it saves: http://" in case.message
        step = "step 1199 at" if progress else "it has not reported a step"
        assert step in case.message
        assert not [claim for claim in CLAIMS if claim in case.message]
        await case.world.end_pods(1, 1, code=75)
        await case.live(1)
        assert "it is not known what it saves: " in case.message
        await case.world.end_pods(1, 0, code=75)
        await case.world.conclude(1, "Failed")
        await case.live(1)
        assert case.status("Suspended") == ("True", "SuspendedByUser")
        assert case.world.condition("Running")["status"] == "False"

    play(story, progress)


def test_the_next_operator_leaves_the_status_as_it_is() -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(90)
        assert is_unknown(case)
        before, writes = case.world.job["status"], case.world.writes_but_events
        case.world.start_process()
        await case.live(200)
        assert case.world.job["status"] == before
        assert case.world.writes_but_events == writes

    play(story, None)


@pytest.mark.parametrize(
    ("progress", "category"), [(None, "other"), (TRAINS, "productive")], ids=["never", "before"]
)
def test_time_without_reports_is_productive_only_after_a_report(
    progress: Progress | None, category: str
) -> None:
    async def story(case: Case) -> None:
        await begin(case)
        await case.live(20)
        await case.page.aclose()
        await case.live(600)
        assert is_unknown(case)
        await case.world.change(suspend=True)
        await case.world.end_pods(1, *range(NODES), code=75)
        await case.world.conclude(1, "Failed")
        await case.live(1)
        assert case.world.job["status"]["ledger"]["time"][category] > 400_000

    play(story, progress)
