"""The profile that a first attempt got is kept for later ones, and not what somebody made of it."""

import asyncio
import json
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from finetune_operator.backends.kubernetes.attempt_profiles import digest_of
from finetune_operator.backends.kubernetes.child_names import PROFILE_ANNOTATION
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, Resource
from support.kubernetes.kubernetes_world import KubernetesWorld

NOBODY = 9400  # where no progress is served, as no pod runs here


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(what)


async def with_a_failed_attempt(world: KubernetesWorld, after_seconds: float = 60) -> None:
    """Let the first attempt fail so long after its opening, before the next reconcile."""
    await world.apply()
    await world.settle()
    await world.make_pods(1)
    world.now += timedelta(seconds=after_seconds)
    await world.settle()
    await world.end_pods(1, 0, 1, code=137)
    await world.conclude(1, "Failed")


async def edit_image(world: KubernetesWorld) -> None:
    """Write another image into the snapshot, as who may patch batch Jobs can."""
    made = await world.api.get(JOBS, "tiny-1", "ns")
    snapshot = json.loads(made["metadata"]["annotations"][PROFILE_ANNOTATION])
    snapshot["spec"]["image"] = "registry.test/mine:1"
    change = {"metadata": {"annotations": {PROFILE_ANNOTATION: json.dumps(snapshot)}}}
    await world.api.patch(JOBS, "tiny-1", "ns", change)


def image_of(world: KubernetesWorld, name: str) -> str:
    made = next(one for one in world.api.objects(JOBS) if one["metadata"]["name"] == name)
    return str(made["spec"]["template"]["spec"]["containers"][0]["image"])


def test_a_snapshot_that_was_changed_is_refused_until_its_batch_job_is_deleted() -> None:
    async def work() -> None:
        world = KubernetesWorld(NOBODY)
        await with_a_failed_attempt(world)
        await edit_image(world)
        for _ in range(2):
            await world.settle()
            assert world.attempts == ["tiny-1"]
            told = world.condition("Stalled")
            assert (told["status"], told["message"]) == (
                "True",
                "spec.backend.kubernetes.profile default is stored for later attempts on Job "
                "tiny-1, but its snapshot was changed; delete that Job to continue without it",
            )
            world.start_process()
        await world.api.delete(JOBS, "tiny-1", "ns")
        await world.settle()
        assert world.attempts == ["tiny-2"]
        assert image_of(world, "tiny-2") == "registry.test/trainer:1"

    run(work())


def test_snapshot_changed_before_its_digest_is_written_is_refused() -> None:
    async def work() -> None:
        world = KubernetesWorld(NOBODY)
        await world.apply()
        await world.settle()
        assert "digest" not in world.job["status"]["attempts"][0]
        await edit_image(world)
        await world.make_pods(1)
        await world.end_pods(1, 0, 1, code=137)
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1"]
        assert world.condition("Stalled")["message"].startswith(
            "spec.backend.kubernetes.profile default"
        )

    run(work())


def test_the_digest_of_a_snapshot_costs_no_write() -> None:
    async def work() -> None:
        world = KubernetesWorld(NOBODY)
        patches: list[str] = []
        count = world.api.after

        def note(verb: str, resource: Resource, name: str) -> None:
            count(verb, resource, name)
            if (verb, resource) == ("patch", FINE_TUNE_JOBS):
                patches.append(world.job["status"]["phase"])

        world.api.after = note
        await with_a_failed_attempt(world, after_seconds=20)
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]
        await world.make_pods(2)
        await world.settle()
        assert patches == ["Starting", "Restarting"]
        first, second = world.job["status"]["attempts"]
        assert len(first["digest"]) == 64
        assert "digest" not in second  # it goes out with what is next to tell
        await world.end_pods(2, 0, 1, code=137)
        await world.conclude(2, "Failed")
        await world.settle()
        world.now += timedelta(seconds=10)
        await world.settle()
        digests = [one.get("digest") for one in world.job["status"]["attempts"]]
        assert digests == [
            first["digest"],
            digest_of(await world.api.get(JOBS, "tiny-2", "ns")),
            None,
        ]

    run(work())
