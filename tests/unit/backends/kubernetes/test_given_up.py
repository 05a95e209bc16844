"""An attempt that was given up never runs again, whoever resumes or edits its batch Job."""

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from finetune_operator.backends.kubernetes import observe
from finetune_operator.backends.kubernetes.finality import is_ending
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.api_errors import ConflictError
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import FINE_TUNE_JOBS, JOBS, PODS, Object, Resource
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import KEY
from support.kernel.virtual_time import run
from support.kubernetes.kubernetes_world import ADDRESS, CHILDREN, NODES, KubernetesWorld
from support.kubernetes.pod_objects import verdicts

TRAINS = Progress(phase=Phase.TRAINING, step=1, total_steps=10)
SAVED = Termination(failure_class=FailureClass.PREEMPTED, exit_code=75, message="saved step 7")
QUEUE = {"name": "team"}


def live(life: Callable[[KubernetesWorld], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        async with ProgressServer(TRAINS).serving(ADDRESS) as said:
            await life(KubernetesWorld(said.port))

    run(work())


async def first_runs(world: KubernetesWorld, **spec: Any) -> None:
    await world.apply(**spec)
    await world.settle()
    await world.suspend(1, False)  # its queue lets it go
    await world.make_pods(1)
    await world.run_pods(1, *range(NODES))
    await world.settle()


async def first_is_suspended(world: KubernetesWorld) -> None:
    """Somebody suspends the batch Job, and its pods save and leave."""
    await world.suspend(1)
    await world.end_pods(1, *range(NODES), code=75, words=SAVED.to_json())


async def look(world: KubernetesWorld, times: int = 6) -> None:
    """Result, though what is waited for may be told as an error."""
    for _ in range(times):
        await world.catch_up()
        with suppress(FineTuneError):
            await world.reconciler.reconcile(KEY)
    await world.catch_up()


def batch_job(world: KubernetesWorld, number: int) -> Object:
    return next(
        one for one in world.api.objects(JOBS) if one["metadata"]["name"] == f"tiny-{number}"
    )


def told(batch_job: Object) -> list[tuple[str, str]]:
    return [(one["type"], one["reason"]) for one in batch_job["status"]["conditions"]]


async def one_conflict(world: KubernetesWorld) -> None:
    """Reconcile while the first patch of a batch Job conflicts with another writer's."""
    is_first = True

    def refuse(verb: str, resource: Resource, name: str) -> None:
        nonlocal is_first
        if (verb, resource, is_first) == ("patch", JOBS, True):
            is_first = False
            raise ConflictError(409, "Conflict", "the object has been modified")

    world.api.before = refuse
    await world.catch_up()
    with pytest.raises(ConflictError):
        await world.reconciler.reconcile(KEY)


@pytest.mark.parametrize("queue", [None, QUEUE], ids=["without a queue", "with a queue"])
@pytest.mark.parametrize("resumed", ["at once", "before the next", "after the next", "never"])
def test_suspended_and_resumed_by_somebody_else_it_ends_before_the_next_one_starts(
    queue: Object | None, resumed: str
) -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world, **({"queue": queue} if queue else {}))
        await first_is_suspended(world)
        if resumed == "at once":
            await world.suspend(1, False)
        await world.settle()
        assert world.attempts == ["tiny-1"]
        if resumed == "before the next":
            await world.suspend(1, False)
            await world.make_pods(1)
            await world.settle()
        await world.let_go(1)
        await world.settle()
        assert world.attempts == ["tiny-1"], "it is not known to have ended"
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]
        if resumed == "after the next":
            await world.suspend(1, False)
            await world.make_pods(1)
        await world.suspend(2, False)
        await world.make_pods(2)
        await world.run_pods(2, *range(NODES))
        await world.settle()
        assert {one["metadata"]["name"][:6] for one in world.api.objects(PODS)} == {"tiny-2"}
        assert world.most_alive == 1
        status = world.job["status"]
        assert status["attempt"] == 2
        assert world.condition("ResourcesReady")["status"] == "True"
        assert status["restarts"] == {"counted": 0, "disruptions": 1}
        assert status["attempts"][0]["message"] == "saved step 7"

    live(life)


@pytest.mark.parametrize("resumed", [True, False])
def test_pods_that_have_saved_and_are_gone_before_anybody_looks_end_their_attempt(
    resumed: bool,
) -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await first_is_suspended(world)
        await world.catch_up()
        await world.let_go(1)
        if resumed:
            await world.suspend(1, False)
            await world.make_pods(1)
            await world.run_pods(1, *range(NODES))
        await world.settle()
        assert is_ending(batch_job(world, 1))
        assert world.attempts == ["tiny-1"]
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]
        status = world.job["status"]
        assert status["restarts"] == {"counted": 0, "disruptions": 1}
        assert status["attempts"][0]["message"] == "saved step 7"

    live(life)


def test_an_operator_that_starts_anew_knows_that_a_suspension_took_the_pods_away() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await first_is_suspended(world)
        await world.settle()
        assert told(batch_job(world, 1)) == [("FailureTarget", "GivenUp")]
        world.start_process()
        await world.let_go(1)
        await world.conclude(1, "Failed")
        await world.settle()
        first, second = world.job["status"]["attempts"]
        assert first["failureClass"] == "Preempted"
        assert "exitCode" not in first  # no process has reported one
        assert first["message"] == "Job tiny-1 was suspended by its queue or another client"
        assert second["number"] == 2

    live(life)


def test_a_job_that_fails_as_its_batch_job_was_suspended_leaves_nothing_to_resume() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world, restart_policy={"maxDisruptions": 0})
        await first_is_suspended(world)
        await world.settle()
        await world.let_go(1)
        await world.suspend(1, False)
        await world.make_pods(1)
        assert world.api.objects(PODS) == []
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.job["status"]["phase"] == "Failed"

    live(life)


def test_what_an_operator_before_left_suspended_is_ended_with_the_next_look() -> None:
    """Before version 0.2 a deadline was all that ended it, which a resumption begins anew."""

    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await world.end_pods(1, *range(NODES), code=137)
        await world.conclude(1, "Failed")
        await world.settle()
        await world.make_pods(2)
        await world.run_pods(2, *range(NODES))
        left: Object = {"status": {"conditions": []}}
        await world.api.patch(JOBS, "tiny-1", "ns", left, subresource="status")
        suspended = {"spec": {"suspend": True, "activeDeadlineSeconds": 1}}
        await world.api.patch(JOBS, "tiny-1", "ns", suspended)
        await world.settle()
        assert told(batch_job(world, 1)) == [("FailureTarget", "GivenUp")]
        assert world.job["status"]["attempt"] == 2

    live(life)


def test_a_deadline_that_somebody_takes_away_is_set_again() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await world.change(suspend=True)
        await world.settle()
        assert batch_job(world, 1)["spec"]["activeDeadlineSeconds"] == 1
        for undone in ({"activeDeadlineSeconds": None}, {"activeDeadlineSeconds": 3600}):
            await world.api.patch(JOBS, "tiny-1", "ns", {"spec": undone})
            await world.settle()
            assert batch_job(world, 1)["spec"]["activeDeadlineSeconds"] == 1
        await world.suspend(1)
        await world.settle()
        assert told(batch_job(world, 1)) == [("FailureTarget", "GivenUp")]

    live(life)


def test_one_that_is_resumed_just_when_it_is_given_up_is_ended_as_it_is_then() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await first_is_suspended(world)
        await one_conflict(world)
        await world.suspend(1, False)
        await world.settle()
        assert batch_job(world, 1)["spec"]["activeDeadlineSeconds"] == 1
        assert world.attempts == ["tiny-1"]

    live(life)


def test_one_whose_pods_are_gone_when_it_is_given_up_again_is_given_up() -> None:
    """Its controller, which counts the pods at that moment, was faster with its own write."""

    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await first_is_suspended(world)
        await one_conflict(world)
        await world.let_go(1)
        await world.settle()
        assert told(batch_job(world, 1)) == [("FailureTarget", "GivenUp")]
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]
        assert world.job["status"]["attempts"][0]["message"] == "saved step 7"

    live(life)


def test_an_attempt_whose_limit_of_failures_somebody_raised_is_ended_before_the_next_one() -> None:
    """Its controller would make a pod in the place of the one that failed."""

    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await world.api.patch(JOBS, "tiny-1", "ns", {"spec": {"backoffLimit": 6}})
        await world.end_pods(1, *range(NODES), code=137)
        await look(world)
        assert world.attempts == ["tiny-1"]
        assert batch_job(world, 1)["spec"]["activeDeadlineSeconds"] == 1
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]

    live(life)


def test_pods_that_failed_by_themselves_end_their_attempt_before_its_controller_says_so() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        await world.end_pods(1, *range(NODES), code=137)
        await look(world)
        assert world.job["status"]["attempts"][0]["failureClass"] == "WorkerLost"
        # It may not yet have, so that it is told to, and waited for.
        assert world.attempts == ["tiny-1"]
        assert batch_job(world, 1)["spec"]["activeDeadlineSeconds"] == 1
        await world.conclude(1, "Failed")
        await world.settle()
        assert world.attempts == ["tiny-1", "tiny-2"]

    live(life)


def test_a_batch_job_that_somebody_made_smaller_is_no_model() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        smaller = {"spec": {"completions": 0, "parallelism": 0}}
        await world.api.patch(JOBS, "tiny-1", "ns", smaller)
        for pod in world.api.objects(PODS):
            world.api.remove(PODS, pod["metadata"]["name"], "ns")
        await world.conclude(1, "Complete")
        await world.settle()
        status = world.job["status"]
        assert status["attempts"][0]["message"] == (
            "Job tiny-1 ended without finishing its work, because its completions were changed "
            "from 2 to 0"
        )
        assert status["attempt"] == 2

    live(life)


def seen_of(pods: Sequence[Object], **spec: Any) -> tuple[str, bool]:
    made: Object = {
        "metadata": {"name": "tiny-1", "namespace": "ns"},
        "spec": {"completions": 1, "parallelism": 1, "backoffLimit": 0, **spec},
        "status": {},
    }
    seen = observe.observation_of(made, verdicts(pods))
    return seen.phase.value, seen.all_gone


def ended(code: int, *, is_deleted: bool) -> Object:
    metadata: Object = {"name": "tiny-1-0", "uid": "p"}
    if is_deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    done = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")
    words = "" if code else done.to_json()
    state = {"terminated": {"exitCode": code, "message": words, "reason": "x"}}
    status = {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"name": "trainer", "state": state}],
    }
    return {"metadata": metadata, "spec": {"nodeName": "n"}, "status": status}


@pytest.mark.parametrize(
    ("pod", "spec", "expected"),
    [
        pytest.param(ended(1, is_deleted=False), {}, ("Failed", True), id="failed by itself"),
        pytest.param(ended(1, is_deleted=True), {}, ("Failed", False), id="told to leave"),
        pytest.param(
            ended(1, is_deleted=False), {"backoffLimit": 3}, ("Failed", False), id="is replaced"
        ),
        pytest.param(ended(0, is_deleted=False), {}, ("Succeeded", True), id="done"),
        pytest.param(
            ended(0, is_deleted=True), {"suspend": True}, ("Succeeded", False),
            id="done while it was suspended, and not counted",
        ),
    ],
)  # fmt: skip
def test_an_attempt_is_over_when_its_controller_can_make_no_other_pod(
    pod: Object, spec: Object, expected: tuple[str, bool]
) -> None:
    assert seen_of([pod], **spec) == expected


async def orphan(world: KubernetesWorld, resource: Resource, name: str) -> None:
    """Take away who owns it, as deleting that with --cascade=orphan does."""
    change: Object = {"metadata": {"ownerReferences": []}}
    await world.api.patch(resource, name, "ns", change)


def test_pods_of_a_batch_job_that_was_deleted_from_above_them_are_named_until_they_are_gone() -> (
    None
):
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        for index in range(NODES):
            await orphan(world, PODS, f"tiny-1-{index}")
        world.api.remove(JOBS, "tiny-1", "ns")
        await look(world)
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "CreationFailed")
        assert stalled["message"] == (
            "pod/tiny-1-0, pod/tiny-1-1 still run and belong to no FineTuneJob (an owner "
            "was deleted with --cascade=orphan), and two attempts must not write one checkpoint; "
            "to continue, kubectl delete -n ns pod/tiny-1-0 pod/tiny-1-1"
        )
        writes = world.writes_but_events
        await look(world)
        assert world.writes_but_events == writes, "the status goes to and fro"
        for index in range(NODES):
            world.api.remove(PODS, f"tiny-1-{index}", "ns")
        await world.settle()
        assert world.attempts == ["tiny-2"]
        assert world.condition("Stalled")["status"] == "False"

    live(life)


def test_what_a_job_deleted_with_orphans_has_left_is_named_with_how_to_delete_it() -> None:
    async def life(world: KubernetesWorld) -> None:
        await first_runs(world)
        uid = world.job["metadata"]["uid"]
        for name in world.attempts:
            await orphan(world, JOBS, name)
        world.api.remove(FINE_TUNE_JOBS, "tiny", "ns")
        await world.catch_up()
        await world.apply()
        await look(world)
        message = world.condition("Stalled")["message"]
        assert message.startswith("pod/tiny-1-0, pod/tiny-1-1 still run and belong to no")
        assert message.endswith(
            "to continue, kubectl delete -n ns jobs,pods,services,endpointslices,networkpolicies "
            f"-l '{JOB_UID_LABEL} in ({uid})'"
        )
        assert world.condition("Stalled")["status"] == "True"
        for kind in CHILDREN:
            for one in world.api.objects(kind):
                assert one["metadata"]["labels"][JOB_UID_LABEL] == uid
                world.api.remove(kind, one["metadata"]["name"], "ns")
        await world.settle()
        assert batch_job(world, 1)["metadata"]["ownerReferences"][0]["uid"] != uid

    live(life)
