"""Many attempts of one workspace of Azure ML: its request budget, who waits, and who is silent."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from finetune_operator.backends.azureml import sdk
from finetune_operator.backends.azureml.backend import AzureMLBackend
from finetune_operator.backends.azureml.polling import SILENCE_SECONDS, Poller
from finetune_operator.backends.azureml.workspace_client import Azure, RawJob, Workspace
from finetune_operator.backends.base import AttemptRef
from finetune_operator.backends.budget import LONGEST_PAUSE_SECONDS, Budget, Priority
from finetune_operator.backends.threads import BlockingCalls
from finetune_operator.errors import TransientError
from finetune_operator.testing.suite import Lent
from finetune_trainer.config import PROGRESS_TAG
from support.azureml.azureml_looks import NOW, STEP_7
from support.azureml.scripted_workspace import ScriptedWorkspace
from support.kernel.virtual_time import hang, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*experimental")

T = TypeVar("T")
JOBS = 500
CALL_SECONDS = 25.0
PER_SECOND = 2.0


class SlowAzure(Azure):
    """Answers after a while, and in no thread, so that time may be virtual.

    Attributes:
        seconds: How long an answer takes.
        error: What it is, where not what was asked for.
    """

    def __init__(self) -> None:
        super().__init__({})
        self.seconds = 0.3
        self.error: Exception | None = None

    async def run(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return call()

    def sdk(self, workspace_id: str, client_id: str | None) -> Any:
        return SimpleNamespace(ml=None)


class HungAzure(Azure):
    """Has the threads that the operator has, of which each read keeps one for ever.

    Attributes:
        hung: Workspaces of the reads that hang.
    """

    def __init__(self) -> None:
        sdk.load()
        super().__init__({})
        self.hung: list[str] = []
        self.start(_Threads())

    def sdk(self, workspace_id: str, client_id: str | None) -> Any:
        def read(*_: Any) -> None:
            self.hung.append(workspace_id)
            hang()

        return SimpleNamespace(ml=None, read=read)


class _Threads(Lent):
    def __init__(self) -> None:
        super().__init__()
        self._calls = BlockingCalls("azureml", AzureMLBackend.threads)

    async def run_blocking(self, call: Callable[[], T], seconds: float) -> T:
        return await self._calls.run("work", call, seconds)


class BusyWorkspace(ScriptedWorkspace):
    """A workspace that keeps its budget as the real one does.

    Attributes:
        looked_at: Names of what was asked about, in order.
        written: How long each write took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.azure = SlowAzure()
        Workspace.__init__(self, self.azure, self.id, None, Budget(PER_SECOND, 2))
        self.looked_at: list[str] = []
        self.written: list[float] = []

    async def job(self, name: str, priority: Priority = Priority.READ) -> RawJob | None:
        self.looked_at.append(name)
        await self.ask(lambda _: None, priority)
        return await super().job(name)

    async def get(
        self,
        path: str,
        params: dict[str, Any] | None = None,
        priority: Priority = Priority.READ,
    ) -> dict[str, Any]:
        self.looked_at.append((params or {}).get("run_id", ""))
        await self.ask(lambda _: None, priority)
        return await super().get(path, params, priority)

    async def cancel(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await self.ask(lambda _: self._note("cancel"), Priority.WRITE)
        self.written.append(loop.time() - begun - self.azure.seconds)


@pytest.fixture
def workspace() -> BusyWorkspace:
    return BusyWorkspace()


def now() -> datetime:
    """Return the time, which goes with the loop's."""
    return NOW + timedelta(seconds=asyncio.get_running_loop().time())


def follow(workspace: ScriptedWorkspace, number: int) -> tuple[Poller, list[AttemptRef], Lent]:
    """Begin to look at so many runs that train."""
    lent, refs = Lent(), []
    looks = Poller(lambda ref: workspace, now, jitter=lambda: 0.5)
    looks.start(lent)
    for index in range(number):
        workspace.add(f"tiny-{index}", "Running").set_tag(PROGRESS_TAG, STEP_7)
        refs.append(workspace.ref(f"tiny-{index}"))
        looks.newest(refs[-1])
    return looks, refs, lent


def test_500_runs_share_the_budget_of_their_workspace_and_none_starves_nor_does_a_cancel(
    workspace: BusyWorkspace,
) -> None:
    async def work() -> None:
        looks, refs, _ = follow(workspace, JOBS)
        for _ in range(20):
            await asyncio.sleep(97.0)
            await workspace.cancel("tiny-7")
        await looks.close()
        assert all(looks.newest(ref) is None for ref in refs)

    run(work())
    times = workspace.times()
    assert min(b - a for a, b in pairwise(times)) >= 1.0 / PER_SECOND - 1e-6
    assert len(times) >= 0.9 * 20 * 97.0 * PER_SECOND  # and is made use of
    looks_at = Counter(workspace.looked_at)
    assert len(looks_at) == JOBS
    assert max(looks_at.values()) - min(looks_at.values()) <= 1
    assert max(workspace.written) <= 2.0


def test_an_end_among_500_runs_is_told_before_the_other_looks(workspace: BusyWorkspace) -> None:
    async def work() -> float:
        looks, refs, _ = follow(workspace, JOBS)
        await asyncio.sleep(600.0)
        run, loop = workspace.runs["tiny-7"], asyncio.get_running_loop()
        run.logs["user_logs/std_log.txt"] = b"bye"
        run.set_state("Failed")
        asked = workspace.looked_at.count("tiny-7")
        while workspace.looked_at.count("tiny-7") == asked:
            await asyncio.sleep(0.1)
        seen_at = loop.time()
        while not looks.observe(refs[7]).all_gone:
            await asyncio.sleep(0.1)
        await looks.close()
        return loop.time() - seen_at

    assert run(work()) <= 2 / PER_SECOND + 3 * workspace.azure.seconds + 0.5


def test_of_few_runs_the_budget_keeps_none_waiting(workspace: BusyWorkspace) -> None:
    async def work() -> None:
        looks, _, _ = follow(workspace, 20)
        await asyncio.sleep(3600.0)
        await looks.close()

    run(work())
    assert min(Counter(workspace.looked_at).values()) >= 3600 / 33 - 2


def test_a_workspace_that_is_silent_is_told_to_100_jobs_in_time_and_a_cancel_does_not_wait(
    workspace: BusyWorkspace,
) -> None:
    async def work() -> None:
        looks, refs, lent = follow(workspace, 100)
        await asyncio.sleep(120.0)
        workspace.azure.seconds = CALL_SECONDS
        workspace.azure.error = TransientError("Azure ML does not respond")
        lent.woken.clear()
        await asyncio.sleep(SILENCE_SECONDS + 3 * CALL_SECONDS)
        assert Counter(lent.woken) == Counter(ref.job for ref in refs)
        for ref in refs:
            obstacle = looks.observe(ref).obstacle
            assert obstacle is not None
            assert obstacle.reason == "ServiceSilent"
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TransientError):
            await workspace.cancel("tiny-7")
        assert asyncio.get_running_loop().time() - begun <= CALL_SECONDS + 2.0
        workspace.azure.seconds, workspace.azure.error = 0.3, None
        lent.woken.clear()
        await asyncio.sleep(2 * CALL_SECONDS)
        assert Counter(lent.woken) == Counter(ref.job for ref in refs)
        await looks.close()

    run(work())


def test_a_long_pause_is_told_to_all_jobs_in_time_and_a_cancel_does_not_wait_for_its_end(
    workspace: BusyWorkspace,
) -> None:
    async def work() -> None:
        looks, refs, _ = follow(workspace, 100)
        await asyncio.sleep(120.0)
        workspace.azure.error = TransientError("Azure ML reports: too many requests", 3600.0)
        with pytest.raises(TransientError) as error:
            await workspace.cancel("tiny-7")
        assert error.value.retry_after == LONGEST_PAUSE_SECONDS
        workspace.azure.error = None
        await asyncio.sleep(SILENCE_SECONDS)
        for ref in refs:
            obstacle = looks.observe(ref).obstacle
            assert obstacle is not None
            assert obstacle.reason == "ServiceSilent"
        with pytest.raises(TransientError, match="the next request may be sent in"):
            await workspace.cancel("tiny-7")
        await asyncio.sleep(LONGEST_PAUSE_SECONDS)
        await workspace.cancel("tiny-7")
        assert all(looks.observe(ref).obstacle is None for ref in refs)
        await looks.close()

    run(work())


def test_a_look_that_is_asked_to_wait_for_an_hour_is_not_that_late(
    workspace: BusyWorkspace,
) -> None:
    async def work() -> None:
        looks, (ref,), _ = follow(workspace, 1)
        await asyncio.sleep(10.0)
        workspace.azure.error = TransientError("Azure ML reports: too many requests", 3600.0)
        await asyncio.sleep(31.0)
        workspace.azure.error = None
        assert looks.observe(ref).obstacle is not None
        await asyncio.sleep(LONGEST_PAUSE_SECONDS * 1.1)
        assert looks.observe(ref).obstacle is None
        await looks.close()

    run(work())


def test_reads_that_hang_leave_threads_to_writes() -> None:
    async def work() -> None:
        azure = HungAzure()
        silent = [azure.workspace(f"/workspaces/{number}", None) for number in range(3)]
        reads = [one.get_range("https://blob.test", 0, 1) for one in silent for _ in range(3)]
        reads += [one.ask(lambda sdk: sdk.read(""), Priority.READ) for one in silent]
        tasks = [asyncio.create_task(read) for read in reads]
        await asyncio.sleep(5.0)
        assert len(azure.hung) == 4
        begun = asyncio.get_running_loop().time()
        for one in silent:
            assert await one.ask(lambda _: "written", Priority.WRITE) == "written"
        assert asyncio.get_running_loop().time() - begun <= 2.0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run(work())


def test_reads_of_a_workspace_leave_threads_to_those_of_others_whoever_asks() -> None:
    async def work() -> None:
        azure = HungAzure()
        silent = [azure.workspace("/workspaces/silent", client_id) for client_id in ("a", "b")]
        reads = [one.get_range("https://blob.test", 0, 1) for one in silent for _ in range(3)]
        reads += [one.ask(lambda sdk: sdk.read(""), Priority.READ) for one in silent]
        tasks = [asyncio.create_task(read) for read in reads]
        await asyncio.sleep(5.0)
        assert len(azure.hung) == 2
        other = azure.workspace("/workspaces/other", None)
        assert await other.ask(lambda _: "seen", Priority.READ) == "seen"
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run(work())
