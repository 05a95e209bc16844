"""What the operator does with a backend: start it, give its verbs their time, and close it."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

import pytest

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.base import (
    Attempt,
    AttemptRef,
    Backend,
    Found,
    Handle,
    Limits,
    Observation,
    Request,
    Services,
)
from finetune_operator.backends.hosting import START_AGAIN_SECONDS, HostedBackend
from finetune_operator.errors import BrokenBackendError, TransientError
from finetune_operator.kernel.finalizer import DELETION_SECONDS
from finetune_operator.kernel.job_events import FollowedJobs
from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kube.api_errors import NotLeadingError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.client import ClientOptions
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Object
from finetune_operator.reconcile.decide import RECHECK_SECONDS
from support.api.builders import manifest
from support.kernel.fake_api import FakeApi
from support.kernel.fake_backend import FakeBackend, ended
from support.kernel.kernel_world import START
from support.kernel.live_world import SETTINGS
from support.kernel.virtual_time import hang, run

REF = AttemptRef(Key("ns", "tiny"), "uid", 1, Handle("Fake", "ns/tiny-1"), None)
LIMITS = Limits(submit=7.0, find=6.0, observe=5.0, cancel=4.0, collect=3.0, start=8.0)


class Plugin(FakeBackend):
    """A backend that does what a test says, each time that it is asked.

    Attributes:
        asked: Verbs so far, with the time.
        does: What comes before a verb, by its name.
        services: What it was lent last.
    """

    name: ClassVar[str] = "plugin"
    threads: ClassVar[int] = 2
    limits: ClassVar[Limits] = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, float]] = []
        self.does: dict[str, Callable[[], object]] = {}
        self.services: Services | None = None

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.asked]

    def lent(self) -> Services:
        assert self.services is not None
        return self.services

    async def start(self, services: Services) -> None:
        self.services = services
        await self._enter("start")

    async def close(self) -> None:
        await self._enter("close")

    def check_inputs(self, job: FineTuneJob) -> Sequence[Problem]:
        self.does.get("check_inputs", lambda: None)()
        return ()

    async def submit(self, request: Request) -> Handle:
        await self._enter("submit")
        return await super().submit(request)

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        await self._enter("find")
        return await super().find(job, attempt)

    async def observe(self, ref: AttemptRef) -> Observation:
        await self._enter("observe")
        return await super().observe(ref)

    async def _enter(self, verb: str) -> None:
        self.asked.append((verb, asyncio.get_running_loop().time()))
        if asyncio.iscoroutine(made := self.does.get(verb, lambda: None)()):
            await made


class Fast(FakeBackend):
    """A backend whose attempts are done at once."""

    name: ClassVar[str] = "other"

    def __init__(self) -> None:
        super().__init__(scripts={1: (ended(),)})

    @property
    def submitted(self) -> list[str]:
        return [name.removeprefix("ns/").removesuffix("-1") for name in self.runs]


@dataclass
class Operated:
    """An operator at work on an API in memory."""

    api: FakeApi
    term: LeaderTerm
    task: asyncio.Task[None]

    async def apply(self, backend: str, name: str = "") -> None:
        fields = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        made = manifest(name=name or f"by-{backend}", backend={"type": backend}, **fields)
        await self.api.create(FINE_TUNE_JOBS, defaulted(made), "ns")

    async def condition(self, name: str, kind: str) -> Object:
        status = (await self.api.get(FINE_TUNE_JOBS, name, "ns")).get("status", {})
        found = [one for one in status.get("conditions", ()) if one["type"] == kind]
        return found[0] if found else {}

    async def is_accepted(self, name: str) -> bool:
        return (await self.condition(name, "Accepted")).get("status") == "True"

    async def complaint(self, name: str) -> tuple[str, str]:
        """Return reason and message of Stalled."""
        found = await self.condition(name, "Stalled")
        assert found["status"] == "True"
        return found["reason"], found["message"]

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@asynccontextmanager
async def operated(
    *points: str,
    given: Mapping[str, Backend] | None = None,
    seconds_to_write: Callable[[], float] | None = None,
) -> AsyncIterator[Operated]:
    """Have the operator work with these backends; of those of packages, unless some are given."""
    api = FakeApi()
    api.options = ClientOptions(seconds_to_write=seconds_to_write)
    api.now = _time
    settings = SETTINGS.model_copy(update={"backends": points})
    term = LeaderTerm(api, settings, backends=given, listen=FollowedJobs, now=_time)
    made = Operated(api, term, asyncio.create_task(term.run()))
    try:
        yield made
    finally:
        await made.end()


def _time() -> datetime:
    return START + timedelta(seconds=asyncio.get_running_loop().time())


async def for_ever() -> None:
    await asyncio.Event().wait()


def hosted_alone(plugin: Plugin) -> HostedBackend:
    return HostedBackend("plugin", plugin)


def in_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def refuse(error: Exception) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


def test_a_plugin_whose_import_hangs_is_named_and_the_others_run() -> None:
    async def work() -> None:
        points = (
            "hung=support.kernel.plugin_that_hangs:Any",
            "fake=support.kernel.fake_backend:FakeBackend",
        )
        async with operated(*points) as world:
            await world.apply("hung")
            await world.apply("fake")
            await asyncio.sleep(20)
            assert await world.complaint("by-hung") == (
                "BackendFailed",
                "spec.backend.type hung: its import took more than 10 s; check that its service "
                "can be reached, and restart the operator",
            )
            assert await world.is_accepted("by-fake")

    run(work())


def test_a_plugin_without_its_library_says_what_to_install() -> None:
    async def work() -> None:
        async with operated("bare=support.kernel.plugin_without_library:Any") as world:
            await world.apply("bare")
            await asyncio.sleep(5)
            reason, message = await world.complaint("by-bare")
            assert reason == "BackendFailed"
            assert (
                "(ModuleNotFoundError: No module named 'a_library_that_nobody_has'; pip install "
            ) in message

    run(work())


def test_a_backend_is_started_once_by_its_first_jobs_and_closed_at_the_end_of_the_term() -> None:
    async def work() -> None:
        used, unused = Plugin(), Plugin()
        used.does["start"] = lambda: asyncio.sleep(3)
        async with operated(given={"used": used, "unused": unused}) as world:
            await asyncio.sleep(10)
            assert used.verbs == []
            for number in range(3):
                await world.apply("used", f"job-{number}")
            await asyncio.sleep(10)
            assert used.verbs.count("start") == 1
            assert used.verbs.count("submit") == 3
            await world.end()
            assert used.verbs.count("close") == 1
            assert used.verbs[-1] == "close"
            assert unused.verbs == []

    run(work())


@pytest.mark.parametrize(
    ("does", "said"),
    [
        pytest.param(
            refuse(TransientError("the service answers 503")), "the service answers 503", id="away"
        ),
        pytest.param(
            refuse(RuntimeError("no account")),
            "spec.backend.type plugin cannot be started (RuntimeError: no account); fix that, or "
            "use another backend",
            id="broken",
        ),
        pytest.param(
            refuse(ModuleNotFoundError("No module named 'sdk'", name="sdk")),
            "spec.backend.type plugin cannot be started (ModuleNotFoundError: No module named "
            "'sdk'; pip install the package that has it); fix that, or use another backend",
            id="library is missing",
        ),
        pytest.param(
            for_ever,
            "spec.backend.type plugin: start took more than 8 s; check that its service can be "
            "reached",
            id="hangs",
        ),
    ],
)
def test_a_start_that_fails_is_told_and_tried_again(does: Callable[[], object], said: str) -> None:
    async def work() -> None:
        plugin = Plugin()
        plugin.does["start"] = does
        async with operated(given={"plugin": plugin, "fake": FakeBackend()}) as world:
            for number in range(3):
                await world.apply("plugin", f"job-{number}")
            await world.apply("fake")
            await asyncio.sleep(START_AGAIN_SECONDS)
            assert await world.is_accepted("by-fake")
            assert plugin.verbs == ["start"]  # one try for all of them
            for number in range(3):
                assert await world.complaint(f"job-{number}") == ("BackendFailed", said)
            del plugin.does["start"]
            await asyncio.sleep(2 * RECHECK_SECONDS)
            assert plugin.verbs[:2] == ["start", "start"]
            assert plugin.verbs.count("start") == 2
            for number in range(3):
                assert await world.is_accepted(f"job-{number}")

    run(work())


def test_a_service_that_asks_to_wait_is_not_started_before() -> None:
    async def work() -> None:
        plugin = Plugin()
        plugin.does["start"] = refuse(TransientError("too many requests", retry_after=100.0))
        hosted = hosted_alone(plugin)
        for _ in range(9):
            with pytest.raises(TransientError) as caught:
                await hosted.observe(REF)
            now = asyncio.get_running_loop().time()
            assert caught.value.retry_after == 100.0 - now
            await asyncio.sleep(11)
        del plugin.does["start"]
        await asyncio.sleep(2)
        await hosted.observe(REF)
        assert plugin.verbs == ["start", "start", "observe"]

    run(work())


@pytest.mark.parametrize("verb", ["submit", "find", "observe"])
def test_a_verb_that_takes_too_long_is_cancelled_and_named(verb: str) -> None:
    async def work() -> None:
        plugin = Plugin()
        hosted = hosted_alone(plugin)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "submit": lambda: hosted.submit(Request("plugin", "uid", 1, "a", ())),
            "find": lambda: hosted.find(
                FineTuneJob.model_validate(defaulted(manifest())), Attempt(1)
            ),
            "observe": lambda: hosted.observe(REF),
        }
        ended: list[float] = []

        async def hang_until_cancelled() -> None:
            try:
                await for_ever()
            finally:
                ended.append(asyncio.get_running_loop().time())

        plugin.does[verb] = hang_until_cancelled
        seconds = getattr(LIMITS, verb)
        with pytest.raises(TransientError) as caught:
            await calls[verb]()
        assert ended == [seconds]
        assert str(caught.value) == (
            f"spec.backend.type plugin: {verb} took more than {seconds:g} s; check that its "
            "service can be reached"
        )

    run(work())


def test_a_time_out_of_the_backend_itself_is_its_own_fault() -> None:
    async def work() -> None:
        plugin = Plugin()
        plugin.does["observe"] = refuse(TimeoutError("its own"))
        with pytest.raises(BrokenBackendError, match="TimeoutError: its own"):
            await hosted_alone(plugin).observe(REF)

    run(work())


def test_an_attempt_that_cannot_be_observed_in_time_is_told_and_the_others_run() -> None:
    async def work() -> None:
        plugin = Plugin()
        plugin.does["observe"] = for_ever
        async with operated(given={"plugin": plugin, "fake": FakeBackend()}) as world:
            await world.apply("plugin")
            await asyncio.sleep(60)
            await world.apply("fake")
            await asyncio.sleep(2)
            assert await world.is_accepted("by-fake")
            told = await world.condition("by-plugin", "ResourcesReady")
            assert told["reason"] == "BackendFailed"
            assert "plugin: observe took more than 5 s" in told["message"]

    run(work())


def test_inputs_are_checked_in_a_thread_and_a_check_that_hangs_is_told() -> None:
    async def work() -> None:
        plugin, threads = Plugin(), []
        plugin.does["check_inputs"] = lambda: threads.append(threading.current_thread())
        async with operated(given={"plugin": plugin}) as world:
            await world.apply("plugin", "good")
            await asyncio.sleep(5)
            assert await world.is_accepted("good")
            assert threading.main_thread() not in threads
            plugin.does["check_inputs"] = hang
            for number in range(5):
                await world.apply("plugin", f"hung-{number}")
            await asyncio.sleep(40)
            said = [(await world.complaint(f"hung-{number}"))[1] for number in range(5)]
            hung = "spec.backend.type plugin: check_inputs took more than 30 s; check that its"
            assert sum(one.startswith(hung) for one in said) == 4
            assert (
                "spec.backend.type plugin: all 4 threads for check_inputs hang; waiting for a "
                "free thread took more than 30 s; check that its service can be reached"
            ) in said

    run(work())


def test_a_job_that_changes_while_its_inputs_are_checked_is_checked_again() -> None:
    async def work() -> None:
        plugin = Plugin()
        is_checked, may_end = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def check() -> None:
            loop.call_soon_threadsafe(is_checked.set)
            may_end.wait()

        plugin.does["check_inputs"] = check
        async with operated(given={"plugin": plugin}) as world:
            await world.apply("plugin")
            await is_checked.wait()
            change = {"spec": {"suspend": True}}
            await world.api.patch(FINE_TUNE_JOBS, "by-plugin", "ns", change)
            for _ in range(20):
                await asyncio.sleep(0)  # until the operator has heard of it
            may_end.set()
            await asyncio.sleep(5)
            assert "submit" not in plugin.verbs
            assert (await world.condition("by-plugin", "Suspended"))["status"] == "True"

    run(work())


def test_blocking_calls_have_threads_of_their_own_and_when_all_hang_the_next_says_so() -> None:
    async def work() -> None:
        plugin = Plugin()
        hosted = hosted_alone(plugin)
        await hosted.observe(REF)
        services = plugin.lent()
        assert await services.run_blocking(lambda: 7, 1.0) == 7
        with pytest.raises(ZeroDivisionError):
            await services.run_blocking(lambda: 1 // 0, 1.0)
        started = asyncio.get_running_loop().time()
        hung = [services.run_blocking(hang, 5.0) for _ in range(Plugin.threads)]
        said = await asyncio.gather(*hung, return_exceptions=True)
        assert {str(one) for one in said} == {
            "spec.backend.type plugin: a blocking call took more than 5 s; check that its "
            "service can be reached"
        }
        with pytest.raises(TransientError) as caught:
            await services.run_blocking(lambda: 7, 5.0)
        assert str(caught.value) == (
            "spec.backend.type plugin: all 2 threads for a blocking call hang; waiting for a free "
            "thread took more than 5 s; check that its service can be reached"
        )
        assert asyncio.get_running_loop().time() == started + 10

    run(work())


def test_a_thread_that_has_come_back_serves_the_next_call() -> None:
    async def work() -> None:
        plugin = Plugin()
        hosted = hosted_alone(plugin)
        await hosted.observe(REF)
        found = await asyncio.gather(
            *(plugin.lent().run_blocking(lambda: 7, 5.0) for _ in range(9))
        )
        assert found == [7] * 9

    run(work())


def test_a_backend_without_threads_is_told_so_when_it_blocks() -> None:
    async def work() -> None:
        class Threadless(Plugin):
            threads: ClassVar[int] = 0

        plugin = Threadless()
        await hosted_alone(plugin).observe(REF)
        with pytest.raises(BrokenBackendError, match="declares no `threads`"):
            await plugin.lent().run_blocking(lambda: 7, 5.0)

    run(work())


def test_a_backend_may_have_a_job_reconciled_from_a_thread() -> None:
    async def work() -> None:
        plugin = Plugin()
        async with operated(given={"plugin": plugin}) as world:
            await world.apply("plugin")
            await asyncio.sleep(5)
            run_of = plugin.run(1)
            run_of.script[:] = [Observation(run_of.script[0].phase, nodes_ready=1)]
            await asyncio.sleep(60)
            before = len(plugin.asked)
            await asyncio.sleep(60)
            assert len(plugin.asked) == before  # nothing else would ask for it
            services = plugin.lent()
            job = Key("ns", "by-plugin")
            in_thread(lambda: services.wake(job))
            await asyncio.sleep(1)
            assert plugin.verbs[before:] == ["observe"]
            await world.end()
            in_thread(lambda: services.wake(job))
            await asyncio.sleep(1)
            assert plugin.verbs[before:] == ["observe", "close"]

    run(work())


def test_a_backend_may_write_as_long_as_this_process_leads_and_the_term_lasts() -> None:
    async def work() -> None:
        left, plugin = [1.0], Plugin()
        async with operated(given={"plugin": plugin}, seconds_to_write=lambda: left[0]) as world:
            await world.apply("plugin")
            await asyncio.sleep(5)
            services = plugin.lent()
            in_thread(services.check_may_write)
            left[0] = 0.0
            with pytest.raises(NotLeadingError, match="plugin may not write"):
                in_thread(services.check_may_write)
            left[0] = 1.0
            await world.end()
            with pytest.raises(NotLeadingError, match="plugin may not write"):
                in_thread(services.check_may_write)

    run(work())


def test_a_backend_that_is_closed_is_asked_nothing() -> None:
    async def work() -> None:
        plugin = Plugin()
        hosted = hosted_alone(plugin)
        await hosted.observe(REF)
        await hosted.close()
        with pytest.raises(NotLeadingError, match="this leader term has ended"):
            await hosted.observe(REF)
        assert plugin.verbs == ["start", "observe", "close"]

    run(work())


@pytest.mark.parametrize("does", [for_ever, refuse(RuntimeError("no"))], ids=["hangs", "fails"])
def test_a_close_that_hangs_or_fails_keeps_no_term_from_its_end(
    does: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        plugin = Plugin()
        plugin.does["close"] = does
        async with operated(given={"plugin": plugin}) as world:
            await world.apply("plugin")
            await asyncio.sleep(5)
            async with asyncio.timeout(10):
                await world.end()

    run(work())
    assert "backend not closed" in caplog.text


@pytest.mark.full
def test_a_backend_that_answers_nothing_keeps_no_other_from_its_jobs() -> None:
    async def work() -> None:
        plugin, other = Plugin(), Fast()
        num_asked, most_asked = 0, 0

        async def answer_nothing() -> None:
            nonlocal num_asked, most_asked
            num_asked += 1
            most_asked = max(most_asked, num_asked)
            try:
                await for_ever()
            finally:
                num_asked -= 1

        plugin.does["submit"] = plugin.does["find"] = answer_nothing
        async with operated(given={"plugin": plugin, "other": other}) as world:
            await asyncio.sleep(1)  # what is there at the start has more workers
            for number in range(6 * SETTINGS.workers):
                await world.apply("plugin", f"hung-{number}")
            for minute in range(30):
                name = f"job-{minute}"
                await world.apply("other", name)
                applied = asyncio.get_running_loop().time()
                while name not in other.submitted:
                    await asyncio.sleep(0.1)
                waited = asyncio.get_running_loop().time() - applied
                assert waited < DELETION_SECONDS + 1
                await asyncio.sleep(0.9)
                assert await world.is_accepted(name)
                await asyncio.sleep(60)
                assert num_asked == SETTINGS.workers
                assert world.term.health().complaints(SETTINGS.stuck_seconds) == []
        assert most_asked == SETTINGS.workers

    run(work())


HUNG_PROCESS = """
import asyncio, threading
from finetune_operator.backends.threads import BlockingCalls

async def work():
    calls = BlockingCalls("it", 2)
    hung = threading.Event()
    for _ in range(2):
        try:
            await calls.run("a call", hung.wait, 0.01)
        except Exception as error:
            print(error)

asyncio.run(work())
print("ended")
"""


def test_no_process_waits_at_its_end_for_a_thread_that_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HUNG_PROCESS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "it: a call took more than 0.01 s; check that its service can be reached"
    ] * 2 + ["ended"]
