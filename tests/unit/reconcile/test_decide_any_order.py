"""Any order of events, with crashes between any two effects: the job converges, and never doubles.

The machine runs the kernel's reconciler on an API server in memory, one look at a time, against
`FakeBackend`, and kills it before or after any write, submit or cancel. What the API server has is
all that a new process knows.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.base import AttemptRef, BackendContext, Handle, Observation, Request
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.events import EventPoster
from finetune_operator.kernel.reconciler import Reconciler
from finetune_operator.kube.cache import ObjectCache
from finetune_operator.kube.resources import FINE_TUNE_JOBS, Resource
from finetune_operator.planner.plan import make_plan
from finetune_operator.reconcile.attempts import handle_of
from finetune_operator.reconcile.conditions import is_finished, is_settled
from finetune_operator.reconcile.decide import decide
from finetune_trainer.config import FailureClass
from support.api.builders import manifest, ref_to
from support.kernel.fake_api import FakeApi
from support.kernel.fake_backend import RUNNING, FakeBackend, FakeRun, ended
from support.kernel.kernel_world import KEY, WRITES, Crash
from support.reconcile.decisions import START, lives, running

MAX_RESTARTS = 3
CLASSES = {
    0: FailureClass.COMPLETED,
    1: FailureClass.ERROR,
    65: FailureClass.DATA_ERROR,
    75: FailureClass.PREEMPTED,
    137: FailureClass.WORKER_LOST,
}


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


class FragileBackend(FakeBackend):
    """A backend whose caller may be gone before or after each effect."""

    fuse: Fuse

    async def submit(self, request: Request) -> Handle:
        self.fuse.burn()
        handle = await super().submit(request)
        self.fuse.burn()
        return handle

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        self.fuse.burn()
        is_accepted = await super().cancel(ref, until)
        self.fuse.burn()
        return is_accepted


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()
        self.backend = FragileBackend()
        self.backend.fuse = self.fuse
        self.backend.after_cancel = lives(RUNNING)  # it goes on until the world ends it
        self.now = START
        self.api = FakeApi()
        self.api.now = lambda: self.now
        self.history: list[FineTuneJobStatus] = []
        policy = {
            "maxRestarts": MAX_RESTARTS,
            "maxDisruptions": 3,
            "backoff": {"baseSeconds": 5, "maxSeconds": 60},
        }
        hub = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        made = manifest(restart_policy=policy, backend={"type": "fake"}, **hub)
        asyncio.run(self.api.create(FINE_TUNE_JOBS, defaulted(made), KEY.namespace))
        self.api.before, self.api.after = self.before, self.after
        self.start_process()

    def before(self, verb: str, resource: Resource, name: str) -> None:
        if verb in WRITES:
            self.fuse.burn()

    def after(self, verb: str, resource: Resource, name: str) -> None:
        if resource == FINE_TUNE_JOBS:
            self.history.append(self.job.status)
        self.fuse.burn()

    def start_process(self) -> None:
        """Begin with nothing but what the API server knows."""
        self.cache = ObjectCache(FINE_TUNE_JOBS)
        self.reconciler = Reconciler(
            self.api,
            self.cache,
            Backends(BackendContext(Path()), (), {"fake": self.backend}),
            EventPoster(self.api, "test"),
            now=lambda: self.now,
        )

    @property
    def job(self) -> FineTuneJob:
        (made,) = self.api.objects(FINE_TUNE_JOBS)
        return FineTuneJob.model_validate(made)

    async def look_once(self) -> None:
        listing = await self.api.list(FINE_TUNE_JOBS)
        self.cache.replace(listing.items, listing.resource_version)
        await self.reconciler.reconcile(KEY)

    def round(self) -> None:
        try:
            asyncio.run(self.look_once())
        except FineTuneError:
            return  # it is tried again
        except Crash:
            self.start_process()
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
        change = {"spec": {"suspend": value}}
        asyncio.run(self.api.patch(FINE_TUNE_JOBS, KEY.name, KEY.namespace, change))

    @invariant()
    def never_two_attempts_live(self) -> None:
        assert len(self.open_runs) <= 1

    @invariant()
    def attempts_are_numbered_without_gap_and_only_grow(self) -> None:
        numbers = [run.request.attempt for run in self.backend.runs.values()]
        assert numbers == list(range(1, len(numbers) + 1))
        saved = [status.attempt for status in self.history]
        assert saved == sorted(saved)

    @invariant()
    def restarts_stay_within_their_limits(self) -> None:
        restarts = self.job.status.restarts
        assert restarts.counted <= MAX_RESTARTS
        assert restarts.disruptions <= 3

    @invariant()
    def a_finished_job_stays_as_it_ended_and_nothing_of_it_lives(self) -> None:
        ends = [status for status in self.history if is_finished(status)]
        assert ends == self.history[len(self.history) - len(ends) :]
        said = [one.model_copy(update={"observed_generation": 0}) for one in ends]
        assert said == said[:1] * len(said)
        if ends:
            assert not self.open_runs

    @invariant()
    def complete_means_that_the_last_attempt_ended_with_0(self) -> None:
        if self.job.status.phase.value == "Succeeded":
            run = self.backend.run(self.job.status.attempt)
            assert run.script[0] == ended(0, message="exit code 0")

    @invariant()
    def deciding_again_on_the_same_sight_says_the_same(self) -> None:
        job = self.job
        handle = handle_of(job.status)
        if handle is None or is_settled(job.status):
            return
        seen: Observation = asyncio.run(FakeBackend.observe(self.backend, ref_to(handle)))
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
            if self.job.status.phase.value in ("Succeeded", "Failed"):
                break
        assert self.job.status.phase.value in ("Succeeded", "Failed")
        self.a_finished_job_stays_as_it_ended_and_nothing_of_it_lives()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
