"""The status names the component that a gang waits for, even if the component is silent."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.backends.kubernetes.silence import silent_component
from finetune_operator.kube.resources import EVENTS, JOBS, Object
from finetune_operator.reconcile.conditions import rfc3339
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import KubernetesWorld, look_for

PENDING_SECONDS = 300


def live(life: Callable[[KubernetesWorld], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        await life(KubernetesWorld(port=9400))

    run(work())


def ready(world: KubernetesWorld) -> tuple[str, str]:
    found = world.condition("ResourcesReady")
    return found["reason"], found["message"]


async def begin(world: KubernetesWorld, **overrides: Any) -> None:
    await world.apply(deadlines={"pendingSeconds": PENDING_SECONDS}, **overrides)
    await world.settle()


async def no_pods(world: KubernetesWorld) -> None:
    """Leave the Job controller out."""


async def no_scheduler(world: KubernetesWorld) -> None:
    await world.make_pods(1, num_placed=0)


async def one_without_scheduler(world: KubernetesWorld) -> None:
    await world.make_pods(1, num_placed=1)
    await world.run_pods(1, 0)


async def init_container_hangs(world: KubernetesWorld) -> None:
    await world.make_pods(1)
    done: Object = {"terminated": {"exitCode": 0}}
    await world.run_pods(1, 0)
    await world.prepare_pod(1, 1, first=done, copy={"running": {}}, last={"waiting": {}})


async def behind_a_sidecar(world: KubernetesWorld) -> None:
    await world.make_pods(1)
    await world.prepare_pod(1, 0, proxy={"running": {}}, copy={"running": {}})
    await world.prepare_pod(1, 1, proxy={"running": {}}, copy={"running": {}})


async def silent_kubelet(world: KubernetesWorld) -> None:
    await world.make_pods(1)


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        pytest.param(
            no_pods, "PodsNotCreated", ("Job ns/tiny-1 has 0 of 2 pods", "Job controller")
        ),
        pytest.param(
            no_scheduler, "SchedulerNotResponding", ("scheduler volcano", "pod tiny-1-0", "profile")
        ),
        pytest.param(
            one_without_scheduler, "SchedulerNotResponding", ("scheduler volcano", "pod tiny-1-1")
        ),
        pytest.param(
            init_container_hangs, "InitContainerRunning", ("kubectl logs -n ns tiny-1-1 -c copy",)
        ),
        pytest.param(
            behind_a_sidecar, "InitContainerRunning", ("init container copy of pod tiny-1-0",)
        ),
        pytest.param(silent_kubelet, "PodNotStarted", ("kubelet of node node-0", "tiny-1-0")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_silent_component_is_named_within_a_minute_and_by_the_failed_job(
    fault: Callable[[KubernetesWorld], Coroutine[Any, Any, None]],
    reason: str,
    words: tuple[str, ...],
) -> None:
    async def life(world: KubernetesWorld) -> None:
        await begin(world)
        await fault(world)
        await look_for(world, 25)
        assert ready(world)[0] == "Provisioning", "a healthy start is silent, too"
        await look_for(world, 35)
        assert ready(world)[0] == reason
        assert all(word in ready(world)[1] for word in words)
        sentence = ready(world)[1]
        await look_for(world, PENDING_SECONDS)
        failed = world.condition("Failed")
        assert failed["reason"] == "PendingDeadlineExceeded"
        assert sentence in failed["message"]

    live(life)


def test_a_component_that_works_again_is_no_longer_blamed() -> None:
    async def life(world: KubernetesWorld) -> None:
        await begin(world)
        await look_for(world, 40)
        assert ready(world)[0] == "PodsNotCreated"
        await world.make_pods(1)
        await look_for(world, 5)
        assert ready(world)[0] == "Provisioning"

    live(life)


def test_the_words_of_the_cluster_come_before_silence() -> None:
    async def life(world: KubernetesWorld) -> None:
        await begin(world)
        (batch_job,) = world.api.objects(JOBS)
        event = {
            "metadata": {"name": "quota"},
            "type": "Warning",
            "reason": "FailedCreate",
            "message": "exceeded quota: team",
            "involvedObject": {
                "kind": "Job", "name": "tiny-1", "uid": batch_job["metadata"]["uid"]
            },
        }  # fmt: skip
        await world.api.create(EVENTS, event, "ns")
        await look_for(world, 3)
        await asyncio.sleep(3.1)
        await look_for(world, 60)
        assert ready(world) == ("PodsNotCreated", "Job tiny-1: exceeded quota: team")

    live(life)


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param(
            {"copy": waiting("ImagePullBackOff", "no such image")},
            ("ImagePullFailed", "container copy of pod tiny-1-1 has no image: no such image"),
            id="image of an init container",
        ),
        pytest.param(
            {"proxy": waiting("CrashLoopBackOff", "back-off 10s")},
            (
                "PodNotStarted",
                "container proxy of pod tiny-1-1 fails again and again: back-off 10s",
            ),
            id="crash loop of a sidecar",
        ),
        pytest.param(
            {"copy": waiting("CreateContainerConfigError", 'secret "x" not found')},
            (
                "ContainerNotCreated",
                'container copy of pod tiny-1-1 cannot start: secret "x" not found',
            ),
            id="missing Secret",
        ),
    ],
)
def test_a_container_before_the_trainer_that_cannot_start_is_named_at_once(
    states: dict[str, Object], expected: tuple[str, str]
) -> None:
    async def life(world: KubernetesWorld) -> None:
        await begin(world)
        await world.make_pods(1)
        await world.run_pods(1, 0)
        await world.prepare_pod(1, 1, **states)
        await look_for(world, 10)
        assert ready(world) == expected

    live(life)


def test_a_queue_in_a_cluster_without_kueue_stalls_the_job_until_kueue_is_there() -> None:
    async def life(world: KubernetesWorld) -> None:
        world.api.groups.clear()
        await begin(world, queue={"name": "team"})
        await world.api.patch(JOBS, "tiny-1", "ns", {"spec": {"suspend": True}})
        await look_for(world, 5)
        assert world.condition("Stalled")["status"] == "True"
        admitted = world.condition("Admitted")
        assert (admitted["status"], admitted["reason"]) == ("False", "KueueNotInstalled")
        assert "no Kueue" in admitted["message"]
        assert "spec.queue" in admitted["message"]
        assert world.job["status"]["phase"] == "Starting"
        await look_for(world, PENDING_SECONDS)
        assert world.condition("Failed")["reason"] == "PendingDeadlineExceeded"
        assert "no Kueue" in world.condition("Failed")["message"]

    live(life)


@pytest.mark.parametrize("installed", [True, False])
def test_the_api_server_is_asked_for_kueue_once_for_all_queued_gangs(installed: bool) -> None:
    async def life(world: KubernetesWorld) -> None:
        asked = 0

        def count(verb: str, resource: Any, name: str) -> None:
            nonlocal asked
            asked += resource.plural == "discovery"

        world.api.before = count
        world.api.groups = {"kueue.x-k8s.io"} if installed else set()
        await begin(world, queue={"name": "team"})
        await world.api.patch(JOBS, "tiny-1", "ns", {"spec": {"suspend": True}})
        await look_for(world, 20)
        assert asked == 1
        assert world.condition("Admitted")["reason"] == (
            "Queued" if installed else "KueueNotInstalled"
        )

    live(life)


NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def ago(seconds: float) -> str:
    return rfc3339(NOW - timedelta(seconds=seconds))


def pod(**status: Any) -> Object:
    metadata = {"namespace": "ns", "name": "tiny-1-0", "uid": "p", "creationTimestamp": ago(3600)}
    return {"metadata": metadata, "spec": {"nodeName": "a"}, "status": status}


def batch_job(**status: Any) -> Object:
    metadata = {"namespace": "ns", "name": "tiny-1", "creationTimestamp": ago(3600)}
    return {"metadata": metadata, "spec": {"completions": 1}, "status": status}


def changed(kind: str, status: str, seconds: float) -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": ago(seconds)}


CREATING = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
RESUMED = batch_job(conditions=[changed("Suspended", "False", 10)])
PLACED = pod(conditions=[changed("PodScheduled", "True", 10)])
INITIALIZING = pod(
    conditions=[changed("PodScheduled", "True", 600), changed("Initialized", "False", 600)],
    containerStatuses=[CREATING],
    initContainerStatuses=[{"name": "copy", "state": {"running": {"startedAt": ago(10)}}}],
)
PULLING = pod(
    conditions=[changed("PodScheduled", "True", 600), changed("Initialized", "True", 600)],
    containerStatuses=[CREATING],
    initContainerStatuses=[{"name": "proxy", "state": {"running": {"startedAt": ago(600)}}}],
)


@pytest.mark.parametrize(
    ("job", "pods", "left"),
    [
        pytest.param(RESUMED, [], 20.0, id="no pods since its queue resumed the Job"),
        pytest.param(batch_job(), [PLACED], 20.0, id="placed after an hour"),
        pytest.param(batch_job(), [INITIALIZING], 20.0, id="an init container has just started"),
        pytest.param(batch_job(), [PULLING], None, id="the image is pulled beside a sidecar"),
    ],
)
def test_each_step_has_30_s_of_its_own(job: Object, pods: list[Object], left: float | None) -> None:
    facts = [read_pod(one) for one in pods]
    assert silent_component(job, facts, NOW) == (None, left)
    if left is not None:
        assert silent_component(job, facts, NOW + timedelta(seconds=left))[0] is not None
