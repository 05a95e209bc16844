"""A cluster in memory with one job of the kubernetes backend; controllers and kubelets are played.

They do nothing by themselves: a test has them make pods, run them and end them, so that what the
operator does in between is the same each time.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.backends.kubernetes.child_names import CONTAINER, INDEX_LABEL
from finetune_operator.backends.kubernetes.finality import condition
from finetune_operator.backends.kubernetes.judge import judge
from finetune_operator.backends.kubernetes.pod_facts import read_pod
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from finetune_operator.reconcile.conditions import rfc3339
from support.kernel.kernel_world import KEY, World
from support.kubernetes.kubernetes_cases import JOB, profile

NODES = 2
CHILDREN = (NETWORK_POLICIES, SERVICES, ENDPOINT_SLICES, JOBS, PODS)
ADDRESS = "127.0.0.1"
"""Of every pod; rank 0's progress is served there."""

_FINAL = ("Complete", "Failed", "FailureTarget", "SuccessCriteriaMet")
_TRACKING = "batch.kubernetes.io/job-tracking"


async def look_for(world: World, seconds: int) -> None:
    """Let time pass with a reconcile each second; retryable errors are retried."""
    for _ in range(seconds):
        world.now += timedelta(seconds=1)
        await world.catch_up()
        try:
            await world.reconciler.reconcile(KEY)
        except FineTuneError as error:
            if not error.retryable:
                raise
    await world.catch_up()


async def pass_time(world: World, seconds: float) -> None:
    """Let the time of the world and of the event loop pass together."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        before = loop.time()
        look = await world.settle()
        wait = 5.0 if look.requeue_seconds is None else look.requeue_seconds
        await asyncio.sleep(min(max(0.5, wait), end - loop.time()))
        world.now += timedelta(seconds=loop.time() - before)
    await world.settle()


def holds_node(pod: Object) -> bool:
    """Return whether a pod still occupies its node."""
    return judge(read_pod(pod)).holds_node


_KEY = re.compile(r'("FINETUNE_RDZV_KEY", "value": )"[0-9a-f]{64}"')


class PromptBackend(KubernetesBackend):
    """Asks a pod at once how far it is, so that no time must pass for it."""

    first_progress_seconds = 0.0


class KubernetesWorld(World):
    """A `World` whose job is of the kubernetes backend.

    Args:
        port: Where rank 0's progress is served.

    Attributes:
        most_alive: Most attempts of which a pod lived, or could have been made, at one time.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        super().__init__()
        self.api.log_lines = {"tiny-1-1": ["HF_TOKEN=secret", "CUDA error"]}

    def given(self, context: BackendContext) -> Mapping[str, Backend]:
        return {"kubernetes": PromptBackend(context)}

    def _count(self, verb: str, resource: Resource, name: str) -> None:
        self.writes += 1
        alive = sum(self._may_run(one) for one in self.api.objects(JOBS))
        self.most_alive = max(self.most_alive, alive)

    def _may_run(self, batch_job: Object) -> bool:
        over = any(condition(batch_job, kind) for kind in _FINAL)
        spec = batch_job["spec"]
        # The deadline of a suspended Job does not run; it begins anew once somebody resumes it.
        if not over and (spec.get("activeDeadlineSeconds") != 1 or spec.get("suspend")):
            return True
        return any(map(self.may_write, self._pods(batch_job)))

    def may_write(self, pod: Object) -> bool:
        """Return whether the trainer of a pod may write to the folders of the job."""
        return judge(read_pod(pod)).may_write

    def _pods(self, batch_job: Object) -> list[Object]:
        uid = batch_job["metadata"]["uid"]
        every = self.api.objects(PODS)
        return [one for one in every if one["metadata"]["ownerReferences"][0]["uid"] == uid]

    async def catch_up(self) -> None:
        """Let the watches deliver everything, as they keep it."""
        listing = await self.api.list(FINE_TUNE_JOBS)
        self.cache(FINE_TUNE_JOBS).replace(listing.items, listing.resource_version)
        for one in KubernetesBackend.watches:
            listing = await self.api.list(one.resource, label_selector=one.selector, trim=one.trim)
            self.cache(one.resource).replace(listing.items, listing.resource_version)

    async def apply(self, **overrides: Any) -> None:
        if not self.api.objects(FINE_TUNE_PROFILES):
            spec = profile().model_dump(by_alias=True, exclude_none=True, mode="json")
            made = {"metadata": {"name": "default"}, "spec": spec}
            await self.api.create(FINE_TUNE_PROFILES, made)
        fields: dict[str, Any] = {
            **JOB,
            "topology__nodes": NODES,
            "observability__metricsPort": self._port,
            "restartPolicy__backoff": {"baseSeconds": 0, "maxSeconds": 1},
        }
        await super().apply(**{**fields, **overrides})

    @property
    def attempts(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.objects(JOBS)]

    def children(self) -> dict[str, str]:
        """Return every child as JSON text, without random keys, and with names instead of uids."""
        names = {
            one["metadata"]["uid"]: f"uid of {one['metadata']['name']}"
            for kind in (FINE_TUNE_JOBS, *CHILDREN)
            for one in self.api.objects(kind)
        }
        found = {}
        for kind in CHILDREN:
            for one in self.api.objects(kind):
                del one["metadata"]["resourceVersion"]
                text = json.dumps(one, sort_keys=True).replace(str(self._port), "12345")
                text = _KEY.sub(r'\1"random"', text)
                for uid, name in names.items():
                    text = text.replace(uid, name)
                found[f"{kind.kind} {one['metadata']['name']}"] = text
        return found

    # What the batch Job's controller does.

    async def make_pods(self, number: int, *, num_placed: int = NODES) -> None:
        """Make the pods of an attempt, if it may; so many have a node, and none runs yet."""
        batch_job = await self._batch_job(number)
        if any(condition(batch_job, kind) for kind in _FINAL):
            return
        owner = {"kind": "Job", "controller": True, "uid": batch_job["metadata"]["uid"]}
        template = batch_job["spec"]["template"]
        for index in range(NODES):
            name = f"tiny-{number}-{index}"
            metadata = {
                **template["metadata"],
                "name": name,
                "labels": {**template["metadata"]["labels"], INDEX_LABEL: str(index)},
                "ownerReferences": [{**owner, "name": batch_job["metadata"]["name"]}],
                "finalizers": [_TRACKING],
            }
            spec: Object = {"schedulerName": "volcano", "containers": [{"name": CONTAINER}]}
            if index >= num_placed:
                await self.api.create(PODS, {"metadata": metadata, "spec": spec}, "ns")
                await self._tell(PODS, name, phase="Pending")
                continue
            spec["nodeName"] = f"node-{index}"
            await self.api.create(PODS, {"metadata": metadata, "spec": spec}, "ns")
            placed = [{"type": "PodScheduled", "status": "True"}]
            await self._tell(PODS, name, phase="Pending", conditions=placed)

    async def conclude(self, number: int, kind: str) -> None:
        """Let the batch Job be over: pods that were deleted are gone, others stay as they ended."""
        batch_job = await self._batch_job(number)
        for pod in self._pods(batch_job):
            name = pod["metadata"]["name"]
            if holds_node(pod) and "deletionTimestamp" not in pod["metadata"]:
                await self.api.delete(PODS, name, "ns", grace_seconds=30)
            await self.api.patch(PODS, name, "ns", {"metadata": {"finalizers": None}})
        over = {"type": kind, "status": "True", "reason": "Played", "message": ""}
        before = batch_job.get("status", {}).get("conditions") or []
        await self._tell(JOBS, f"tiny-{number}", conditions=[*before, over])

    async def suspend(self, number: int, value: bool = True) -> None:
        """Suspend the batch Job, as its queue or somebody else does, or resume it.

        Its controller tells running pods to leave, and lets them go without a trace.
        """
        await self.api.patch(JOBS, f"tiny-{number}", "ns", {"spec": {"suspend": value}})
        if not value:
            return
        for pod in self._pods(await self._batch_job(number)):
            name = pod["metadata"]["name"]
            await self.api.delete(PODS, name, "ns", grace_seconds=30)

    async def let_go(self, number: int) -> None:
        """Remove the pods that have left a suspended batch Job."""
        for pod in self._pods(await self._batch_job(number)):
            if not holds_node(pod):
                name = pod["metadata"]["name"]
                await self.api.patch(PODS, name, "ns", {"metadata": {"finalizers": None}})

    # What a node does.

    async def run_pods(self, number: int, *indexes: int) -> None:
        for index in indexes:
            state: Object = {"running": {}}
            await self._tell(PODS, f"tiny-{number}-{index}", state, phase="Running", podIP=ADDRESS)

    async def end_pods(self, number: int, *indexes: int, code: int, words: str = "") -> None:
        for index in indexes:
            state = {"terminated": {"exitCode": code, "message": words}}
            phase = "Failed" if code else "Succeeded"
            await self._tell(PODS, f"tiny-{number}-{index}", state, phase=phase)

    async def mark_silent(self, number: int, index: int, *, is_silent: bool = True) -> None:
        """Mark a pod as the node controller does if its kubelet is silent, or as the kubelet."""
        time, ready = rfc3339(self.now), "False" if is_silent else "True"
        conditions = [
            {"type": kind, "status": status, "lastTransitionTime": time}
            for kind, status in (
                ("PodScheduled", "True"), ("ContainersReady", "True"), ("Ready", ready)
            )
        ]  # fmt: skip
        await self._tell(PODS, f"tiny-{number}-{index}", conditions=conditions)

    async def end_trainers(self, number: int, *indexes: int, code: int, words: str = "") -> None:
        """End trainers in pods in which another container still runs."""
        ended = {"terminated": {"exitCode": code, "message": words}}
        containers = [
            {"name": CONTAINER, "state": ended},
            {"name": "proxy", "state": {"running": {}}},
        ]
        for index in indexes:
            await self._tell(PODS, f"tiny-{number}-{index}", containerStatuses=containers)

    async def control(self, number: int) -> None:
        """Conclude the batch Job if it is to end; its other containers get no grace period."""
        batch_job = await self._batch_job(number)
        if any(condition(batch_job, kind) for kind in ("Complete", "Failed")):
            return
        if condition(batch_job, "SuccessCriteriaMet"):
            await self.conclude(number, "Complete")
        elif batch_job["spec"].get("activeDeadlineSeconds") == 1:
            await self.conclude(number, "Failed")

    async def _batch_job(self, number: int) -> Object:
        return await self.api.get(JOBS, f"tiny-{number}", "ns")

    async def prepare_pod(self, number: int, index: int, **init_containers: Object) -> None:
        """Give a pod init containers in these states, in their order, before its trainer starts."""
        statuses = [{"name": name, "state": state} for name, state in init_containers.items()]
        pod = await self.api.get(PODS, f"tiny-{number}-{index}", "ns")
        waiting = {"type": "Initialized", "status": "False"}
        await self._tell(
            PODS,
            pod["metadata"]["name"],
            {"waiting": {"reason": "PodInitializing"}},
            initContainerStatuses=statuses,
            conditions=[*pod["status"]["conditions"], waiting],
        )

    async def _tell(
        self, resource: Resource, name: str, state: Mapping[str, Any] | None = None, **status: Any
    ) -> None:
        if state is not None:
            status["containerStatuses"] = [{"name": CONTAINER, "state": state}]
        await self.api.patch(resource, name, "ns", {"status": status}, subresource="status")
