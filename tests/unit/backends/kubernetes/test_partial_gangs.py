"""Of two gangs that each hold a part of their nodes, the younger gives way, uncounted."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from typing import Any

from finetune_operator.api.validation import defaulted
from finetune_operator.backends.kubernetes.child_names import CONTAINER, INDEX_LABEL
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, PODS, Object
from support.api.builders import manifest
from support.kernel.kernel_world import Crash
from support.kubernetes.kubernetes_cases import JOB
from support.kubernetes.kubernetes_world import ADDRESS, KubernetesWorld

GANG = 2
"""Nodes that each job needs."""

PATIENCE = 120


class Contention(KubernetesWorld):
    """Jobs that need two nodes each, and a scheduler that places their pods one by one.

    Args:
        nodes: Names of the nodes; each has room for one pod.
        shut: Pods, by the start of their name, for which no node is suitable.
    """

    def __init__(self, nodes: Sequence[str], shut: Sequence[str] = ()) -> None:
        super().__init__(port=9400)
        self._nodes, self._shut = nodes, tuple(shut)
        self.has_scheduler = False
        self.keys: list[Key] = []

    async def add(self, name: str, namespace: str = "ns", **overrides: Any) -> None:
        if not self.keys:
            await self.apply()  # and its profile
            self.api.remove(FINE_TUNE_JOBS, "tiny", "ns")
        fields = {**JOB, "topology__nodes": GANG, "backend": {"type": "kubernetes"}, **overrides}
        job = defaulted(manifest(name=name, **fields))
        job["metadata"]["namespace"] = namespace
        await self.api.create(FINE_TUNE_JOBS, job, namespace)
        self.keys.append(Key(namespace, name))
        await self.pass_time(2)  # so that the jobs differ in age

    async def pass_time(self, seconds: int) -> None:
        step = 1 if seconds <= PATIENCE / 4 else 5
        for _ in range(0, seconds, step):
            self.now += timedelta(seconds=step)
            await self._control()
            await self._schedule()
            await self.catch_up()
            for key in self.keys:
                try:
                    await self.reconciler.reconcile(key)
                except FineTuneError as error:
                    if not error.retryable:
                        raise
                except Crash:
                    self.start_process()
                    await self.catch_up()
        await self.catch_up()

    def take_node(self, name: str) -> None:
        """Let a node be full of other pods."""
        self._nodes = [one for one in self._nodes if one != name]

    def add_node(self, name: str) -> None:
        self._nodes = [*self._nodes, name]

    async def remove(self, name: str) -> None:
        """Delete a job with all of its objects."""
        for kind in (PODS, JOBS, FINE_TUNE_JOBS):
            for one in self.api.objects(kind):
                if one["metadata"]["name"].startswith(name):
                    self.api.remove(kind, one["metadata"]["name"], one["metadata"]["namespace"])
        self.keys = [key for key in self.keys if key.name != name]

    def status(self, name: str) -> Object:
        (found,) = (j for j in self.api.objects(FINE_TUNE_JOBS) if j["metadata"]["name"] == name)
        status: Object = found["status"]
        return status

    def ready(self, name: str) -> Object:
        conditions = self.status(name)["conditions"]
        found: Object = next(one for one in conditions if one["type"] == "Ready")
        return found

    def num_running(self, batch_job: str) -> int:
        pods = [p for p in self.api.objects(PODS) if p["metadata"]["name"].startswith(batch_job)]
        return sum(pod["status"]["phase"] == "Running" for pod in pods)

    async def _control(self) -> None:
        """Create the pods of batch Jobs, and remove the pods of ended batch Jobs."""
        for batch_job in self.api.objects(JOBS):
            metadata, spec = batch_job["metadata"], batch_job["spec"]
            name, namespace, pods = metadata["name"], metadata["namespace"], self._pods(batch_job)
            if spec.get("suspend"):
                continue
            if spec.get("activeDeadlineSeconds") == 1:
                for pod in pods:
                    self.api.remove(PODS, pod["metadata"]["name"], namespace)
                over = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
                change: Object = {"status": {"conditions": over}}
                await self.api.patch(JOBS, name, namespace, change, subresource="status")
                continue
            for index in range(0 if pods else GANG):
                await self._create_pod(batch_job, index)

    async def _create_pod(self, batch_job: Object, index: int) -> None:
        metadata, template = batch_job["metadata"], batch_job["spec"]["template"]["metadata"]
        owner = {"kind": "Job", "controller": True, "uid": metadata["uid"]}
        child = {
            **template,
            "name": f"{metadata['name']}-{index}",
            "labels": {**template["labels"], INDEX_LABEL: str(index)},
            "ownerReferences": [{**owner, "name": metadata["name"]}],
        }
        spec = {"containers": [{"name": CONTAINER}]}
        pod = {"metadata": child, "spec": spec, "status": {"phase": "Pending"}}
        await self.api.create(PODS, pod, metadata["namespace"])

    async def _schedule(self) -> None:
        """Place and run pods, those with the lowest index of all gangs first."""
        if not self.has_scheduler:
            return
        pods = self.api.objects(PODS)
        free = [one for one in self._nodes if one not in {p["spec"].get("nodeName") for p in pods}]
        waiting = [one for one in pods if "nodeName" not in one["spec"]]
        for pod in sorted(waiting, key=lambda one: str(one["metadata"]["labels"][INDEX_LABEL])):
            metadata = pod["metadata"]
            name, namespace = metadata["name"], metadata["namespace"]
            fits = bool(free) and not name.startswith(self._shut or "-")
            placed: Object = {"type": "PodScheduled", "status": str(fits)}
            status: Object = {"conditions": [placed]}
            if fits:
                node = {"spec": {"nodeName": free.pop(0)}}
                await self.api.patch(PODS, name, namespace, node)
                running = [{"name": CONTAINER, "state": {"running": {}}}]
                status |= {"phase": "Running", "podIP": ADDRESS, "containerStatuses": running}
            else:
                placed |= {"reason": "Unschedulable", "message": "0/2 nodes are available"}
            await self.api.patch(PODS, name, namespace, {"status": status}, subresource="status")


def live(life: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(life())


async def contending(
    *names: str, nodes: Sequence[str] = ("a", "b"), shut: Sequence[str] = (), **overrides: Any
) -> Contention:
    """Return a cluster in which each of these jobs, the oldest first, gets a node at once."""
    world = Contention(nodes, shut)
    for name in names:
        await world.add(name, **overrides)
    world.has_scheduler = True
    return world


def test_the_younger_of_two_gangs_gives_way_and_runs_when_the_older_has_ended() -> None:
    async def life() -> None:
        world = await contending("older", "younger")
        await world.pass_time(PATIENCE - 5)
        assert [world.num_running(one) for one in ("older-1", "younger-1")] == [1, 1]
        await world.pass_time(15)
        assert [world.num_running(one) for one in ("older-1", "younger-2")] == [2, 0]
        status = world.status("younger")
        first = status["attempts"][0]
        assert first["failureClass"] == "Preempted"
        assert first["message"].startswith("gave way to job older, because for 120 s both held ")
        assert status["restarts"] == {"counted": 0, "disruptions": 0}
        assert "0/2 nodes are available" in world.ready("younger")["message"]
        assert world.status("older")["attempt"] == 1
        await world.remove("older")
        await world.pass_time(5)
        assert world.num_running("younger-2") == 2

    live(life)


def test_half_a_gang_alone_waits_for_15_minutes_and_gives_way_to_no_job() -> None:
    async def life() -> None:
        world = await contending("alone", nodes=["a"])
        await world.pass_time(900)
        status = world.status("alone")
        assert (status["attempt"], status["restarts"]["counted"]) == (1, 0)
        assert world.num_running("alone-1") == 1
        assert world.ready("alone")["reason"] == "Unschedulable"

    live(life)


def test_gangs_that_need_different_nodes_give_way_once_at_most() -> None:
    async def life() -> None:
        world = await contending("older", "younger", nodes=["a", "b"], shut=["older-1-1"])
        await world.pass_time(150)
        assert world.status("younger")["attempt"] == 2
        world.take_node("b")
        await world.pass_time(750)
        assert world.status("younger")["attempt"] == 2
        assert world.status("older")["attempt"] == 1

    live(life)


def test_of_three_gangs_only_the_youngest_gives_way_if_that_completes_another() -> None:
    async def life() -> None:
        world = await contending("aa", "bb", "cc", nodes=["a", "b", "c"])
        await world.pass_time(PATIENCE + 10)
        assert [world.num_running(one) for one in ("aa-1", "bb-1", "cc-2")] == [2, 1, 0]
        await world.pass_time(600)
        assert [world.status(one)["attempt"] for one in ("aa", "bb", "cc")] == [1, 1, 2]

    live(life)


def test_a_gang_of_a_queue_never_gives_way() -> None:
    async def life() -> None:
        world = await contending("older", "younger", queue={"name": "team"})
        for batch_job in world.api.objects(JOBS):
            name = batch_job["metadata"]["name"]
            await world.api.patch(JOBS, name, "ns", {"spec": {"suspend": False}})
        await world.pass_time(300)
        assert [world.num_running(one) for one in ("older-1", "younger-1")] == [1, 1]

    live(life)


def test_a_gang_that_still_gets_nodes_does_not_make_another_give_way() -> None:
    async def life() -> None:
        world = await contending("older", "younger")
        await world.pass_time(PATIENCE - 20)
        world.add_node("c")  # an autoscaler's, which the older gang gets
        await world.pass_time(300)
        assert [world.num_running(one) for one in ("older-1", "younger-1")] == [2, 1]
        assert world.status("younger")["attempt"] == 1

    live(life)


def test_an_operator_that_dies_while_a_gang_gives_way_ends_and_explains_it_all_the_same() -> None:
    async def life() -> None:
        world = await contending("older", "younger")
        crashes = 0

        def crash(verb: str, resource: Any, name: str) -> None:
            nonlocal crashes
            if (verb, name) == ("patch", "younger-1") and not crashes:
                crashes += 1
                raise Crash

        world.api.before = crash
        await world.pass_time(PATIENCE + 20)
        assert crashes == 1
        assert [world.num_running(one) for one in ("older-1", "younger-2")] == [2, 0]
        first = world.status("younger")["attempts"][0]
        assert first["message"].startswith("gave way to job older, ")
        assert world.status("younger")["restarts"] == {"counted": 0, "disruptions": 0}

    live(life)


def test_a_job_of_another_namespace_is_not_named() -> None:
    async def life() -> None:
        world = Contention(["a", "b"])
        await world.add("secret", "other")
        await world.add("younger")
        world.has_scheduler = True
        await world.pass_time(PATIENCE + 10)
        first = world.status("younger")["attempts"][0]
        assert first["message"].startswith("gave way to an older job of another namespace, ")
        assert "secret" not in str(world.status("younger"))

    live(life)
