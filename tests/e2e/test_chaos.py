"""Faults on real nodes: other containers, disk limits, init containers, deleted children."""

from collections.abc import Iterator
from functools import partial

import pytest

from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    JOBS,
    NETWORK_POLICIES,
    SERVICES,
    Object,
    Resource,
)
from support.cluster.injected import injected, version_of_policies
from support.cluster.operators import condition, wait_until
from support.cluster.real_jobs import NAMESPACE, Jobs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ONE_PROCESS = {"nodes": 1, "gpusPerNode": 0, "processesPerNode": 1}
ENDLESS = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
WRITES = "import time; open('/tmp/x', 'wb').write(bytes(60 << 20)); time.sleep(3600)"
PROGRAMS = {
    "sidecar": ("containers", ENDLESS, "1Gi"),
    "evicted": ("containers", WRITES, "20Mi"),
    "init": ("initContainers", "raise SystemExit(3)", "1Gi"),
}


@pytest.fixture(scope="module")
def begun(jobs: Jobs) -> Iterator[Jobs]:
    """The jobs whose pods get another container; they run beside each other."""
    if not version_of_policies(jobs.cluster):
        pytest.skip("the API server does not serve MutatingAdmissionPolicy")
    with injected(jobs.cluster, NAMESPACE, PROGRAMS):
        jobs.apply("sidecar", training={"maxSteps": 5}, topology=ONE_PROCESS)
        jobs.apply("evicted", topology=ONE_PROCESS, restartPolicy={"maxRestarts": 0})
        jobs.apply("init", topology=ONE_PROCESS)
        yield jobs
        for name in PROGRAMS:
            jobs.delete(name)


def first(jobs: Jobs, name: str) -> Object | None:
    """Return the first attempt of a job once it has ended."""
    attempts = jobs.get(name)["status"].get("attempts", [])
    ended = [one for one in attempts if one["number"] == 1 and "endTime" in one]
    return ended[0] if ended else None


def test_a_failing_init_container_is_named_and_the_restart_is_free(begun: Jobs) -> None:
    attempt = wait_until(partial(first, begun, "init"), 120, "the end of attempt 1") or {}
    assert attempt["failureClass"] == "NotStarted"
    assert "exitCode" not in attempt
    assert "init container added of pod init-1-0" in attempt["message"]
    assert "exit code 3" in attempt["message"]
    assert begun.get("init")["status"]["restarts"]["counted"] == 0


def test_a_pod_that_exceeds_its_own_disk_limit_is_evicted_and_counted(begun: Jobs) -> None:
    failed = condition(begun.wait("evicted", "Failed"), "Failed")
    attempt = first(begun, "evicted") or {}
    assert attempt["failureClass"] == "Evicted"
    assert "ephemeral" in attempt["message"]
    assert failed["reason"] == "RestartLimitExceeded"
    assert attempt["message"] in failed["message"]


def test_a_job_with_an_endless_sidecar_is_complete_and_never_trained_again(begun: Jobs) -> None:
    job = begun.wait("sidecar", "Complete")
    (attempt,) = job["status"]["attempts"]
    assert attempt["failureClass"] == "Completed"
    assert "Completing" in begun.events("sidecar")

    def is_complete() -> bool:
        batch_job = begun.api.get(JOBS, NAMESPACE, "sidecar-1")
        return bool(condition(batch_job, "Complete").get("status") == "True")

    wait_until(is_complete, 60, "the batch Job to be Complete")


def test_deleted_children_are_restored_and_a_deleted_batch_job_is_a_free_restart(
    jobs: Jobs,
) -> None:
    jobs.apply("children")
    jobs.wait_for_checkpoint("children")
    kinds = (NETWORK_POLICIES, SERVICES, ENDPOINT_SLICES)
    names = {kind: child(jobs, kind) for kind in kinds}
    jobs.kubectl("delete", *(f"{kind.plural}/{name}" for kind, (name, _) in names.items()))
    for kind, (_, uid) in names.items():
        wait_until(partial(is_new, jobs, kind, uid), 60, f"another {kind.kind}")
    assert jobs.get("children")["status"]["attempt"] == 1
    jobs.kubectl("delete", "job", "children-1", "--wait=false")
    attempt = wait_until(partial(first, jobs, "children"), 120, "the end of attempt 1") or {}
    assert attempt["failureClass"] == "Preempted"
    assert jobs.get("children")["status"]["restarts"] == {"counted": 0, "disruptions": 1}
    jobs.delete("children")


def child(jobs: Jobs, kind: Resource) -> tuple[str, str]:
    """Return name and uid of the job's object of a kind; both are empty without one."""
    plural = kind.plural
    own = ("--selector", "finetune.dev/job=children", "--namespace", NAMESPACE)
    found = jobs.cluster.list(plural, *own)
    return next(((o["metadata"]["name"], o["metadata"]["uid"]) for o in found), ("", ""))


def is_new(jobs: Jobs, kind: Resource, uid: str) -> bool:
    """Return whether the job has an object of a kind with another uid."""
    return child(jobs, kind)[1] not in ("", uid)
