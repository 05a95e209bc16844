"""Batch Jobs that others suspend and resume while they train: one attempt trains at any time."""

import json
from functools import partial
from pathlib import Path

import pytest

from finetune_operator.kube.resources import JOBS, Object
from support.cluster.living_attempts import living_attempts
from support.cluster.operators import condition, wait_until
from support.cluster.real_jobs import NAMESPACE, Jobs
from support.cluster.real_volume import Volume

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ALONE, QUEUED = "alone", "queued"
"""A job without a queue, and one with; the test is its queue."""

ONE_PROCESS = {"nodes": 1, "gpusPerNode": 0, "processesPerNode": 1}


def suspend(jobs: Jobs, batch_job: str, value: bool) -> None:
    """Do as a queue does, or somebody with kubectl."""
    change = json.dumps({"spec": {"suspend": value}})
    jobs.kubectl("patch", "job", batch_job, "--type=merge", f"-p={change}")


def has_left(jobs: Jobs, name: str) -> bool:
    """Say whether no pod of the first attempt is left."""
    return not jobs.pods(name, 1)


def wait_for_checkpoint_of(jobs: Jobs, name: str, attempt: int) -> Object:
    """Return the job once that attempt has saved what it learned itself."""

    def look() -> Object | None:
        status = jobs.get(name)["status"]
        newest: Object = max(status["attempts"], key=lambda one: int(one["number"]), default={})
        last = (status.get("checkpoint") or {}).get("last")
        resumed = newest.get("resumedStep") if newest.get("number") == attempt else None
        is_its_own = last is not None and resumed is not None and last["step"] > resumed
        return jobs.get(name) if is_its_own else None

    return wait_until(look, 200, f"a checkpoint of attempt {attempt} of {name}") or {}


def test_a_batch_job_that_others_suspend_and_resume_trains_beside_no_other(
    jobs: Jobs, volume: Volume, tmp_path: Path
) -> None:
    names = (ALONE, QUEUED)

    def let_go(number: int) -> None:
        wait_until(lambda: jobs.api.get(JOBS, NAMESPACE, f"{QUEUED}-{number}"), 200)
        suspend(jobs, f"{QUEUED}-{number}", False)

    with living_attempts(jobs.cluster.given.kubeconfig, NAMESPACE) as seen:
        jobs.apply(ALONE, topology=ONE_PROCESS)
        jobs.apply(QUEUED, topology=ONE_PROCESS, queue={"name": "team"})
        let_go(1)
        for name in names:
            jobs.wait_for_checkpoint(name)
        for name in names:
            suspend(jobs, f"{name}-1", True)
        for name in names:
            wait_until(partial(has_left, jobs, name), 60, f"{name}-1 to leave")
            suspend(jobs, f"{name}-1", False)
        let_go(2)
        for name in names:
            made = wait_for_checkpoint_of(jobs, name, 2)
            assert made["status"]["restarts"] == {"counted": 0, "disruptions": 1}
            assert made["status"]["attempts"][0]["failureClass"] == "Preempted"
            for value in (True, False):
                suspend(jobs, f"{name}-1", value)
        steps = {name: jobs.get(name)["status"]["progress"]["step"] for name in names}

        def trains_on(name: str) -> bool:
            return bool(jobs.get(name)["status"]["progress"]["step"] > steps[name])

        for name in names:
            wait_until(partial(trains_on, name), 200, f"{name} to train on")
            batch_job = jobs.api.get(JOBS, NAMESPACE, f"{name}-1")
            assert condition(batch_job, "Failed")["status"] == "True"
            assert jobs.pods(name, 1) == []
        for name in names:
            jobs.delete(name)
    assert seen.most == dict.fromkeys(names, 1)
    for name in names:
        folder = volume.get(f"checkpoints/{name}", tmp_path / name)
        journals = folder.glob("**/logs/*/rank-0.jsonl")
        assert sorted(path.parent.name for path in journals) == ["attempt-1.1", "attempt-2.1"]
