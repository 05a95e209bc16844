"""What the operator sees of runs, through the unmodified SDK, on the stand-in for Azure ML."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest

from azureml_service import WORKSPACE, ServiceClient, running_service
from finetune_operator.backends.azureml.polling import Poller
from finetune_operator.backends.azureml.run_logs import read_log
from finetune_operator.backends.azureml.workspace_client import Azure, RawJob, Workspace
from finetune_operator.backends.base import AttemptPhase, AttemptRef, Effect, Handle, Observation
from finetune_operator.errors import TransientError
from finetune_operator.kube.cache import Key
from finetune_operator.testing.suite import Lent
from finetune_trainer.config import (
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    ContractModel,
    ExitCode,
    FailureClass,
    Heard,
    StopRequest,
)
from support.api.builders import job
from support.azureml.azureml_cases import CASES
from support.azureml.azureml_looks import STEP_7, words

pytest.importorskip("azure.identity", reason="needs the extra azureml")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of marshmallow, by the SDK
    pytest.mark.filterwarnings("ignore:.*experimental"),
]

T = TypeVar("T")
P, C = AttemptPhase, FailureClass


def text(value: ContractModel) -> str:
    """Return the value of a tag, or a line of a log."""
    return value.model_dump_json(by_alias=True, exclude_none=True)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceClient]:
    with (
        running_service(tmp_path_factory.mktemp("service")) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in made.environ().items():
            patch.setenv(name, value)
        yield made


@pytest.fixture
def service(started: ServiceClient) -> Iterator[ServiceClient]:
    """The service, without what an earlier test asked of it."""
    started.requests(forget=True)
    yield started
    started.clear_faults()


@dataclass
class Process:
    """One operator process, as far as it looks.

    Attributes:
        name: Of the job that the test is about.
    """

    service: ServiceClient
    name: str
    workspace: Workspace
    looks: Poller
    lent: Lent

    @property
    def ref(self) -> AttemptRef:
        """The attempt."""
        handle = Handle("AzureMLJob", f"{WORKSPACE}/jobs/{self.name}", "uid-1")
        return AttemptRef(Key("default", "tiny"), "uid-1", 1, handle, job().spec)

    async def submit(self, case: str = "amlcompute-one-node") -> RawJob:
        """Submit a golden under the test's name."""
        (made,) = CASES[case].request().objects
        return await self.workspace.create({**made, "name": self.name})

    async def observe(self) -> Observation:
        """Return what the first look of this process sees."""
        async with asyncio.timeout(30):
            while True:
                try:
                    return self.looks.observe(self.ref)
                except TransientError as error:
                    if "not observed" not in str(error):
                        raise
                    await asyncio.sleep(0.02)

    async def look_again(self) -> Observation:
        """Return what is seen once another request was told something."""
        told = await self.workspace.job(self.name)
        assert told is not None
        self.lent.woken.clear()
        self.looks.note(told)
        async with asyncio.timeout(30):
            while not self.lent.woken:
                await asyncio.sleep(0.02)
        return self.looks.observe(self.ref)

    async def tag(self, tags: Mapping[str, ContractModel]) -> None:
        """Set tags of the run."""
        for key, value in tags.items():
            body = {"run_id": self.name, "key": key, "value": text(value)}
            await self.workspace.post("/mlflow/v2.0{ws}/api/2.0/mlflow/runs/set-tag", body)


@asynccontextmanager
async def process(service: ServiceClient, name: str) -> AsyncIterator[Process]:
    """Run what looks in a new operator process."""
    lent = Lent()
    azure = Azure({**service.environ(), "FINETUNE_AZUREML_REQUESTS_PER_SECOND": "1000"})
    azure.start(lent)
    workspace = azure.workspace(WORKSPACE, None)
    looks = Poller(lambda ref: workspace, lambda: datetime.now(UTC))
    looks.start(lent)
    try:
        yield Process(service, name, workspace, looks, lent)
    finally:
        await looks.close()
        azure.close()


@pytest.fixture
def seen(
    service: ServiceClient, request: pytest.FixtureRequest
) -> Callable[[Callable[[Process], Awaitable[T]]], T]:
    """Run a test in a process of its own; may be called again for the next one."""
    name = request.node.name.replace("[", "-").replace("]", "").replace("_", "-").lower()[:60]

    def run(work: Callable[[Process], Awaitable[T]]) -> T:
        async def inside() -> T:
            async with process(service, name) as one:
                return await work(one)

        return asyncio.run(inside())

    return run


Seen = Callable[[Callable[[Process], Awaitable[Any]]], Any]


async def submitted(one: Process) -> None:
    """Only submit the job."""
    await one.submit()


async def observed(one: Process) -> Observation:
    """Return what a process sees that knows of nothing."""
    return await one.observe()


@pytest.mark.parametrize(
    ("state", "phase", "reason"),
    [
        ("NotStarted", P.PENDING, "Submitted"),
        ("Starting", P.PENDING, "Submitted"),
        ("Provisioning", P.PENDING, "Submitted"),
        ("Preparing", P.PENDING, "PreparingEnvironment"),
        ("Queued", P.PENDING, "Queued"),
        ("Running", P.RUNNING, None),
        ("Finalizing", P.RUNNING, "Finalizing"),
        ("CancelRequested", P.RUNNING, "Cancelling"),
        ("NotResponding", P.RUNNING, "NotResponding"),
        ("Paused", P.RUNNING, "Paused"),
        ("Hibernating", P.RUNNING, "UnknownState"),
    ],
)
def test_a_new_process_sees_each_state_by_one_request(
    state: str, phase: AttemptPhase, reason: str | None, service: ServiceClient, seen: Seen
) -> None:
    async def work(one: Process) -> Observation:
        await one.submit("amlcompute-two-nodes")
        service.set_state(one.name, state)
        service.requests(forget=True)
        return await one.observe()

    found = seen(work)
    assert (found.phase, found.all_gone) == (phase, False)
    assert (found.obstacle and found.obstacle.reason) == reason
    assert found.nodes_ready == (2 if phase is P.RUNNING else 0)
    assert found.checkpoints.startswith("azureml://datastores/")
    asked = {record.kind for record in service.requests()} - {"token"}
    # Whether a trainer listens is asked next; where the data plane is, once for all.
    of_run = {"workspace.get", "discovery.get", "mlflow.runs.get"} if state == "Running" else set()
    assert asked - of_run == {"job.get"}
    assert len(service.requests("job.get")) == 1


def test_progress_and_signs_of_life_come_by_one_request_of_mlflow(
    service: ServiceClient, seen: Seen
) -> None:
    async def work(one: Process) -> None:
        await one.submit()
        service.set_state(one.name, "Running")
        await one.tag({PROGRESS_TAG: STEP_7})
        now = datetime.now(UTC).timestamp()
        await one.tag({HEARD_TAG: Heard(time=now, starts=2)})
        await one.observe()
        one.looks.note_stop(one.ref, datetime.now(UTC))  # the next look comes soon
        service.requests(forget=True)
        async with asyncio.timeout(30):
            while not service.requests("mlflow.runs.get"):
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        look = one.looks.newest(one.ref)
        assert look is not None
        assert look.is_listening
        found = one.looks.observe(one.ref)
        assert (found.progress, found.disruptions) == (STEP_7, 1)
        asked = [record.kind for record in service.requests() if record.kind != "token"]
        assert asked.count("mlflow.runs.get") == len(asked) - asked.count(
            "discovery.get"
        ) - asked.count("workspace.get")

    seen(work)


def test_a_preemption_that_fails_the_job_is_one(service: ServiceClient, seen: Seen) -> None:
    async def work(one: Process) -> Observation:
        await one.submit()
        service.set_state(one.name, "Running")
        service.preempt(one.name)
        return await one.observe()

    found = seen(work)
    assert (found.all_gone, found.failure_class) == (True, C.PREEMPTED)


def test_a_preemption_that_queues_the_same_run_again_is_a_disruption(
    service: ServiceClient, seen: Seen
) -> None:
    async def work(one: Process) -> Observation:
        await one.submit()
        service.set_state(one.name, "Running")
        assert (await one.observe()).phase is P.RUNNING
        service.preempt(one.name, how="requeued")
        return await one.look_again()

    found = seen(work)
    assert (found.phase, found.disruptions, found.all_gone) == (P.PENDING, 1, False)


def test_who_cancelled_in_studio_is_named(service: ServiceClient, seen: Seen) -> None:
    async def work(one: Process) -> Observation:
        await one.submit()
        service.set_state(one.name, "Running")
        service.studio_cancel(one.name, by="ada@example.test")
        return await one.observe()

    found = seen(work)
    assert (found.all_gone, found.failure_class) == (True, C.DO_NOT_RESTART)
    assert found.message.startswith("ada@example.test cancelled the job in Azure ML; ")


def test_a_job_that_was_stopped_by_an_earlier_process_was_not_cancelled_in_studio(
    service: ServiceClient, seen: Seen
) -> None:
    async def stop(one: Process) -> None:
        await one.submit()
        service.set_state(one.name, "Running")
        await one.tag({STOP_TAG: StopRequest(until=datetime.now(UTC) + timedelta(seconds=30))})
        await one.workspace.cancel(one.name)

    seen(stop)
    assert seen(observed).failure_class is C.PREEMPTED


def test_the_last_words_of_the_root_cause_are_found_in_the_ends_of_the_logs(
    service: ServiceClient, seen: Seen
) -> None:
    broken = words(ExitCode.DATA, C.DATA_ERROR, "row 3 is empty")
    lost = words(ExitCode.ERROR, C.WORKER_LOST, "see the other nodes")

    async def work(one: Process) -> Observation:
        await one.submit("amlcompute-two-nodes")
        for node, last in enumerate((lost, broken)):
            path = f"user_logs/std_log_process_{node}.txt"
            service.set_log(one.name, f"{'x' * 50_000}\n{text(last)}\n", path)
        service.set_state(one.name, "Failed", error="exited with status code 1")
        return await one.observe()

    found = seen(work)
    assert (found.termination, found.node) == (broken, "node 1")


def test_a_job_that_is_not_there_is_gone_after_two_requests(
    service: ServiceClient, seen: Seen
) -> None:
    found = seen(observed)
    assert (found.phase, found.all_gone) == (P.UNKNOWN, True)
    assert len(service.requests("job.get")) == 2


@pytest.mark.parametrize(
    ("fault", "retry_after"),
    [
        pytest.param({"status": 503}, None, id="503"),
        pytest.param({"status": 429, "retry_after": 7}, 7.0, id="throttled"),
        pytest.param({"is_lost": True}, None, id="lost"),
    ],
)
def test_what_may_pass_is_no_news_of_the_attempt(
    fault: dict[str, Any], retry_after: float | None, service: ServiceClient, seen: Seen
) -> None:
    async def work(one: Process) -> None:
        await one.submit()
        service.fault("job.get", **fault)
        with pytest.raises(TransientError):
            await one.observe()
        assert len(service.requests("job.get")) == 1

    seen(work)


def test_a_right_that_is_missing_stalls_the_job(service: ServiceClient, seen: Seen) -> None:
    async def work(one: Process) -> Observation:
        told = await one.submit()
        one.looks.note(told)
        await one.observe()
        service.fault("job.get", status=403)
        one.looks.note_stop(one.ref, datetime.now(UTC) - timedelta(hours=1))
        one.lent.woken.clear()
        async with asyncio.timeout(30):
            while not one.lent.woken:
                await asyncio.sleep(0.02)
        return one.looks.observe(one.ref)

    found = seen(work)
    assert found.obstacle.effect is Effect.STALLED
    assert "A fault of job.get" in found.obstacle.message


@pytest.mark.full
def test_a_log_is_followed_by_ranges_to_the_end_of_the_run_and_no_url_is_logged(
    service: ServiceClient, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def work(one: Process) -> list[str]:
        await one.submit()
        service.set_state(one.name, "Running")
        service.set_log(one.name, "one\ntw")
        found: list[str] = []

        async def follow() -> None:
            async for line in read_log(one.workspace, one.ref, 0, follow=True):
                found.append(line)

        following = asyncio.create_task(follow())
        async with asyncio.timeout(90):
            while found != ["one"]:
                await asyncio.sleep(0.05)
            service.set_log(one.name, "one\ntwo\nend")
            service.set_state(one.name, "Completed")
            await following
        service.fault("log.get", status=403)
        with pytest.raises(TransientError) as failed:
            await anext(read_log(one.workspace, one.ref, 0, follow=False))
        assert "sig" not in str(failed.value)
        return found

    assert seen(work) == ["one", "two", "end"]
    assert not [one for one in caplog.records if "sig=" in one.getMessage()]
    assert len(service.requests("log.get")) <= 12
