"""What "keeps the contract" means: inherit `BackendContract`, give it a `harness`, run pytest.

A plugin's author does the same with a harness of their own.
"""

import asyncio
import os
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from builders import after, job, ref_to
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import Attempt, AttemptPhase, Backend, Handle, Observation
from finetune_operator.errors import AlreadyOwnedError, NoSuchRankError
from finetune_operator.planner.plan import Plan, make_plan

T = TypeVar("T")
TRIES_SECONDS = 60.0


class Harness(Protocol):
    """How the suite gets at one backend.

    Attributes:
        overrides: What the backend needs in a job, as `builders.job` takes it.
    """

    overrides: Mapping[str, Any]

    def make(self) -> Backend:
        """Return the backend, made anew: what must outlive a restart may not be kept in it."""

    def state(self) -> Any:
        """Return everything the backend has made so far, as a value that can be compared."""


def wait_for(what: Coroutine[Any, Any, T]) -> T:
    """Run one verb to its end."""
    return asyncio.run(what)


def planned(uid: str = "uid-1", **overrides: Any) -> Plan:
    """Return the plan of a job with a uid."""
    made = job(**overrides)
    metadata = made.metadata.model_copy(update={"uid": uid})
    return make_plan(made.model_copy(update={"metadata": metadata}))


def observed_until_gone(backend: Backend, handle: Handle) -> Observation:
    """Observe until no process of the attempt lives."""
    end = time.monotonic() + TRIES_SECONDS
    while time.monotonic() < end:
        seen = wait_for(backend.observe(ref_to(handle)))
        if seen.all_gone:
            return seen
    raise AssertionError(f"still alive after {TRIES_SECONDS} s: {seen}")


def _found(backend: Backend, job: FineTuneJob) -> Handle | None:
    there = wait_for(backend.find(job, Attempt(1)))
    return there.handle if there else None


async def _lines(backend: Backend, handle: Handle, rank: int) -> list[str]:
    return [line async for line in backend.logs(ref_to(handle), rank)]


class BackendContract:
    """The suite; `harness` is a fixture of the class that inherits it."""

    def submit(self, harness: Harness, uid: str = "uid-1") -> tuple[Backend, Handle]:
        backend = harness.make()
        plan = planned(uid, **harness.overrides)
        return backend, wait_for(backend.submit(backend.render(plan, Attempt(1))))

    def test_render_gives_the_same_request_twice_and_makes_nothing(self, harness: Harness) -> None:
        before = harness.state()
        plan = planned(**harness.overrides)
        first = harness.make().render(plan, Attempt(1))
        second = harness.make().render(plan, Attempt(1))
        assert first == second
        assert harness.state() == before

    def test_the_folders_of_a_job_are_named_by_its_fields_and_asking_changes_nothing(
        self, harness: Harness
    ) -> None:
        before, job = harness.state(), planned(**harness.overrides).job
        folders = harness.make().writes(job)
        assert folders == harness.make().writes(job)
        assert harness.state() == before
        spec = job.to_object()
        for one in folders:
            block, field = one.field.removeprefix("spec.").rsplit(".", 1)
            assert one.place
            if block in ("checkpoint", "output"):
                assert spec["spec"][block][field] == one.uri

    def test_requests_of_two_attempts_have_two_names(self, harness: Harness) -> None:
        backend = harness.make()
        plan = planned(**harness.overrides)
        names = {backend.render(plan, Attempt(number)).name for number in (1, 2)}
        assert len(names) == 2

    def test_submitting_twice_adopts_also_after_a_restart(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        again, same = self.submit(harness)
        assert same == handle
        wait_for(again.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)

    def test_an_attempt_is_found_by_its_own_job_alone_and_after_a_restart(
        self, harness: Harness
    ) -> None:
        backend, handle = self.submit(harness)
        again, own = harness.make(), planned(**harness.overrides).job
        another = planned("uid-of-another-job", **harness.overrides).job
        before = harness.state()
        assert _found(again, own) == handle
        assert wait_for(again.find(own, Attempt(2))) is None
        assert wait_for(again.find(another, Attempt(1))) is None
        assert harness.state() == before
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)
        assert _found(again, own) == handle

    def test_an_attempt_that_ended_is_not_started_again(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        ended = observed_until_gone(backend, handle)
        again, same = self.submit(harness)
        assert same == handle
        seen = wait_for(again.observe(ref_to(handle)))
        assert (seen.phase, seen.all_gone) == (ended.phase, True)

    def test_a_foreign_thing_of_the_name_is_refused_and_left_alone(self, harness: Harness) -> None:
        backend, handle = self.submit(harness, "uid-of-another-job")
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)
        before = harness.state()
        with pytest.raises(AlreadyOwnedError, match="uid-of-another-job"):
            self.submit(harness, "uid-1")
        assert harness.state() == before

    def test_observing_takes_no_longer_than_a_look(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        start = time.monotonic()
        seen = wait_for(backend.observe(ref_to(handle)))
        assert time.monotonic() - start < 1.0
        assert not seen.all_gone
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)

    def test_an_unknown_handle_is_unknown_and_can_be_cancelled(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        stranger = replace(handle, uid="uid-9-1")
        assert wait_for(backend.observe(ref_to(stranger))).phase is AttemptPhase.UNKNOWN
        wait_for(backend.cancel(ref_to(stranger), after(0.0)))
        assert list(wait_for(backend.collect(ref_to(stranger)))) == []
        assert not wait_for(backend.observe(ref_to(handle))).all_gone
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)

    def test_cancel_may_be_called_again_and_ends_the_attempt(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        for grace in (5.0, 5.0, 0.0):
            wait_for(backend.cancel(ref_to(handle), after(grace)))
        seen = observed_until_gone(backend, handle)
        assert seen.phase is AttemptPhase.FAILED
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        assert wait_for(backend.observe(ref_to(handle))).phase is AttemptPhase.FAILED

    def test_the_log_of_a_rank_that_does_not_exist_is_a_sentence(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        with pytest.raises(NoSuchRankError, match=r"rank 99 does not exist; .* has "):
            asyncio.run(_lines(backend, handle, 99))
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)

    def test_nothing_is_collected_before_it_exists(self, harness: Harness) -> None:
        backend, handle = self.submit(harness)
        assert list(wait_for(backend.collect(ref_to(handle)))) == []
        wait_for(backend.cancel(ref_to(handle), after(0.0)))
        observed_until_gone(backend, handle)

    def test_validate_opens_no_file(self, harness: Harness, tmp_path: Path) -> None:
        backend = harness.make()
        opened: list[str] = []
        named = job(model={"source": f"file://{tmp_path}/nowhere"})
        _validate_and_note_files(backend, named, opened)
        assert opened == []


def _validate_and_note_files(backend: Backend, named: FineTuneJob, opened: list[str]) -> None:
    """Call `validate` while an audit hook of the interpreter notes each file that is opened."""

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if is_listening and event in ("open", "os.listdir", "os.scandir"):
            opened.append(os.fspath(arguments[0]) if arguments else "")

    is_listening = True
    sys.addaudithook(hear)
    try:
        backend.validate(named)
    finally:
        is_listening = False
