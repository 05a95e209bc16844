"""Any order of events, with crashes between any two effects: the job converges, and never doubles.

The machine runs the real `drive`, one round at a time, against `FakeBackend`, and kills it before
or after any save, submit or cancel. What was saved last is all that a new round knows.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from builders import job
from decisions import START, lives, running
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Handle, Observation, Request
from finetune_operator.backends.fake import RUNNING, FakeBackend, FakeRun, ended
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.planner.plan import make_plan
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import is_settled
from finetune_operator.reconcile.decide import decide
from finetune_operator.reconcile.drive import StopRequest, drive
from finetune_trainer.config import FailureClass

MAX_RESTARTS = 3
CLASSES = {
    0: FailureClass.COMPLETED,
    1: FailureClass.ERROR,
    65: FailureClass.DATA_ERROR,
    75: FailureClass.PREEMPTED,
    137: FailureClass.WORKER_LOST,
}


class Crash(BaseException):
    """The process is gone; nothing may catch it."""


class PauseError(Exception):
    """The end of one round."""


class Fuse:
    """Counts effects and ends the process at one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def burn(self) -> None:
        """Called before and after each effect."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Crash


class MemoryStore(RunFolder):
    """What is saved, in memory."""

    def __init__(self, saved: FineTuneJob, fuse: Fuse) -> None:
        super().__init__(Path("unused"))
        self.saved = saved
        self.history = [saved]
        self._fuse = fuse

    def save(self, job: FineTuneJob) -> None:
        self._fuse.burn()
        self.saved = job
        self.history.append(job)
        self._fuse.burn()


class FragileBackend(FakeBackend):
    """A backend whose caller may be gone before or after each effect."""

    fuse: Fuse

    async def submit(self, request: Request) -> Handle:
        self.fuse.burn()
        handle = await super().submit(request)
        self.fuse.burn()
        return handle

    async def cancel(self, handle: Handle, grace_seconds: float) -> None:
        self.fuse.burn()
        await super().cancel(handle, grace_seconds)
        self.fuse.burn()


class OneRound:
    """A clock that ends the round instead of waiting."""

    def __init__(self, now: datetime) -> None:
        self._now = now

    def now(self) -> datetime:
        return self._now

    async def wait(self, event: asyncio.Event, seconds: float | None) -> None:
        raise PauseError


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()
        self.backend = FragileBackend()
        self.backend.fuse = self.fuse
        self.backend.after_cancel = lives(RUNNING)  # it goes on until the world ends it
        policy = {
            "maxRestarts": MAX_RESTARTS,
            "maxDisruptions": 3,
            "backoff": {"baseSeconds": 5, "maxSeconds": 60},
        }
        made = job(restart_policy=policy, metadata={"uid": "uid-1"})
        self.store = MemoryStore(made, self.fuse)
        self.now = START

    def round(self) -> None:
        clock = OneRound(self.now)
        work = drive(
            self.store.saved,
            self.backend,
            self.store,
            on_change=lambda job, seen: None,
            stop=StopRequest(),
            clock=clock,
        )
        try:
            asyncio.run(work)
        except (PauseError, Crash):
            return
        finally:
            self.fuse.left = None

    @property
    def open_runs(self) -> Sequence[FakeRun]:
        return self.backend.alive

    @rule()
    def look(self) -> None:
        self.round()

    @rule(effect=st.integers(0, 9))
    def crash(self, effect: int) -> None:
        self.fuse.left = effect
        self.round()

    @rule(seconds=st.sampled_from([1, 6, 100]))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @precondition(lambda self: self.open_runs)
    @rule(step=st.integers(0, 5))
    def train(self, step: int) -> None:
        self.open_runs[0].script[:] = [running(step)]

    @precondition(lambda self: self.open_runs)
    @rule(code=st.sampled_from(sorted(CLASSES)), all_gone=st.booleans())
    def end(self, code: int, all_gone: bool) -> None:
        seen = ended(code, CLASSES[code], f"exit code {code}")
        self.open_runs[0].script[:] = [seen if all_gone else lives(seen)]

    @precondition(lambda self: self.open_runs)
    @rule(code=st.sampled_from([75, 137]), times=st.integers(1, 5))
    def lose_several_attempts(self, code: int, times: int) -> None:
        for _ in range(times):
            if self.open_runs:
                self.end(code, all_gone=True)
            self.now += timedelta(seconds=100)
            self.round()
            self.round()

    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        spec = self.store.saved.spec.model_copy(update={"suspend": value})
        self.store.saved = self.store.saved.model_copy(update={"spec": spec})

    @invariant()
    def never_two_attempts_live(self) -> None:
        assert len(self.open_runs) <= 1

    @invariant()
    def attempts_are_numbered_without_gap_and_only_grow(self) -> None:
        numbers = [run.request.attempt for run in self.backend.runs.values()]
        assert numbers == list(range(1, len(numbers) + 1))
        saved = [job.status.attempt for job in self.store.history]
        assert saved == sorted(saved)

    @invariant()
    def restarts_stay_within_their_limits(self) -> None:
        restarts = self.store.saved.status.restarts
        assert restarts.counted <= MAX_RESTARTS
        assert restarts.disruptions <= 3

    @invariant()
    def a_finished_job_is_never_saved_again_and_nothing_of_it_lives(self) -> None:
        phases = [job.status.phase.value for job in self.store.history]
        finished = [phase for phase in phases if phase in ("Succeeded", "Failed")]
        assert finished in ([], [phases[-1]])
        if finished:
            assert not self.open_runs

    @invariant()
    def complete_means_that_the_last_attempt_ended_with_0(self) -> None:
        if self.store.saved.status.phase.value == "Succeeded":
            run = self.backend.run(self.store.saved.status.attempt)
            assert run.script[0] == ended(0, message="exit code 0")

    @invariant()
    def deciding_again_on_the_same_sight_says_the_same(self) -> None:
        job = self.store.saved
        handle = handle_of(job.status)
        if handle is None or is_settled(job.status):
            return
        seen: Observation = asyncio.run(FakeBackend.observe(self.backend, handle))
        plan = make_plan(job)
        once = decide(job, seen, self.now, plan).status
        if once.attempt != job.status.attempt:
            return  # the sight is of the attempt before
        saved = job.model_copy(update={"status": once})
        assert decide(saved, seen, self.now, plan).status == once

    def teardown(self) -> None:
        """Left in peace, every job comes to an end."""
        self.suspend(False)
        for _ in range(30):
            self.round()
            self.now += timedelta(seconds=100)
            for run in self.open_runs:
                run.script[:] = [ended(message="exit code 0")]
            if self.store.saved.status.phase.value in ("Succeeded", "Failed"):
                break
        assert self.store.saved.status.phase.value in ("Succeeded", "Failed")
        self.a_finished_job_is_never_saved_again_and_nothing_of_it_lives()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
