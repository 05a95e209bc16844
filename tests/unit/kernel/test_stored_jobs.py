"""The operator takes over jobs as release 0.1.0 left them on an API server, each in its phase.

The stored objects were read from a real API server with real controllers (`release_0_1_0/jobs`).
Here they are in a cluster in memory, beside the operator of today.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

import pytest

from finetune_operator.api.cel import check_rules
from finetune_operator.api.crd import job_schema
from finetune_operator.api.defaults import with_defaults
from finetune_operator.api.structural import check_structure
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.kernel.queue import Result
from finetune_operator.kube.cache import key_of
from finetune_operator.kube.resources import (
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    PODS,
    Object,
)
from finetune_trainer.config import Phase, Progress
from support.cluster.last_release import stored_jobs, stored_objects
from support.cluster.played_pods import ProgressServer, end_pod
from support.kubernetes.kubernetes_world import CHILDREN, KubernetesWorld

KINDS = {one.kind: one for one in (FINE_TUNE_JOBS, *CHILDREN)}
# Recorded as spec.observability.metricsPort, of which each batch Job has a digest.
LOADING_PORT, TRAINING_PORT = 21001, 21002
LOADS = Progress(phase=Phase.LOADING)
TRAINS = Progress(phase=Phase.TRAINING, step=13, total_steps=100, loss=1.25)
ATTEMPTS = {
    "deleting": 1,
    "failed": 1,
    "pending": 0,
    "pending-with-its-batch-job": 0,
    "queued": 1,
    "restarting": 1,
    "running": 1,
    "running-again": 2,
    "starting": 1,
    "succeeded": 1,
    "suspended": 1,
    "suspending": 1,
}
Life = Callable[["StoredWorld"], Coroutine[Any, Any, None]]


class StoredWorld(KubernetesWorld):
    """A cluster with the objects of one stored job, seconds after they were recorded.

    Attributes:
        stored: The objects, the job first.
    """

    def __init__(self, name: str, pod_address: str) -> None:
        super().__init__(TRAINING_PORT)
        self.stored = stored_objects(name, pod_address)
        self.key = key_of(self.stored[0])
        (profile,) = stored_objects("profile", pod_address)
        self.api.load(FINE_TUNE_PROFILES, profile)
        for one in self.stored:
            self.api.load(KINDS[one["kind"]], one)
        self.now = newest_time(self.stored) + timedelta(seconds=1)

    async def look_once(self) -> Result:
        await self.catch_up()
        return await self.reconciler.reconcile(self.key)

    async def live(self, seconds: int) -> None:
        """Reconcile each second."""
        for _ in range(seconds):
            self.now += timedelta(seconds=1)
            await self.settle()

    async def change(self, **spec: Any) -> None:
        await self.api.patch(FINE_TUNE_JOBS, self.key.name, self.key.namespace, {"spec": spec})

    def uids(self) -> dict[str, str]:
        """Return the uids of the attempts by name."""
        found = self.api.objects(JOBS)
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}

    async def end_attempt(self, number: int, code: int) -> None:
        """End the pods of an attempt; they stay behind, and its batch Job fails."""
        batch_job = f"{self.key.name}-{number}"
        for pod in self.api.objects(PODS):
            if pod["metadata"]["ownerReferences"][0]["name"] == batch_job:
                await end_pod(self.api, pod, code)
                if "finalizers" in pod["metadata"]:
                    counted = {"metadata": {"finalizers": None}}
                    name = pod["metadata"]["name"]
                    await self.api.patch(PODS, name, self.key.namespace, counted)
        over = {"type": "Failed", "status": "True", "reason": "Played", "message": ""}
        status = {"status": {"conditions": [over]}}
        await self.api.patch(JOBS, batch_job, self.key.namespace, status, subresource="status")


def newest_time(objects: list[Object]) -> datetime:
    times: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                if key.endswith(("Time", "Timestamp")) and isinstance(item, str):
                    times.append(item)
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(objects)
    return max(datetime.fromisoformat(one) for one in times)


def take_over(name: str, life: Life) -> None:
    """Run the operator beside the objects of a stored job."""

    async def work() -> None:
        # A random loopback address: the ports are fixed, and another test may use them.
        address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.1"
        async with AsyncExitStack() as stack:
            for port, progress in ((LOADING_PORT, LOADS), (TRAINING_PORT, TRAINS)):
                serving = ProgressServer(progress).serving(address, port)
                await stack.enter_async_context(serving)
            await life(StoredWorld(name, address))

    asyncio.run(work())


def without_version(stored: Object) -> Object:
    copy = deepcopy(stored)
    del copy["metadata"]["resourceVersion"]
    return copy


def test_every_phase_is_stored() -> None:
    assert stored_jobs() == sorted(ATTEMPTS)


@pytest.mark.parametrize("name", stored_jobs())
def test_a_stored_job_is_parsed_whole_and_accepted(name: str) -> None:
    stored, *_ = stored_objects(name, "192.0.2.10")
    status = FineTuneJob.model_validate(stored).to_object()["status"]
    assert {key: status[key] for key in stored["status"]} == stored["status"]
    schema = job_schema()
    assert with_defaults(stored, schema) == stored
    findings = check_structure(stored, schema)
    assert [one for one in findings if one.path[0] != "metadata"] == []
    assert check_rules(stored, schema, [], old=stored) == []
    assert check_rules(stored["spec"], schema["properties"]["spec"]) == []


def test_the_stored_profile_is_parsed_whole() -> None:
    (stored,) = stored_objects("profile", "192.0.2.10")
    parsed = FineTuneProfile.model_validate(stored)
    assert (
        parsed.model_dump(by_alias=True, exclude_none=True, mode="json")["spec"] == stored["spec"]
    )


@pytest.mark.parametrize("name", [one for one, number in ATTEMPTS.items() if number])
def test_a_stored_job_keeps_its_phase_its_attempts_and_their_objects(name: str) -> None:
    async def life(world: StoredWorld) -> None:
        status, uids = world.stored[0]["status"], world.uids()
        await world.live(5)
        now = world.job["status"]
        assert now["attempt"] == status["attempt"] == ATTEMPTS[name]
        assert now["phase"] == status["phase"]
        assert now["attempts"] == status["attempts"]
        assert now.get("backendRef") == status.get("backendRef")
        assert now.get("checkpoint") == status.get("checkpoint")
        assert now["restarts"] == status["restarts"]
        assert world.uids() == uids
        for one in world.stored[1:]:
            metadata = one["metadata"]
            found = await world.api.get(KINDS[one["kind"]], metadata["name"], world.key.namespace)
            assert without_version(found) == without_version(one), metadata["name"]

    take_over(name, life)


def test_a_stored_job_without_an_attempt_starts_its_first() -> None:
    async def life(world: StoredWorld) -> None:
        await world.live(15)
        assert world.attempts == ["pending-1"]
        assert (world.job["status"]["phase"], world.job["status"]["attempt"]) == ("Starting", 1)

    take_over("pending", life)


def test_a_stored_job_whose_status_lacks_its_attempt_adopts_the_batch_job() -> None:
    async def life(world: StoredWorld) -> None:
        uids = world.uids()
        await world.live(15)
        status = world.job["status"]
        assert world.uids() == uids
        assert (status["phase"], status["attempt"]) == ("Starting", 1)
        assert status["backendRef"]["uid"] in uids.values()
        assert [one["number"] for one in status["attempts"]] == [1]

    take_over("pending-with-its-batch-job", life)


def test_a_stored_job_suspended_during_the_upgrade_stops_its_unrecorded_attempt() -> None:
    async def life(world: StoredWorld) -> None:
        uids = world.uids()
        await world.change(suspend=True)
        await world.live(5)
        assert world.uids() == uids
        assert world.job["status"]["phase"] == "Suspending"
        (batch_job,) = world.api.objects(JOBS)
        assert batch_job["spec"]["activeDeadlineSeconds"] == 1

    take_over("pending-with-its-batch-job", life)


@pytest.mark.parametrize(
    ("name", "number"), [("running", 1), ("running-again", 2), ("restarting", 1)]
)
def test_a_stored_job_that_loses_its_attempt_resumes_in_the_next(name: str, number: int) -> None:
    async def life(world: StoredWorld) -> None:
        status, uids = world.stored[0]["status"], world.uids()
        await world.live(2)
        await world.end_attempt(number, 137)
        await world.live(15)  # neither attempt of `running-again` has reported a step
        now = world.job["status"]
        # Batch Jobs of earlier attempts may be deleted.
        assert world.uids().items() >= {(f"{name}-{number}", uids[f"{name}-{number}"])}
        assert sorted(world.uids())[-1] == f"{name}-{number + 1}"
        assert now["attempt"] == number + 1
        ended = [one["failureClass"] for one in now["attempts"][:-1]]
        assert ended == ["WorkerLost"] * number
        assert now["checkpoint"] == status["checkpoint"]
        assert now["restarts"]["counted"] == number

    take_over(name, life)


def test_a_stored_suspended_job_resumes_in_the_next_attempt() -> None:
    async def life(world: StoredWorld) -> None:
        await world.live(2)
        await world.change(suspend=False)
        await world.live(15)
        status = world.job["status"]
        assert sorted(world.uids()) == ["suspended-1", "suspended-2"]
        assert (status["phase"], status["attempt"]) == ("Restarting", 2)
        assert status["checkpoint"] == world.stored[0]["status"]["checkpoint"]

    take_over("suspended", life)
