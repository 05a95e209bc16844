"""The operator as a real process on an API server: from apply to Complete, and its budget."""

import asyncio
import gc
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import ClassVar

import pytest

from finetune_operator.kernel.leader_term import LeaderTerm
from finetune_operator.kernel.run import operate
from finetune_operator.kernel.settings import Settings
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import CONFIG_MAPS, LEASES
from finetune_operator.kube.watch import Watch
from finetune_operator.reconcile.decide import RECHECK_SECONDS
from support.cluster.operators import Api, OperatorProcess, condition, wait_until
from support.kernel.fake_backend import FakeBackend


@pytest.fixture(scope="module")
def shared(api: Api) -> Iterator[tuple[OperatorProcess, str]]:
    """One operator for all tests that do it no harm, and its namespace."""
    with api.namespace("kernel") as name, OperatorProcess(api.kubeconfig, name) as operator:
        operator.wait_for("synced")
        yield operator, name


WRITES = ("create", "update", "patch", "delete")
PROMPT_SECONDS = RECHECK_SECONDS / 2
"""Long before a job would be looked at anyway, on however slow a machine."""


def test_twenty_jobs_run_to_completion_within_the_write_budget(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    operator, namespace = shared
    names = [f"many-{number:02d}" for number in range(20)]
    for name in names:
        api.apply(namespace, name)
    first = [f"{name}-1" for name in names]
    wait_until(lambda: api.attempts(namespace) == first, 20)
    for name in first:
        api.play(namespace, name, phase="Pending", ready="0")
        api.play(namespace, name, phase="Running", ready="1")
        api.play(namespace, name, step="1")
    wait_until(lambda: all(api.phase(namespace, name) == "Running" for name in names), 20)
    # An Event follows the status that it tells of.
    wait_until(lambda: operator.calls("create").get("create events 201") == 40, PROMPT_SECONDS)
    start = operator.calls(*WRITES)
    patches = start.pop("patch finetunejobs 200")  # one of a job that runs within 3 s
    assert 20 <= patches <= 40
    assert start == {"create configmaps 201": 20, "create events 201": 40}
    for name in first:
        api.play(namespace, name, phase="Succeeded", step="10", code="0", gone="yes")
    wait_until(lambda: all(api.phase(namespace, name) == "Succeeded" for name in names), 20)
    done = api.job(namespace, names[0])
    assert condition(done, "Complete")["status"] == "True"
    assert done is not None
    assert done["status"]["artifacts"] == [f"file:///{namespace}/{first[0]}"]
    assert "finalizers" not in done["metadata"]
    assert "annotations" not in done["metadata"]
    wait_until(lambda: len(api.events(namespace, names[0])) == 3, PROMPT_SECONDS)
    assert api.events(namespace, names[0]) == ["AttemptCreated", "Completed", "Training"]
    assert operator.calls(*WRITES)["patch finetunejobs 200"] == patches + 20


def test_a_job_that_git_would_make_again_is_warned_about(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    labels = {"kustomize.toolkit.fluxcd.io/name": "jobs"}
    api.apply(namespace, "kept", labels=labels, ttlSecondsAfterFinished=600)
    wait_until(lambda: "WillBeRecreated" in api.events(namespace, "kept"), PROMPT_SECONDS)


def test_a_failed_attempt_is_followed_by_the_next_once_it_is_gone(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "again")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "again-1"), PROMPT_SECONDS)
    api.play(namespace, "again-1", phase="Failed", code="137")
    wait_until(lambda: api.phase(namespace, "again") == "Restarting", PROMPT_SECONDS)
    assert api.get(CONFIG_MAPS, namespace, "again-2") is None
    api.play(namespace, "again-1", gone="yes")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "again-2"), PROMPT_SECONDS)
    job = api.job(namespace, "again")
    assert job is not None
    assert job["status"]["restarts"]["counted"] == 1


def test_what_keeps_an_attempt_waiting_is_told_at_once(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "waits")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "waits-1"), PROMPT_SECONDS)
    api.play(namespace, "waits-1", reason="Unschedulable", message="no node has 8 GPUs")
    ready = wait_until(
        lambda: [
            one
            for one in [condition(api.job(namespace, "waits"), "ResourcesReady")]
            if one.get("reason") == "Unschedulable"
        ],
        PROMPT_SECONDS,
    )[0]
    assert (ready["status"], ready["message"]) == ("False", "no node has 8 GPUs")


def test_suspend_stops_the_attempt_and_resume_opens_the_next(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "pause")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "pause-1"), PROMPT_SECONDS)
    api.play(namespace, "pause-1", phase="Running", ready="1", step="3")
    api.change(namespace, "pause", suspend=True)
    wait_until(lambda: api.phase(namespace, "pause") == "Suspended", PROMPT_SECONDS)
    api.change(namespace, "pause", suspend=False)
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "pause-2"), PROMPT_SECONDS)


def test_a_spec_the_backend_refuses_is_told_and_recovers_when_mended(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "wrong", model__revision="forbidden")
    wait_until(
        lambda: condition(api.job(namespace, "wrong"), "Accepted")["status"] == "False",
        PROMPT_SECONDS,
    )
    refused = api.job(namespace, "wrong")
    sentence = "spec.model.revision forbidden is not allowed; use another"
    assert condition(refused, "Accepted")["message"] == sentence
    assert condition(refused, "Stalled")["status"] == "True"
    api.change(namespace, "wrong", suspend=True)
    api.change(namespace, "wrong", suspend=False, model={"revision": "main"})
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "wrong-1"), PROMPT_SECONDS)
    wait_until(
        lambda: condition(api.job(namespace, "wrong"), "Stalled")["status"] == "False",
        PROMPT_SECONDS,
    )


def test_a_backend_that_is_not_installed_is_named_with_those_that_are(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "unknown", backend={"type": "nowhere"})
    wait_until(
        lambda: condition(api.job(namespace, "unknown"), "Accepted")["status"] == "False",
        PROMPT_SECONDS,
    )
    accepted = condition(api.job(namespace, "unknown"), "Accepted")
    assert accepted["reason"] == "BackendNotFound"
    assert "configmap" in accepted["message"]


def test_an_object_of_somebody_else_in_the_way_stalls_the_job_and_is_left_alone(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    theirs = {"metadata": {"name": "taken-1"}, "data": {"theirs": "yes"}}
    before = api.run(api.client.create(CONFIG_MAPS, theirs, namespace))
    api.apply(namespace, "taken")
    wait_until(
        lambda: condition(api.job(namespace, "taken"), "Stalled")["status"] == "True",
        PROMPT_SECONDS,
    )
    job = api.job(namespace, "taken")
    message = condition(job, "ResourcesReady")["message"]
    assert message == "ConfigMap taken-1 belongs to nobody ; delete it or rename this job"
    assert api.get(CONFIG_MAPS, namespace, "taken-1") == before
    api.run(api.client.delete(CONFIG_MAPS, "taken-1", namespace))
    api.change(namespace, "taken", ttlSecondsAfterFinished=None, deadlines={"hangSeconds": 99})
    wait_until(lambda: "taken-1" in api.attempts(namespace), PROMPT_SECONDS)
    wait_until(
        lambda: condition(api.job(namespace, "taken"), "Stalled")["status"] == "False",
        PROMPT_SECONDS,
    )


def test_a_job_that_another_controller_manages_is_left_alone(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    theirs = api.apply(namespace, "theirs", managedBy="example.com/other")
    api.apply(namespace, "ours")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "ours-1"), PROMPT_SECONDS)
    assert api.job(namespace, "theirs") == theirs
    assert "theirs-1" not in api.attempts(namespace)


def test_a_job_of_another_namespace_is_left_alone(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    with api.namespace("elsewhere") as elsewhere:
        there = api.apply(elsewhere, "far")
        api.apply(namespace, "near")
        wait_until(lambda: api.get(CONFIG_MAPS, namespace, "near-1"), PROMPT_SECONDS)
        assert api.job(elsewhere, "far") == there


NAMELESS = ("unshare", "--map-user=54321", "env", "-u", "USER", "-u", "LOGNAME", "-u", "USERNAME")
"""Runs a command under a uid that has no line in /etc/passwd, as a container's user has none."""


def may_be_nameless() -> bool:
    try:
        return subprocess.run([*NAMELESS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_be_nameless(), reason="unshare --map-user does not work here")
def test_a_user_without_a_name_hears_of_new_jobs_as_any_other(api: Api) -> None:
    with (
        api.namespace("nameless") as namespace,
        OperatorProcess(api.kubeconfig, namespace, run_by=NAMELESS) as operator,
    ):
        operator.wait_for("synced")
        api.apply(namespace, "late")  # only kopf tells of it
        wait_until(lambda: api.get(CONFIG_MAPS, namespace, "late-1"), PROMPT_SECONDS)
        assert operator.said("kopf failed") == []


def test_of_several_namespaces_each_is_served_and_no_other(api: Api) -> None:
    with (
        api.namespace("a") as one,
        api.namespace("b") as two,
        api.namespace("c") as three,
        OperatorProcess(api.kubeconfig, one, namespaces=f"{one},{two}") as operator,
    ):
        operator.wait_for("synced")
        there = api.apply(three, "far")
        for namespace in (one, two):
            api.apply(namespace, "near")
        served = (one, two)
        wait_until(
            lambda: all(api.get(CONFIG_MAPS, each, "near-1") for each in served), PROMPT_SECONDS
        )
        for namespace in served:
            api.play(namespace, "near-1", phase="Running", ready="1", step="1")
        wait_until(
            lambda: all(api.phase(each, "near") == "Running" for each in served), PROMPT_SECONDS
        )
        assert api.job(three, "far") == there


def test_deleting_a_running_job_leaves_nothing_behind(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    operator, namespace = shared
    api.apply(namespace, "short")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "short-1"), PROMPT_SECONDS)
    api.delete(namespace, "short")
    wait_until(lambda: api.get(CONFIG_MAPS, namespace, "short-1") is None, 30)
    assert api.job(namespace, "short") is None
    assert operator.health("healthz")["complaints"] == []


def test_a_job_whose_attempt_is_outside_the_cluster_waits_for_its_end(
    api: Api, shared: tuple[OperatorProcess, str]
) -> None:
    _, namespace = shared
    api.apply(namespace, "outside", backend={"type": "fake"})
    wait_until(
        lambda: (api.job(namespace, "outside") or {})["status"].get("backendRef"), PROMPT_SECONDS
    )
    job = api.job(namespace, "outside")
    assert job is not None
    assert job["metadata"]["finalizers"] == ["finetune.dev/backend"]
    api.delete(namespace, "outside")
    wait_until(lambda: api.job(namespace, "outside") is None, PROMPT_SECONDS)


@pytest.mark.full
def test_a_plugin_whose_import_hangs_keeps_no_other_from_its_jobs_and_no_process_from_its_end(
    api: Api,
) -> None:
    backends = (
        "configmap=support.kernel.configmap_backend:ConfigMapBackend,"
        "hung=support.kernel.plugin_that_hangs:Any"
    )
    with (
        api.namespace("hung") as name,
        OperatorProcess(api.kubeconfig, name, backends=backends) as operator,
    ):
        api.apply(name, "others")
        api.apply(name, "hung", backend={"type": "hung"})
        wait_until(lambda: api.get(CONFIG_MAPS, name, "others-1"), 60)
        wait_until(lambda: condition(api.job(name, "hung"), "Stalled")["status"] == "True", 20)
        told = condition(api.job(name, "hung"), "Stalled")
        assert told["reason"] == "BackendFailed"
        assert told["message"].startswith("spec.backend.type hung: its import took more than 10 s")
        assert operator.health("healthz")["code"] == 200
        assert operator.end() == 0


class NoKinds(tuple[Watch, ...]):
    def __iter__(self) -> Iterator[Watch]:
        raise RuntimeError("a fault that ends the operator")


class FaultyBackend(FakeBackend):
    """A plugin with a fault that nobody has thought of."""

    watches: ClassVar[tuple[Watch, ...]] = NoKinds()


def test_an_operator_that_a_fault_ends_gives_its_lease_back(api: Api) -> None:
    with api.namespace("fault") as namespace:
        settings = Settings(
            kubeconfig=api.kubeconfig,
            lease_namespace=namespace,
            health_host="127.0.0.1",
            health_port=0,
        )
        backends = {"faulty": FaultyBackend()}
        with pytest.raises(RuntimeError, match="a fault that ends the operator"):
            asyncio.run(operate(settings, asyncio.Event(), backends=backends))
        lease = api.get(LEASES, namespace, settings.lease_name)
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""
        assert lease["spec"]["leaseTransitions"] == 0


def test_the_caches_of_a_term_are_freed_once_the_lease_is_lost(api: Api) -> None:
    with api.namespace("lost") as namespace:
        settings = Settings(
            kubeconfig=api.kubeconfig,
            namespaces=(namespace,),
            lease_namespace=namespace,
            health_host="127.0.0.1",
            health_port=0,
            lease_seconds=3,
            renew_deadline_seconds=2,
            renew_seconds=0.2,
        )
        gc.collect()
        gc.disable()  # an operator runs it rarely
        try:
            held, left = asyncio.run(_lose_lease(settings, namespace))
        finally:
            gc.enable()
        assert held == 1
        assert left == 0


async def _lose_lease(settings: Settings, namespace: str) -> tuple[int, int]:
    """Return the numbers of terms in memory before and after another replica took the Lease."""
    stop = asyncio.Event()
    operator = asyncio.create_task(operate(settings, stop, backends={"fake": FakeBackend()}))
    async with await HttpClient.connect(settings.kubeconfig) as client:
        await _until(lambda: len(_terms()) == 1)
        held = len(_terms())
        lost = {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 60}}
        await client.patch(LEASES, settings.lease_name, namespace, lost)
        with suppress(TimeoutError):
            await _until(lambda: not _terms())
        left = len(_terms())
    stop.set()
    await operator
    return held, left


async def _until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.1)


def _terms() -> list[object]:
    return [obj for obj in gc.get_objects() if type(obj) is LeaderTerm]
