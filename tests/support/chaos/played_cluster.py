"""A cluster in virtual time that acts by itself: controllers, scheduler, nodes and trainers.

Once a second each part does its next step, unless a fault prevents it. Faults are attributes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from finetune_operator.backends.kubernetes.child_names import INDEX_LABEL
from finetune_operator.backends.kubernetes.finality import has, is_final
from finetune_operator.kube.resources import JOBS, PODS, Object
from finetune_trainer.config import (
    CheckpointRef,
    ExitCode,
    FailureClass,
    Phase,
    Progress,
    Termination,
    TimeSpent,
)
from support.chaos.played_world import EVERY, LOAD_SECONDS, TOTAL_STEPS, PlayedWorld
from support.cluster.played_pods import ProgressServer
from support.kubernetes.kubernetes_world import ADDRESS, NODES, KubernetesWorld

START_SECONDS = 2
LEAVE_SECONDS = 2
WAITS = "1 of 2 ranks have not arrived (1)"
ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu"


class PlayedCluster(KubernetesWorld, PlayedWorld):
    """A job of two nodes in a cluster whose parts act by themselves.

    Attributes:
        has_job_controller: The Job controller creates and deletes pods.
        has_scheduler: The scheduler tries to place pods.
        room: Nodes with room for a pod.
        ready_before_start: Returns whether a pod's trainer may start; may report an obstacle.
        silent: Nodes whose kubelet does nothing any longer; a gang with a pod there does not train.
        late: Attempts in which rank 1 does not come to the rendezvous.
    """

    def __init__(self, page: ProgressServer, closing: AsyncExitStack) -> None:
        super().__init__(page.port)
        self.page, self._closing = page, closing
        self.has_job_controller = self.has_scheduler = True
        self.late: set[int] = set()
        self.silent: set[str] = set()
        self.room = NODES
        self.ready_before_start: Callable[[Object], Any] = lambda pod: True
        self.begin()
        self._trains = self._resumed = 0
        self._ran_since = self.now
        self._placed: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._never_ran: set[int] = set()
        self._seconds = 0

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator["PlayedCluster"]:
        """Yield a cluster; virtual time runs already."""
        async with AsyncExitStack() as closing:
            page = ProgressServer()
            await closing.enter_async_context(page.serving(ADDRESS))
            yield cls(page, closing)

    def without_port(self, text: str) -> str:
        """Return a text with the usual port of the page instead of the port of this run."""
        return text.replace(str(self.page.port), "9400")

    async def close_page(self) -> None:
        """Let no connection to rank 0's page succeed."""
        await self._closing.aclose()

    async def open_page(self) -> None:
        """Let the page respond again."""
        await self._closing.enter_async_context(self.page.serving(ADDRESS, self.page.port))

    def may_write(self, pod: Object) -> bool:
        """Return whether a trainer may write; on a lost node the next attempt has fenced it."""
        is_lost = pod["spec"].get("nodeName") in self.silent
        return super().may_write(pod) and not (is_lost and "deletionTimestamp" in pod["metadata"])

    async def act(self, step: int) -> None:
        """Let controllers, scheduler, nodes and trainers do their next step."""
        self._seconds += step
        await self._control()
        await self._schedule()
        await self._run_nodes()
        await self._train(step)

    async def _control(self) -> None:
        for batch_job in self.api.objects(JOBS):
            pods, spec = self._pods(batch_job), batch_job["spec"]
            number = int(batch_job["metadata"]["name"].rpartition("-")[2])
            if is_final(batch_job) or not self.has_job_controller:
                continue
            stops = has(batch_job, "FailureTarget") or (
                spec.get("activeDeadlineSeconds") == 1 and not spec.get("suspend")
            )
            failed = any(one["status"]["phase"] == "Failed" for one in pods)
            failed |= number in self._never_ran
            if stops or failed or spec.get("suspend"):
                if stops or failed:
                    await self._decide(batch_job)
                for pod in pods:
                    if is_alive(pod) and "deletionTimestamp" not in pod["metadata"]:
                        await self.api.delete(PODS, pod["metadata"]["name"], "ns", grace_seconds=30)
                if not any(map(is_alive, self._pods(batch_job))):
                    if stops or failed:
                        await self.conclude(number, "Failed")
                    else:
                        await self.let_go(number)
            elif pods and all(one["status"]["phase"] == "Succeeded" for one in pods):
                await self.conclude(number, "Complete")
            elif not pods:
                await self.make_pods(number, num_placed=0)

    async def _decide(self, batch_job: Object) -> None:
        """Decide to fail a batch Job; it is Failed once its pods are gone."""
        if not has(batch_job, "FailureTarget"):
            target = {"type": "FailureTarget", "status": "True", "reason": "PodFailed"}
            conditions = [*batch_job.get("status", {}).get("conditions", ()), target]
            await self._tell(JOBS, batch_job["metadata"]["name"], conditions=conditions, active=0)

    async def _schedule(self) -> None:
        if not self.has_scheduler:
            return
        pods = self.api.objects(PODS)
        held = [one for one in pods if "nodeName" in one["spec"] and is_alive(one)]
        taken = sum(one["spec"]["nodeName"] not in self.silent for one in held)
        for pod in pods:
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            name, index = pod["metadata"]["name"], pod["metadata"]["labels"][INDEX_LABEL]
            fits = taken < self.room
            placed: Object = {"type": "PodScheduled", "status": str(fits)}
            if fits:
                taken += 1
                node = f"node-{index}"
                if node in self.silent:
                    node = f"other-{index}"
                await self.api.patch(PODS, name, "ns", {"spec": {"nodeName": node}})
                self._placed[name] = self._seconds
            else:
                placed |= {"reason": "Unschedulable", "message": ROOM}
            await self._tell(PODS, name, phase="Pending", conditions=[placed])

    async def _run_nodes(self) -> None:
        for pod in self.api.objects(PODS):
            name, status = pod["metadata"]["name"], pod.get("status", {})
            number, index = (int(one) for one in name.split("-")[1:])
            if pod["spec"].get("nodeName") in self.silent:
                continue
            if not is_alive(pod):
                if "deletionTimestamp" in pod["metadata"] and not self._has_batch_job(number):
                    await self.api.patch(PODS, name, "ns", {"metadata": {"finalizers": None}})
                continue
            if "deletionTimestamp" in pod["metadata"]:
                await self._leave(pod, number, index)
            elif "nodeName" in pod["spec"] and status.get("phase") == "Pending":
                waited = self._seconds - self._placed.get(name, self._seconds)
                if waited >= START_SECONDS and await _result(self.ready_before_start(pod)):
                    await self.run_pods(number, index)

    async def _leave(self, pod: Object, number: int, index: int) -> None:
        """Let a pod save and end, or be gone if it never ran."""
        name = pod["metadata"]["name"]
        if pod["status"].get("phase") != "Running":
            self._never_ran.add(number)
            await self.api.patch(PODS, name, "ns", {"metadata": {"finalizers": None}})
            return
        self._told.setdefault(name, self._seconds)
        if self._seconds - self._told[name] < LEAVE_SECONDS:
            return
        if self._trains == number and self._is_whole(number):
            self.saved = self.step
            words = f"stopped with a checkpoint of step {self.saved}"
            await self.end(number, *range(NODES), code=ExitCode.PREEMPTED, words=words)
        else:
            words = "stopped without a checkpoint, because other ranks are gone"
            await self.end(number, index, code=ExitCode.PREEMPTED, words=words)

    async def end(
        self,
        number: int,
        *indexes: int,
        code: int,
        words: str = "",
        failure: FailureClass = FailureClass.PREEMPTED,
    ) -> None:
        """End pods with the trainer's message; without words they leave none."""
        text = ""
        if words:
            progress = self._progress() if self._trains == number else None
            message = Termination(
                failure_class=failure, exit_code=code, message=words, progress=progress
            )
            text = message.to_json()
        await self.end_pods(number, *indexes, code=code, words=text)

    def _has_batch_job(self, number: int) -> bool:
        return any(one["metadata"]["name"] == f"tiny-{number}" for one in self.api.objects(JOBS))

    def _is_whole(self, number: int) -> bool:
        pods = [
            one
            for one in self.api.objects(PODS)
            if one["metadata"]["name"].startswith(f"tiny-{number}-")
        ]
        run = [one for one in pods if one["status"].get("phase") == "Running"]
        return len(run) == NODES and not any(one["spec"]["nodeName"] in self.silent for one in run)

    async def _train(self, step: int) -> None:
        number = self.number
        if not number or not self._is_whole(number):
            return
        if self._trains != number:
            if self._told.keys() & {f"tiny-{number}-{index}" for index in range(NODES)}:
                return
            self._trains, self._ran_since = number, self.now
            self.lost_steps, self.step = self.step - self.saved, self.saved
            self._resumed = self.saved
        age = (self.now - self._ran_since).total_seconds()
        if number not in self.late and age > LOAD_SECONDS:
            before, self.step = self.step, self.step + step
            if before // EVERY != self.step // EVERY:
                self.saved = self.step - self.step % EVERY
        self.page.progress = self._progress()

    def _progress(self) -> Progress:
        is_loading = self.step == self._resumed
        ref = CheckpointRef(
            step=self.saved, path=f"/c/step-{self.saved}", time=0.0, world_size=NODES
        )
        age = (self.now - self._ran_since).total_seconds()
        return Progress(
            attempt=self._trains or 1,
            phase=Phase.STARTING if is_loading else Phase.TRAINING,
            step=self.step,
            total_steps=TOTAL_STEPS,
            resumed_step=self._resumed or None,
            checkpoint=ref if self.saved else None,
            time=self.now.timestamp(),
            spent=TimeSpent(starting=age) if is_loading else None,
            waits_for=WAITS if self._trains in self.late else None,
        )


def is_alive(pod: Object) -> bool:
    """Return whether the kubelet has not reported the end of a pod."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


async def _result(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value
