"""A job ends with its trainers, although other containers of its pods still run."""

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import pytest

from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import InvalidError
from finetune_operator.kube.resources import JOBS, Object, Resource
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import Crash
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld, look_for

TRAINS = Progress(phase=Phase.TRAINING, step=7, total_steps=10)
ARTIFACTS = ("/mnt/models/tiny/adapter",)
DONE = Termination(
    failure_class=FailureClass.COMPLETED, exit_code=0, message="trained", artifacts=ARTIFACTS
).to_json()
DATA = Termination(
    failure_class=FailureClass.DATA_ERROR, exit_code=65, message="row 3 has no messages"
).to_json()
ALL = tuple(range(NODES))
PATIENCE = 30
REQUESTS = ("get", "create", "patch", "delete")


def live(life: Callable[[KubernetesWorld], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with ProgressServer(TRAINS).serving(ADDRESS) as page:
            await life(KubernetesWorld(page.port))

    run(work())


async def first_trains(world: KubernetesWorld) -> None:
    await world.apply()
    await world.settle()
    await world.make_pods(1)
    await world.run_pods(1, *ALL)
    await look_for(world, 3)
    assert phase(world) == "Running"


def phase(world: KubernetesWorld) -> str:
    return str(world.job["status"]["phase"])


def batch_job(world: KubernetesWorld) -> Object:
    (found,) = world.api.objects(JOBS)
    return found


def is_before_1_31(world: KubernetesWorld) -> None:
    """Refuse the condition as Kubernetes 1.30 does."""
    patch = world.api.patch

    async def refuse(
        resource: Resource, name: str, namespace: str | None, change: Mapping[str, Any], **how: Any
    ) -> Object:
        conditions = change.get("status", {}).get("conditions", ())
        if any(one["type"] == "SuccessCriteriaMet" for one in conditions):
            text = "cannot set SuccessCriteriaMet=True for Job without SuccessPolicy"
            raise InvalidError(422, "Invalid", text)
        return await patch(resource, name, namespace, change, **how)

    world.api.patch = refuse  # type: ignore[method-assign, assignment]


def test_a_completed_job_ends_after_30_s_although_a_sidecar_never_does() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_trains(world)
        await world.end_trainers(1, *ALL, code=0, words=DONE)
        writes = world.writes_but_events
        await look_for(world, PATIENCE - 1)
        assert (phase(world), world.writes_but_events) == ("Running", writes)
        await look_for(world, 5)
        ready = world.condition("Ready")
        assert (phase(world), ready["status"], ready["reason"]) == ("Running", "True", "Completing")
        assert ready["message"] == (
            "attempt 1 has completed; container proxy of pod tiny-1-0, container proxy of pod "
            "tiny-1-1 have not ended with the trainers, and the operator ends the pods"
        )
        annotations = batch_job(world)["metadata"]["annotations"]
        assert annotations["finetune.dev/last-lines"].startswith("the last lines of pod tiny-1-0")
        await world.control(1)
        assert batch_job(world)["status"]["conditions"][-1]["type"] == "Complete"
        await look_for(world, 3)
        assert phase(world) == "Succeeded"
        assert world.job["status"]["artifacts"] == ["pvc://models/tiny/adapter"]
        assert world.condition("Complete")["message"] == "trained"

    live(life)


def test_a_pod_that_ends_a_second_after_its_trainer_costs_no_write() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_trains(world)
        before, writes = world.job["status"], world.writes_but_events
        await world.end_trainers(1, 0, code=0, words=DONE)
        await look_for(world, 1)
        await world.end_trainers(1, *ALL, code=0, words=DONE)
        await look_for(world, 1)
        assert (world.job["status"], world.writes_but_events) == (before, writes)
        await world.end_pods(1, *ALL, code=0, words=DONE)
        await look_for(world, 1)
        assert phase(world) == "Succeeded"

    live(life)


@pytest.mark.parametrize("patience", [0, PATIENCE], ids=["another trainer runs", "only sidecars"])
def test_a_failed_attempt_is_ended_at_once_only_beside_another_trainer(patience: int) -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_trains(world)
        await world.end_trainers(1, *(ALL if patience else (0,)), code=65, words=DATA)
        if patience:
            await look_for(world, patience - 1)
            assert "activeDeadlineSeconds" not in batch_job(world)["spec"]
        await look_for(world, 3)
        assert batch_job(world)["spec"]["activeDeadlineSeconds"] == 1
        assert ("container proxy" in world.condition("Ready")["message"]) == bool(patience)
        await world.control(1)
        await look_for(world, 3)
        failed = world.condition("Failed")
        assert (failed["status"], failed["reason"]) == ("True", "DataError")
        assert failed["message"] == "row 3 has no messages"

    live(life)


def test_a_completed_attempt_whose_batch_job_is_suspended_is_recorded_at_once() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_trains(world)
        await world.end_trainers(1, *ALL, code=0, words=DONE)
        await world.suspend(1)
        await look_for(world, 3)
        await world.control(1)
        world.start_process()
        await look_for(world, 3)
        assert (phase(world), world.attempts) == ("Succeeded", ["tiny-1"])

    live(life)


async def complete_with_a_crash(world: KubernetesWorld, number: int) -> int:
    """Complete beside a sidecar, with a crash before that request; return the requests sent.

    Before the next operator starts, the Job controller has acted on the last request.
    """
    await first_trains(world)
    await world.end_trainers(1, *ALL, code=0, words=DONE)
    requests = 0

    def count(verb: str, resource: Resource, name: str) -> None:
        nonlocal requests
        requests += verb in REQUESTS
        if requests == number and verb in REQUESTS:
            raise Crash

    for _ in range(2 * PATIENCE + 20):
        world.api.before = count
        try:
            with suppress(FineTuneError):
                await look_for(world, 1)
        except Crash:
            world.start_process()
        world.api.before = lambda verb, resource, name: None
        await world.control(1)
    return requests


@pytest.mark.parametrize("is_old", [False, True], ids=["newest", "before 1.31"])
def test_a_completed_job_is_never_trained_again_whenever_the_operator_is_killed(
    is_old: bool,
) -> None:
    def complete(number: int) -> int:
        requests = 0

        async def life(world: KubernetesWorld) -> None:
            nonlocal requests
            if is_old:
                is_before_1_31(world)
            requests = await complete_with_a_crash(world, number)
            assert phase(world) == "Succeeded", number
            assert world.job["status"]["artifacts"] == ["pvc://models/tiny/adapter"]
            assert (world.attempts, world.most_alive) == (["tiny-1"], 1)

        live(life)
        return requests

    for number in range(1, complete(0) + 1):
        complete(number)
