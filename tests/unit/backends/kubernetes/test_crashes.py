"""Lives of a job with the kubernetes backend, lived again with a crash or a fault at every write.

Each is compared with the undisturbed life after every chapter: all children whole, and the status.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from finetune_operator.kernel.status_writer import PASSING
from finetune_operator.kube.api_errors import ThrottledError, UnavailableError
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, Object, Resource
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import Crash, at_write, nothing
from support.kubernetes.kubernetes_world import ADDRESS, KubernetesWorld

Chapter = Callable[[KubernetesWorld, ProgressServer], Coroutine[Any, Any, None]]
Fault = Callable[[KubernetesWorld], None]
AT_ONCE = 4


async def _begin(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.apply()


async def _first_has_an_address(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.make_pods(1)
    await world.run_pods(1, 0)


async def _first_runs(world: KubernetesWorld, said: ProgressServer) -> None:
    said.progress = trains(1)
    await world.run_pods(1, 1)


async def _first_loses_a_pod(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.end_pods(1, 1, code=137)


async def _first_is_gone(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.conclude(1, "Failed")


async def _second_runs(world: KubernetesWorld, said: ProgressServer) -> None:
    said.progress = trains(2)
    await world.make_pods(2)
    await world.run_pods(2, 0, 1)


async def _suspend(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.change(suspend=True)


async def _second_is_gone(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.end_pods(2, 0, 1, code=75, words=words(FailureClass.PREEMPTED, 75))
    await world.conclude(2, "Failed")


async def _resume(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.change(suspend=False)


async def _third_runs(world: KubernetesWorld, said: ProgressServer) -> None:
    said.progress = trains(5)
    await world.make_pods(3)
    await world.run_pods(3, 0, 1)


async def _third_fails(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.end_pods(3, 0, 1, code=1)
    await world.conclude(3, "Failed")


async def _fourth_runs(world: KubernetesWorld, said: ProgressServer) -> None:
    said.progress = trains(8)
    await world.make_pods(4)
    await world.run_pods(4, 0, 1)


async def _fourth_completes(world: KubernetesWorld, said: ProgressServer) -> None:
    done = words(FailureClass.COMPLETED, 0, artifacts=("/mnt/models/tiny/adapter",))
    await world.end_pods(4, 0, 1, code=0, words=done)
    await world.conclude(4, "Complete")


async def _begin_in_a_queue(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.apply(queue={"name": "team"}, ttl_seconds_after_finished=60)


async def _first_has_failed(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.conclude(1, "Failed")


async def _second_is_admitted(world: KubernetesWorld, said: ProgressServer) -> None:
    said.progress = trains(2)
    await world.api.patch(JOBS, "tiny-2", "ns", {"spec": {"suspend": False}})
    await world.make_pods(2)
    await world.run_pods(2, 0, 1)


async def _second_completes(world: KubernetesWorld, said: ProgressServer) -> None:
    await world.end_pods(2, 0, 1, code=0, words=words(FailureClass.COMPLETED, 0))
    await world.conclude(2, "Complete")


async def _a_minute_passes(world: KubernetesWorld, said: ProgressServer) -> None:
    """The job's time after its end is over."""


RESTARTED: tuple[Chapter, ...] = (
    _begin,
    _first_has_an_address,
    _first_runs,
    _first_loses_a_pod,
    _first_is_gone,
    _second_runs,
    _suspend,
    _second_is_gone,
    _resume,
    _third_runs,
    _third_fails,
    _fourth_runs,
    _fourth_completes,
)
QUEUED: tuple[Chapter, ...] = (
    _begin_in_a_queue,
    _suspend,
    _first_has_failed,
    _resume,
    _second_is_admitted,
    _second_completes,
    _a_minute_passes,
)
STORIES = {"restarted": RESTARTED, "queued": QUEUED}


def trains(step: int) -> Progress:
    return Progress(phase=Phase.TRAINING, step=step, total_steps=10)


def words(failure: FailureClass, code: int, **fields: Any) -> str:
    said = Termination(failure_class=failure, exit_code=code, message="it ended", **fields)
    return said.to_json()


@dataclass
class Telling:
    """What a telling of the story came to.

    Attributes:
        seen: Children and status after each chapter.
        writes: What the operator wrote, in order.
        most_alive: Most attempts that lived at one time.
    """

    seen: list[dict[str, Any]] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    most_alive: int = 0


async def tell(world: KubernetesWorld, said: ProgressServer, story: Sequence[Chapter]) -> Telling:
    """Play the whole story; a minute passes with each chapter."""
    telling = Telling()
    count = world.api.after

    def note(verb: str, resource: Resource, name: str) -> None:
        telling.writes.append(f"{verb} {resource.plural}/{name}")
        count(verb, resource, name)

    world.api.after = note
    for chapter in story:
        before, after = world.api.before, world.api.after
        world.api.before = world.api.after = nothing
        await chapter(world, said)
        world.api.before, world.api.after = before, after
        world.now += timedelta(minutes=1)
        await settle(world, said)
        telling.seen.append({**world.children(), "status": status(world)})
    telling.most_alive = world.most_alive
    return telling


async def settle(world: KubernetesWorld, said: ProgressServer) -> None:
    """Reconcile until nothing changes, also when a pod has been asked how far it is.

    On a busy machine an answer may be so late that the operator takes the pod for silent.
    """
    async with asyncio.timeout(60):
        while True:
            asked = said.asked
            look = await world.settle()
            is_soon = look.requeue_seconds is not None and look.requeue_seconds <= SOON_SECONDS
            for _ in range(3):  # until a request that was sent has arrived
                await asyncio.sleep(0.005)
            if not is_soon and not said.unread and said.asked == asked:
                return


def status(world: KubernetesWorld) -> Object:
    """Return the status without what may be written later.

    That is the handle, the ledger, how many nodes run, and the wording of a start without obstacle.
    """
    later = ("backendRef", "ledger")
    for job in world.api.objects(FINE_TUNE_JOBS):
        found: Object = {key: one for key, one in job["status"].items() if key not in later}
        for attempt in found.get("attempts", ()):
            if "digest" in attempt:
                attempt["digest"] = "of a text with uids in it"
        for condition in found.get("conditions", ()):
            if condition["reason"] in PASSING:
                condition["message"] = ""
        return {**found, "nodes": {**found.get("nodes", {}), "ready": 0}}
    return {}


async def live(story: Sequence[Chapter], disturb: Fault = lambda world: None) -> Telling:
    async with ProgressServer(trains(0)).serving(ADDRESS) as said:
        world = KubernetesWorld(said.port)
        disturb(world)
        return await tell(world, said, story)


async def live_all(story: Sequence[Chapter], faults: Sequence[Fault]) -> list[Telling]:
    """Play the story once with each fault, a few at a time, because a life mostly waits."""
    free = asyncio.Semaphore(AT_ONCE)

    async def live_one(fault: Fault) -> Telling:
        async with free:
            return await live(story, fault)

    async with asyncio.TaskGroup() as group:
        lives = [group.create_task(live_one(fault)) for fault in faults]
    return [life.result() for life in lives]


SOON_SECONDS = 1.0
"""So soon is looked again at what was not answered, and at a pod that was asked just now."""
AWAY = UnavailableError(0, "Timeout", "no answer in time")
BUSY = ThrottledError(429, "TooManyRequests", "later", 1.0)
WRITTEN = {
    "create networkpolicies/tiny-finetune",
    "create services/tiny-finetune",
    "create jobs/tiny-1",
    "create endpointslices/tiny-finetune",
    "patch endpointslices/tiny-finetune",
    "patch jobs/tiny-1",
    "delete pods/tiny-1-0",
    "delete jobs/tiny-1",
    "delete jobs/tiny-2",
    "patch finetunejobs/tiny",
}


@pytest.fixture(scope="module")
def undisturbed() -> Mapping[str, Telling]:
    return {name: asyncio.run(live(story)) for name, story in STORIES.items()}


def test_the_undisturbed_lives_end_well_and_make_every_kind_of_write(
    undisturbed: Mapping[str, Telling],
) -> None:
    restarted, queued = undisturbed["restarted"], undisturbed["queued"]
    assert restarted.seen[-1]["status"]["phase"] == "Succeeded"
    assert restarted.seen[-1]["status"]["artifacts"] == ["pvc://models/tiny/adapter"]
    assert set(restarted.writes) >= WRITTEN
    cancelled = json.loads(restarted.seen[3]["Job tiny-1"])
    tail = cancelled["metadata"]["annotations"]["finetune.dev/last-lines"]
    assert tail.endswith("\nHF_TOKEN=…\nCUDA error")
    assert cancelled["spec"]["activeDeadlineSeconds"] == 1
    assert [one["status"]["phase"] for one in queued.seen[1:3]] == ["Suspending", "Suspended"]
    given_up, _ = json.loads(queued.seen[2]["Job tiny-1"])["status"]["conditions"]
    assert (given_up["type"], given_up["reason"]) == ("FailureTarget", "GivenUp")
    assert queued.seen[-2]["status"]["phase"] == "Succeeded"
    assert queued.writes[-1] == "delete finetunejobs/tiny"
    assert queued.seen[-1] == {"status": {}}
    assert restarted.most_alive == queued.most_alive == 1


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize(
    ("error", "is_done"),
    [
        pytest.param(Crash(), False, id="crash before the write"),
        pytest.param(Crash(), True, id="crash after the write"),
        pytest.param(AWAY, True, id="done, and no answer"),
        pytest.param(BUSY, False, id="refused for now"),
    ],
)
def test_a_fault_at_any_write_leaves_the_children_and_the_status_of_an_undisturbed_life(
    name: str, error: BaseException, is_done: bool, undisturbed: Mapping[str, Telling]
) -> None:
    story, model = STORIES[name], undisturbed[name]
    # Without Events: a status reports the same, and an Event is not repeated.
    writes = {n: w for n, w in enumerate(model.writes, 1) if not w.startswith("create events/")}
    faults = [fault(number, error, is_done=is_done) for number in writes]
    tellings = asyncio.run(live_all(story, faults))
    for (number, write), telling in zip(writes.items(), tellings, strict=True):
        assert telling.most_alive == 1, write
        for chapter, seen, expected in zip(story, telling.seen, model.seen, strict=True):
            differ = {key for key in {*seen, *expected} if seen.get(key) != expected.get(key)}
            assert not differ, f"{write} (write {number}), after {chapter.__name__}"


def fault(number: int, error: BaseException, *, is_done: bool) -> Fault:
    """Return what lets the write of that number fail, after it was done or instead."""

    def disturb(world: KubernetesWorld) -> None:
        hook, count = at_write(number, error), world.api.after

        def after(verb: str, resource: Resource, name: str) -> None:
            count(verb, resource, name)
            hook(verb, resource, name)

        if is_done:
            world.api.after = after
        else:
            world.api.before = hook

    return disturb
