"""When Azure ML is looked at, how often, and what a job is told of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from finetune_operator.backends.azureml.polling import SILENCE_SECONDS, Poller
from finetune_operator.backends.azureml.submit import poll_now
from finetune_operator.backends.azureml.workspace_client import RawJob, Workspace
from finetune_operator.backends.base import AttemptPhase, AttemptRef, Effect, Observation
from finetune_operator.backends.budget import Priority
from finetune_operator.errors import BackendError, TransientError
from finetune_operator.testing.suite import Lent
from finetune_trainer.config import (
    HEARD_TAG,
    PROGRESS_TAG,
    STOP_TAG,
    ExitCode,
    FailureClass,
    Heard,
    StopRequest,
)
from support.azureml.azureml_looks import NOW, STEP_7, UNTIL, look, words
from support.azureml.scripted_workspace import ScriptedRun, ScriptedWorkspace, refused
from support.kernel.virtual_time import run

P = AttemptPhase
STD = "user_logs/std_log.txt"


def now() -> datetime:
    """Return the time, which goes with the loop's."""
    return NOW + timedelta(seconds=asyncio.get_running_loop().time())


class Process:
    """The looks of one operator process, and what it is lent."""

    def __init__(self, *workspaces: ScriptedWorkspace) -> None:
        self.lent = Lent()
        self.looks = Poller(self._workspace_of, now, jitter=lambda: 0.0)
        self._workspaces = {one.id: one for one in workspaces}

    def _workspace_of(self, ref: AttemptRef) -> Workspace:
        return self._workspaces[ref.handle.name.rpartition("/jobs/")[0]]

    async def observe(self, ref: AttemptRef, seconds: float = 0.0) -> Observation:
        """Return what is known of an attempt after so long; it is asked about all the time."""
        self.looks.newest(ref)
        await asyncio.sleep(seconds)
        return self.looks.observe(ref)


@asynccontextmanager
async def started(*workspaces: ScriptedWorkspace) -> AsyncIterator[Process]:
    """Run the looks of one process."""
    process = Process(*workspaces)
    process.looks.start(process.lent)
    try:
        yield process
    finally:
        await process.looks.close()


@pytest.fixture
def workspace() -> ScriptedWorkspace:
    return ScriptedWorkspace()


def running(workspace: ScriptedWorkspace, name: str = "tiny-1") -> ScriptedRun:
    """Let there be a run that trains."""
    one = workspace.add(name, "Running")
    one.set_tag(PROGRESS_TAG, STEP_7)
    one.set_tag(HEARD_TAG, Heard(time=NOW.timestamp()))
    return one


def test_nothing_is_known_before_the_first_look_and_all_of_it_after(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        running(workspace)
        ref = workspace.ref("tiny-1")
        async with started(workspace) as process:
            with pytest.raises(TransientError, match="not observed in Azure ML yet"):
                process.looks.observe(ref)
            found = await process.observe(ref, 1.0)
            assert (found.phase, found.nodes_ready) == (P.RUNNING, 2)
            assert found.checkpoints == "azureml://datastores/d/paths/c"
            assert set(process.lent.woken) == {ref.job}

    run(work())


def test_an_attempt_that_waits_is_looked_at_every_15_seconds(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        workspace.add("tiny-1", "Queued")
        async with started(workspace) as process:
            found = await process.observe(workspace.ref("tiny-1"), 600.5)
            assert found.obstacle is not None
            assert found.obstacle.effect is Effect.QUEUED
        assert workspace.times() == [15.0 * number for number in range(41)]

    run(work())


def test_an_attempt_that_runs_is_looked_at_every_30_seconds_and_mostly_through_mlflow(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        running(workspace)
        async with started(workspace) as process:
            found = await process.observe(workspace.ref("tiny-1"), 600.5)
            assert found.progress == STEP_7
        assert workspace.times() == [0.0] + [30.0 * number for number in range(21)]
        assert workspace.times("job") == [0.0, 120.0, 270.0, 420.0, 570.0]

    run(work())


def test_a_new_process_knows_at_once_whether_the_reporter_listens(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        running(workspace)
        async with started(workspace) as process:
            found = await process.observe(workspace.ref("tiny-1"), 1.0)
            assert found.progress == STEP_7
            newest = process.looks.newest(workspace.ref("tiny-1"))
            assert newest is not None
            assert newest.is_listening
        assert [kind for _, kind in workspace.requests] == ["job", "mlflow"]

    run(work())


def test_what_submit_was_told_saves_the_first_look(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        one, ref = workspace.add("tiny-1", "Starting"), workspace.ref("tiny-1")
        async with started(workspace) as process:
            process.looks.note(one.job)
            assert (await process.observe(ref, 1.0)).phase is P.PENDING
            assert not workspace.requests
            one.set_state("Running")
            process.looks.note(one.job)
            assert (await process.observe(ref, 1.0)).phase is P.RUNNING
            assert not workspace.requests

    run(work())


def test_a_job_is_woken_by_what_has_changed_and_by_nothing_else(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 61.0)  # the job's tags may lack what the run's have
            process.lent.woken.clear()
            for seconds in (15, 30, 45):
                one.set_tag(HEARD_TAG, Heard(time=NOW.timestamp() + seconds))
                await process.observe(ref, 60.0)
            assert process.lent.woken == []
            one.set_tag(PROGRESS_TAG, STEP_7.model_copy(update={"step": 8}))
            found = await process.observe(ref, 60.0)
            assert process.lent.woken == [ref.job]
            assert found.progress is not None
            assert found.progress.step == 8

    run(work())


def test_an_end_is_seen_at_the_next_look_with_its_last_words_and_then_no_more_is_asked(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            one.set_state("Completed")
            done = words(ExitCode.DONE, FailureClass.COMPLETED, "done")
            one.logs[STD] = done.model_dump_json(by_alias=True).encode()
            found = await process.observe(ref, 30.0)
            assert (found.phase, found.all_gone, found.termination) == (P.SUCCEEDED, True, done)
            kinds = [kind for _, kind in workspace.requests]
            assert kinds == ["job", "mlflow", "mlflow", "job", "details", "log"]
            await process.observe(ref, 3600.0)
            assert len(workspace.requests) == 6

    run(work())


@pytest.mark.parametrize("waits", ["for its first turn", "to hear of the reporter", "after a miss"])
def test_an_end_that_a_stop_has_seen_is_told_with_its_last_words(waits: str) -> None:
    class Slow(ScriptedWorkspace):
        async def job(self, name: str, priority: Priority = Priority.READ) -> RawJob | None:
            if priority is Priority.READ and waits == "for its first turn":
                await asyncio.sleep(3600.0)
            return await super().job(name)

        async def get(self, path: str, *args: Any, **named: Any) -> dict[str, Any]:
            if "/mlflow/" in path and waits == "to hear of the reporter":
                await asyncio.sleep(3600.0)
            return await super().get(path, *args, **named)

    async def work() -> None:
        slow = Slow()
        one, ref = slow.add("tiny-1", "Running"), slow.ref("tiny-1")
        if waits == "after a miss":
            slow.errors["*"] = TransientError("not now")
        async with started(slow) as process:
            with suppress(TransientError):
                await process.observe(ref, 2.0)
            slow.errors.clear()
            assert process.looks.newest(ref) is None
            failed = words(ExitCode.DATA, FailureClass.DATA_ERROR, "no text", progress=STEP_7)
            one.logs[STD] = failed.model_dump_json(by_alias=True, exclude_none=True).encode()
            one.set_state("Failed")
            process.looks.use_early_view(ref, await poll_now(slow, ref, now()))
            process.looks.note_stop(ref, UNTIL)
            stopped = process.looks.newest(ref)
            assert stopped is not None
            assert stopped.is_finished  # so that no stop asks again
            found = await process.observe(ref, 1.0)
            assert (found.all_gone, found.progress) == (True, STEP_7)
            assert found.termination == failed
            assert process.lent.woken[-1] == ref.job
            before = len(slow.requests)
            await process.observe(ref, 7200.0)
            assert len(slow.requests) == before

    run(work())


def test_an_end_that_a_stop_has_seen_is_an_end_though_it_cannot_be_explained(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        workspace.add("tiny-1", "Completed")
        ref = workspace.ref("tiny-1")
        workspace.errors["details"] = TransientError("not now")
        async with started(workspace) as process:
            process.looks.use_early_view(ref, await poll_now(workspace, ref, now()))
            with pytest.raises(TransientError, match="not now"):
                await process.observe(ref, 50.0)
            assert (await process.observe(ref, 60.0)).phase is P.SUCCEEDED
            assert len(workspace.times("job")) == 1

    run(work())


def test_the_same_run_queued_again_is_a_disruption(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            one.set_state("Queued")
            found = await process.observe(ref, 30.0)
            assert (found.phase, found.disruptions, found.nodes_ready) == (P.PENDING, 1, 0)

    run(work())


def test_a_stop_is_looked_at_every_5_seconds_and_for_a_while_only(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        running(workspace)
        ref = workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            process.looks.note_stop(ref, UNTIL)
            await process.observe(ref, 60.5)
            assert workspace.times()[2:] == [6.0 + 5.0 * number for number in range(12)]
            await process.observe(ref, 600.0)
            late = [one for one in workspace.times() if one > 370.0]
            assert min(b - a for a, b in pairwise(late)) >= 30.0

    run(work())


@pytest.mark.parametrize("is_same_process", [True, False])
def test_a_run_that_we_have_stopped_was_not_cancelled_in_studio_says_any_process(
    workspace: ScriptedWorkspace, is_same_process: bool
) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            process.looks.note_stop(ref, UNTIL)
            if not is_same_process:
                one.set_tag(STOP_TAG, StopRequest(until=UNTIL))
                await process.looks.close()
            one.set_state("Canceled")
            if is_same_process:
                assert (await process.observe(ref, 10.0)).failure_class is FailureClass.PREEMPTED
        async with started(workspace) as process:
            found = await process.observe(ref, 1.0)
            expected = FailureClass.DO_NOT_RESTART if is_same_process else FailureClass.PREEMPTED
            assert found.failure_class is expected

    run(work())


def test_silence_is_told_once_to_the_jobs_of_its_workspace_alone_and_taken_back(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        other = ScriptedWorkspace("/subscriptions/s/other/workspaces/w2")
        running(workspace)
        workspace.add("tiny-2", "Queued")
        running(other, "tiny-3")
        refs = [workspace.ref("tiny-1"), workspace.ref("tiny-2"), other.ref("tiny-3")]
        async with started(workspace, other) as process:
            for ref in refs:
                await process.observe(ref)
            await asyncio.sleep(31.0)
            process.lent.woken.clear()
            workspace.errors["*"] = TransientError("Azure ML does not respond (timeout)")
            await asyncio.sleep(SILENCE_SECONDS - 2.0)
            assert process.lent.woken == []
            await asyncio.sleep(600.0)
            assert sorted(process.lent.woken) == [refs[0].job, refs[1].job]
            for ref in refs[:2]:
                found = process.looks.observe(ref)
                assert found.obstacle is not None
                assert found.obstacle.reason == "ServiceSilent"
                assert found.obstacle.message.startswith("Azure ML does not respond (timeout); ")
                assert found.obstacle.effect is Effect.DELAYED
            assert process.looks.observe(refs[2]).obstacle is None
            workspace.errors.clear()
            await asyncio.sleep(60.0)
            assert sorted(process.lent.woken[2:]) == [refs[0].job, refs[1].job]
            assert process.looks.observe(refs[0]).obstacle is None

    run(work())


def test_silence_about_one_attempt_is_told_though_others_are_heard(
    workspace: ScriptedWorkspace,
) -> None:
    class Partly(ScriptedWorkspace):
        async def job(self, name: str, *args: object) -> object:  # type: ignore[override]
            if name == "tiny-2":
                raise TransientError("Azure ML reports: 500")
            return await super().job(name)

    async def work() -> None:
        partly = Partly()
        running(partly)
        two = partly.add("tiny-2", "Queued")
        ref = partly.ref("tiny-2")
        async with started(partly) as process:
            process.looks.note(two.job)
            await process.observe(partly.ref("tiny-1"))
            await process.observe(ref, 300.0)
            told = process.lent.woken.count(ref.job)
            found = await process.observe(ref, 600.0)
            assert found.obstacle is not None
            assert found.obstacle.reason == "ServiceSilent"
            assert process.lent.woken.count(ref.job) == told == 2
            assert process.looks.observe(partly.ref("tiny-1")).obstacle is None

    run(work())


def test_a_service_that_asks_to_wait_is_left_alone_for_so_long(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        workspace.add("tiny-1", "Queued")
        workspace.errors["*"] = TransientError("Azure ML reports: too many requests", 120.0)
        async with started(workspace) as process:
            with pytest.raises(TransientError, match="too many requests"):
                await process.observe(workspace.ref("tiny-1"), 300.0)
        assert workspace.times() == [0.0, 120.0, 240.0]

    run(work())


def test_what_is_refused_stalls_its_job_until_somebody_has_mended_it(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        workspace.add("tiny-1", "Queued")
        ref = workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            workspace.errors["job"] = refused()
            found = await process.observe(ref, 30.0)
            assert found.obstacle is not None
            assert (found.obstacle.reason, found.obstacle.effect) == ("NotSeen", Effect.STALLED)
            assert "it is forbidden" in found.obstacle.message
            assert found.phase is P.PENDING
        async with started(workspace) as process:
            with pytest.raises(BackendError, match="it is forbidden"):
                await process.observe(ref, 1.0)
            workspace.errors.clear()
            assert (await process.observe(ref, 60.0)).obstacle is not None

    run(work())


def test_a_silence_of_the_workspace_hides_no_refusal() -> None:
    class Partly(ScriptedWorkspace):
        async def job(self, name: str, *args: object) -> object:  # type: ignore[override]
            if name == "tiny-2" and self.requests:
                raise refused()
            return await super().job(name)

    async def work() -> None:
        partly = Partly()
        running(partly)
        partly.add("tiny-2", "Queued")
        one, two = partly.ref("tiny-1"), partly.ref("tiny-2")
        async with started(partly) as process:
            process.looks.note(partly.runs["tiny-2"].job)
            await process.observe(one)
            await process.observe(two, 20.0)
            process.lent.woken.clear()
            partly.errors["*"] = TransientError("Azure ML does not respond")
            found = await process.observe(one, 120.0)
            assert found.obstacle is not None
            assert found.obstacle.reason == "ServiceSilent"
            partly.errors.clear()
            assert (await process.observe(one, 60.0)).obstacle is None
            found = process.looks.observe(two)
            assert found.obstacle is not None
            assert found.obstacle.reason == "NotSeen"
            assert two.job not in process.lent.woken

    run(work())


@pytest.mark.parametrize("is_other_over", [True, False])
def test_a_silence_is_forgotten_where_nobody_is_looked_at_any_more(
    workspace: ScriptedWorkspace, is_other_over: bool
) -> None:
    async def work() -> None:
        running(workspace)
        workspace.add("tiny-2", "Canceled")
        mine, later = workspace.ref("tiny-1"), workspace.ref("tiny-3", "uid-3")
        async with started(workspace) as process:
            if is_other_over:
                await process.observe(workspace.ref("tiny-2", "uid-2"), 1.0)
            await process.observe(mine, 1.0)
            workspace.errors["*"] = TransientError("Azure ML does not respond")
            await process.observe(mine, 35.0)
            process.looks.forget("uid-1")
            await asyncio.sleep(3600.0)
            process.looks.use_early_view(later, look("Queued"))
            found = await process.observe(later, 1.0)
            assert found.obstacle is not None
            assert found.obstacle.reason == "Queued"

    run(work())


def test_a_fault_of_ours_does_not_end_the_looks(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        workspace.add("tiny-1", "Queued")
        ref = workspace.ref("tiny-1")
        async with started(workspace) as process:
            await process.observe(ref, 1.0)
            workspace.errors["job"] = KeyError("api")
            found = await process.observe(ref, 30.0)
            assert found.obstacle is not None
            assert found.obstacle.reason == "NotSeen"
            workspace.errors.clear()
            found = await process.observe(ref, 60.0)
            assert found.obstacle is not None
            assert found.obstacle.reason == "Queued"

    run(work())


def test_where_mlflow_refuses_the_state_is_seen_and_a_warning_says_so(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        workspace.errors["mlflow"] = refused()
        async with started(workspace) as process:
            found = await process.observe(ref, 600.0)
            assert (found.phase, found.obstacle) == (P.RUNNING, None)
            assert found.warning == "its progress cannot be read: it is forbidden"
            assert len(workspace.times("job")) <= 600 / 30 + 1
            assert len(workspace.times("mlflow")) <= 600 / 150 + 1
            one.set_state("Failed")
            assert (await process.observe(ref, 30.0)).all_gone
            workspace.errors.clear()

    run(work())


@pytest.mark.parametrize("num_missing", [1, 2])
def test_a_job_is_gone_when_it_was_not_found_twice(
    workspace: ScriptedWorkspace, num_missing: int
) -> None:
    class Late(ScriptedWorkspace):
        async def job(self, name: str, *args: object) -> object:  # type: ignore[override]
            found = await super().job(name)
            return found if len(self.requests) > num_missing else None

    async def work() -> None:
        late = Late()
        late.add("tiny-1", "Queued")
        ref = late.ref("tiny-1")
        async with started(late) as process:
            with pytest.raises(TransientError):
                await process.observe(ref, 1.0)
            found = await process.observe(ref, 10.0)
            is_gone = num_missing == 2
            assert (found.phase, found.all_gone) == (P.UNKNOWN if is_gone else P.PENDING, is_gone)

    run(work())


@pytest.mark.parametrize("error", [TransientError("not now"), refused()])
@pytest.mark.parametrize("kind", ["details", "log"])
def test_an_end_that_cannot_be_explained_for_a_minute_is_an_end_all_the_same(
    workspace: ScriptedWorkspace, kind: str, error: BackendError
) -> None:
    async def work() -> None:
        one, ref = running(workspace), workspace.ref("tiny-1")
        one.logs[STD] = b"x"
        async with started(workspace) as process:
            await process.observe(ref, 31.0)
            one.set_state("Failed")
            workspace.errors[kind] = error
            assert not (await process.observe(ref, 80.0)).all_gone
            found = await process.observe(ref, 60.0)
            assert (found.all_gone, found.failure_class) == (True, FailureClass.UNKNOWN)
            assert found.progress == STEP_7

    run(work())


def test_what_is_forgotten_or_closed_is_asked_about_no_more(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        for name in ("tiny-1", "tiny-2"):
            running(workspace, name)
        mine, others = workspace.ref("tiny-1"), workspace.ref("tiny-2", "uid-2")
        async with started(workspace) as process:
            for ref in (mine, others):
                await process.observe(ref, 1.0)
            process.looks.note(workspace.add("tiny-9", "Queued").job)
            process.looks.forget("uid-1")
            before = len(workspace.requests)
            await process.observe(others, 300.5)
            assert len(workspace.requests) - before == 10
            await process.looks.close()
            await asyncio.sleep(300.0)
            assert len(workspace.requests) - before == 10
            assert process.looks.newest(mine) is None
            with pytest.raises(TransientError):
                process.looks.observe(others)

    run(work())


def test_azure_ignores_case_and_so_do_names(workspace: ScriptedWorkspace) -> None:
    async def work() -> None:
        one = workspace.add("tiny-1", "Preparing")
        async with started(workspace) as process:
            ref = workspace.ref("tiny-1")
            process.looks.note(RawJob(one.job.id.upper(), one.job.name, "Preparing", one.job.tags))
            assert (await process.observe(ref, 1.0)).phase is P.PENDING
            assert not workspace.requests

    run(work())


def test_looks_of_many_are_spread_by_up_to_a_tenth_and_never_too_early(
    workspace: ScriptedWorkspace,
) -> None:
    async def work() -> None:
        running(workspace)
        process = Process(workspace)
        process.looks = Poller(lambda ref: workspace, now, jitter=lambda: 1.0)
        process.looks.start(process.lent)
        await process.observe(workspace.ref("tiny-1"), 100.0)
        await process.looks.close()
        assert workspace.times() == [0.0, 0.0, 33.0, 66.0, 99.0]

    run(work())
