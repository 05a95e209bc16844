"""What the operator cannot look at any more: told with what to do, taken up once it is mended."""

from datetime import timedelta

import pytest

from finetune_operator.backends.kubernetes.child_names import FACTS_ANNOTATION
from finetune_operator.errors import BackendError, TransientError
from finetune_operator.kube.resources import EVENTS, FINE_TUNE_JOBS, JOBS
from support.kernel.fake_backend import FakeBackend
from support.kernel.kernel_world import KEY, POINTS, World
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import KubernetesWorld

NO_PLUGIN = [point for point in POINTS if point.name != "fake"]
UNKNOWN = (
    "spec.backend.type fake is not installed (available: azureml, configmap, kubernetes, local)"
)


def reasons(world: World) -> list[str]:
    return [one["reason"] for one in world.api.objects(EVENTS) if one["type"] == "Warning"]


def test_a_deleted_job_whose_plugin_is_gone_says_why_it_stays_and_goes_once_it_is_back() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.settle()
        world.start_process(NO_PLUGIN)
        await world.api.delete(FINE_TUNE_JOBS, "tiny", "ns")
        look = await world.settle()
        assert look.requeue_seconds == 30
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendNotFound")
        assert stalled["message"].startswith(UNKNOWN)
        assert (
            "; the job stays until its attempt has ended. Fix that, or make sure that no part of "
            "the attempt runs, and then remove the finalizer finetune.dev/backend; attempt 1 is "
            "left alone"
        ) in stalled["message"]
        assert reasons(world) == ["BackendNotFound"]
        world.start_process()
        await world.settle()
        assert world.api.objects(FINE_TUNE_JOBS) == []

    run(work())


def test_a_job_that_runs_and_whose_plugin_is_gone_says_so_and_stays_as_it_was_seen() -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.settle()
        before = world.job["status"]
        world.start_process(NO_PLUGIN)
        await world.settle()
        world.now += timedelta(hours=2)
        await world.settle()
        after = world.job["status"]
        assert world.condition("Stalled")["message"].startswith(UNKNOWN)
        for field in ("phase", "attempt", "attempts", "backendRef"):
            assert after.get(field) == before.get(field)

    run(work())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(BackendError("the login has ended; renew it"), "the login", id="told"),
        pytest.param(
            RuntimeError("a fault"), "spec.backend.type fake failed (RuntimeError", id="a fault"
        ),
    ],
)
def test_an_attempt_that_cannot_be_looked_at_is_told_and_looked_at_once_it_can(
    error: Exception, said: str
) -> None:
    async def work() -> None:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.settle()
        fake = world.backends.get("fake").backend
        assert isinstance(fake, FakeBackend)
        fake.errors["observe"] = [error] * 9  # type: ignore[list-item]  # ... it may be any
        world.now += timedelta(minutes=1)
        await world.catch_up()
        assert (await world.reconciler.reconcile(KEY)).requeue_seconds == 30
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
        assert stalled["message"].startswith(said)
        fake.errors["observe"] = []
        await world.settle()
        assert world.condition("Stalled")["status"] == "False"
        assert world.job["status"]["attempt"] == 1

    run(work())


def test_a_service_that_does_not_answer_is_asked_less_and_less_often() -> None:
    async def work() -> list[float]:
        world = World()
        await world.apply(backend={"type": "fake"})
        await world.settle()
        fake = world.backends.get("fake").backend
        assert isinstance(fake, FakeBackend)
        fake.errors["observe"] = [TransientError("no answer")] * 40
        waits = []
        for _ in range(20):
            await world.catch_up()
            wait = (await world.reconciler.reconcile(KEY)).requeue_seconds
            assert wait is not None
            waits.append(wait)
            world.now += timedelta(seconds=wait)
        fake.errors["observe"] = [TransientError("too many requests", retry_after=90)]
        throttled = (await world.reconciler.reconcile(KEY)).requeue_seconds
        assert throttled is not None
        return [*waits, throttled]

    *waits, throttled = run(work())
    assert waits[:5] == [1.0] * 5, "what may pass is over within seconds"
    assert all(15 <= wait <= 30 for wait in waits[10:])
    assert throttled == 90


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param(None, "is missing", id="gone"),
        pytest.param("{", "cannot be read ({)", id="changed"),
    ],
)
def test_facts_that_somebody_took_from_a_batch_job_are_told_with_what_to_do(
    text: str | None, what: str
) -> None:
    async def work() -> None:
        world = KubernetesWorld(9400)
        await world.apply()
        await world.settle()
        before = world.api.objects(JOBS)[0]["metadata"]["annotations"][FACTS_ANNOTATION]
        change = {"metadata": {"annotations": {FACTS_ANNOTATION: text}}}
        await world.api.patch(JOBS, "tiny-1", "ns", change)
        await world.settle()
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "BackendFailed")
        assert stalled["message"].startswith(
            f"the annotation finetune.dev/attempt-facts of Job ns/tiny-1 {what}; restore it, or "
            "delete that Job: the next attempt resumes from the last checkpoint"
        )
        back = {"metadata": {"annotations": {FACTS_ANNOTATION: before}}}
        await world.api.patch(JOBS, "tiny-1", "ns", back)
        await world.settle()
        assert world.condition("Stalled")["status"] == "False"
        assert world.attempts == ["tiny-1"]

    run(work())
