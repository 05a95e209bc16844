"""FineTuneJobs in every stage, as an operator left them on an API server.

`make statuses` writes `statuses.yaml` again, which the tests of GitOps tools read; it needs
FINETUNE_TEST_KUBECONFIG. Every version of every job is read back by one watch, so that no stage is
too short to be seen.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.kube.resources import CONFIG_MAPS, FINE_TUNE_JOBS, Object
from finetune_operator.reconcile.conditions import Stage
from support.cluster.operators import (
    KUBECONFIG,
    Api,
    OperatorProcess,
    condition,
    open_api,
    wait_until,
)

FILE = Path(__file__).parents[2] / "statuses.yaml"
SECONDS = 30
HOLD = "example.com/hold"


@dataclass(frozen=True)
class Moment:
    """What of a job's life is recorded: the first version of it that says so.

    Attributes:
        what: In words, as the table of docs/how-to/gitops.md has it.
        job: Name of the job.
        reason: Of the condition Ready.
        stage: None where no operator has said anything about the job as it is.
        says: What else it says, as TYPE=STATUS.
    """

    what: str
    job: str
    reason: str
    stage: Stage | None
    says: tuple[str, ...] = ()

    def is_shown_by(self, made: Object) -> bool:
        """Say whether this version of the job is the one."""
        status = made["status"]
        is_seen = status["observedGeneration"] == made["metadata"]["generation"]
        said = {f"{one['type']}={one['status']}" for one in status["conditions"]}
        ready = next(one for one in status["conditions"] if one["type"] == "Ready")
        named = (made["metadata"]["name"], ready["reason"], is_seen)
        wanted = (self.job, self.reason, self.stage is not None)
        return named == wanted and said.issuperset(self.says)


MOMENTS = (
    Moment("created, no operator runs", "starts", "Pending", None),
    Moment("waits for nodes", "starts", "Provisioning", Stage.STARTING),
    Moment("no node has free capacity", "lacks-room", "Unschedulable", Stage.STARTING),
    Moment("waits in a queue", "queues", "Queued", Stage.STARTING),
    Moment("loads the model and the data", "loads", "Starting", Stage.STARTING),
    Moment("trains", "trains", "Training", Stage.RUNNING),
    Moment("trains, needs an action", "troubled", "Training", Stage.RUNNING, ("Stalled=True",)),
    Moment("progress unknown", "silent", "ProgressUnknown", Stage.UNHEARD),
    Moment("restarts after a failure", "restarts", "Restarting", Stage.RESTARTING),
    Moment("being suspended", "pauses", "Suspending", Stage.SUSPENDING),
    Moment("suspended", "pauses", "SuspendedByUser", Stage.SUSPENDED),
    Moment("created suspended", "rests", "SuspendedByUser", Stage.SUSPENDED),
    Moment(
        "resumed, next attempt blocked",
        "resumes",
        "SuspendedByUser",
        Stage.RESUMING,
        ("Ready=False",),
    ),
    Moment("resumed, no operator runs", "left", "SuspendedByUser", None),
    Moment("complete", "completes", "Completed", Stage.COMPLETE),
    Moment("failed", "fails", "RestartLimitExceeded", Stage.FAILED),
    Moment("being stopped at a deadline", "late", "PendingDeadlineExceeded", Stage.ENDING),
    Moment(
        "failed at a deadline", "late", "PendingDeadlineExceeded", Stage.FAILED, ("Failed=True",)
    ),
    Moment("spec refused", "refused", "InvalidSpec", Stage.REFUSED),
    Moment("profile missing", "no-profile", "InvalidSpec", Stage.REFUSED),
    Moment("attempt cannot be created", "blocked", "CreationFailed", Stage.BLOCKED),
    Moment(
        "being stopped, ended by another writer",
        "overruled",
        "EndedByOthers",
        Stage.OVERRULED,
    ),
    Moment(
        "ended by another writer",
        "overruled",
        "EndedByOthers",
        Stage.ABANDONED,
        ("Stalled=True",),
    ),
    Moment("running, backend not found", "held", "BackendNotFound", Stage.HELD),
    Moment("deleted, attempt is stopping", "deleted", "Deleting", Stage.DELETING),
    Moment(
        "deleted, held by a finalizer", "deleted", "Deleting", Stage.DELETED, ("Running=False",)
    ),
)


def record(api: Api, namespace: str) -> dict[str, Object]:
    """Let jobs live in an empty namespace until all moments were there; return each by its words.

    Raises:
        AssertionError: one was not seen.
    """
    start = api.run(api.client.list(FINE_TUNE_JOBS, namespace)).resource_version
    api.apply(namespace, "starts")
    api.apply(namespace, "rests", suspend=True)
    with OperatorProcess(api.kubeconfig, namespace) as operator:
        operator.wait_for("synced")
        _live(api, namespace)
    # The next one lacks the backend of these jobs.
    fake = "fake=support.kernel.fake_backend:FakeBackend"
    api.change(namespace, "left", suspend=False)
    with OperatorProcess(api.kubeconfig, namespace, "two", backends=fake) as operator:
        operator.wait_for("synced")
        _reach(api, namespace, "held", "BackendNotFound")
    return api.run(_seen_since(api, namespace, start))


async def _seen_since(api: Api, namespace: str, start: str) -> dict[str, Object]:
    """Read every version that the jobs had since then, until all moments are seen."""
    seen: dict[str, Object] = {}
    watch = api.client.watch(
        FINE_TUNE_JOBS, namespace, resource_version=start, timeout_seconds=SECONDS
    )
    async for event in watch:
        if event.type not in ("ADDED", "MODIFIED"):
            continue
        made = _trimmed(event.object)
        for moment in MOMENTS:
            if moment.what not in seen and moment.is_shown_by(made):
                seen[moment.what] = made
        if len(seen) == len(MOMENTS):
            break
    missing = [moment.what for moment in MOMENTS if moment.what not in seen]
    assert not missing, f"never seen: {missing}"
    return {moment.what: seen[moment.what] for moment in MOMENTS}


def _live(api: Api, namespace: str) -> None:
    """Bring each job to where it is to be recorded."""

    def begin(name: str, play: dict[str, str], **fields: Any) -> None:
        api.apply(namespace, name, **fields)
        wait_until(lambda: f"{name}-1" in api.attempts(namespace), SECONDS)
        if play:
            api.play(namespace, f"{name}-1", **play)

    def reach(name: str, reason: str, kind: str = "Ready") -> None:
        _reach(api, namespace, name, reason, kind)

    trains = {"phase": "Running", "ready": "1", "step": "3"}
    stuck = {"reason": "CreationFailed", "message": "the quota allows no more"}
    lost = {"phase": "Failed", "code": "137", "message": "a node is gone"}
    begin("lacks-room", {"reason": "Unschedulable", "message": "no node has 8 GPUs"})
    begin("queues", {"reason": "Queued", "message": "the queue is full"})
    begin("loads", {"phase": "Running", "ready": "1"})
    begin("silent", {"phase": "Running", "ready": "1", "unheard": "its page does not respond"})
    for name in ("blocked", "resumes"):  # the name of its attempt is taken
        body = {"metadata": {"name": f"{name}-1"}}
        api.run(api.client.create(CONFIG_MAPS, body, namespace))
        api.apply(namespace, name)
        reach(name, "CreationFailed", "Stalled")
    begin("restarts", lost)
    begin("fails", {**lost, "gone": "yes"}, restartPolicy={"maxRestarts": 0})
    begin("late", {}, deadlines={"pendingSeconds": 1})
    for name in ("trains", "troubled", "pauses", "left", "completes", "overruled", "held"):
        begin(name, trains)
    api.apply(namespace, "refused", model__revision="forbidden")
    absent = {"type": "kubernetes", "kubernetes": {"profile": "absent"}}
    api.apply(namespace, "no-profile", output__uri="pvc://models/{name}", backend=absent)
    begin("deleted", trains)
    api.run(
        api.client.patch(FINE_TUNE_JOBS, "deleted", namespace, {"metadata": {"finalizers": [HOLD]}})
    )
    for name in ("troubled", "pauses", "left", "completes", "overruled", "held", "deleted"):
        reach(name, "Training")
    api.play(namespace, "troubled-1", **stuck)
    api.play(namespace, "completes-1", phase="Succeeded", step="10", code="0", gone="yes")
    api.delete(namespace, "deleted")
    _end_as_others_do(api, namespace, "overruled")
    for name in ("pauses", "left", "resumes"):
        api.change(namespace, name, suspend=True)
        reach(name, "SuspendedByUser")
    api.change(namespace, "resumes", suspend=False, model={"revision": "lingers"})
    for name, reason, kind in (
        ("resumes", "SuspendedByUser", "Reconciling"),
        ("troubled", "CreationFailed", "Stalled"),
        ("overruled", "EndedByOthers", "Stalled"),
        ("late", "PendingDeadlineExceeded", "Failed"),
        ("fails", "RestartLimitExceeded", "Failed"),
        ("no-profile", "InvalidSpec", "Stalled"),
        ("refused", "InvalidSpec", "Stalled"),
        ("completes", "Completed", "Complete"),
    ):
        reach(name, reason, kind)
    for name, reason in (
        ("lacks-room", "Unschedulable"),
        ("queues", "Queued"),
        ("loads", "Starting"),
        ("trains", "Training"),
        ("silent", "ProgressUnknown"),
        ("restarts", "Restarting"),
        ("rests", "SuspendedByUser"),
        ("starts", "Provisioning"),
    ):
        reach(name, reason)
    wait_until(
        lambda: condition(api.job(namespace, "deleted"), "Running")["status"] == "False", SECONDS
    )


def _reach(api: Api, namespace: str, name: str, reason: str, kind: str = "Ready") -> None:
    """Wait until a condition of the job has a reason; other kinds than Ready have to be True."""

    def is_there() -> bool:
        found = condition(api.job(namespace, name), kind)
        return found.get("reason") == reason and (kind == "Ready" or found["status"] == "True")

    wait_until(is_there, SECONDS, f"{name} says {kind} for {reason}")


def _end_as_others_do(api: Api, namespace: str, name: str) -> None:
    """Write that the job is Complete, as no operator does while an attempt runs."""
    there = api.job(namespace, name)
    assert there is not None
    said = {"type": "Complete", "status": "True", "reason": "Elsewhere", "message": "it is done"}
    status = {"conditions": [*there["status"]["conditions"], said]}
    api.run(
        api.client.patch(FINE_TUNE_JOBS, name, namespace, {"status": status}, subresource="status")
    )


def _trimmed(made: Object) -> Object:
    """Return what GitOps tools judge by; times are left out, as they differ with each recording."""
    metadata = {key: made["metadata"][key] for key in ("name", "generation")}
    if "deletionTimestamp" in made["metadata"]:
        metadata["deletionTimestamp"] = "1970-01-01T00:00:00Z"
    status = {key: made["status"][key] for key in ("phase", "observedGeneration")}
    keys = ("type", "status", "reason", "message")
    told = [{key: one[key] for key in keys} for one in made["status"]["conditions"]]
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "metadata": metadata,
        "spec": {"suspend": made["spec"]["suspend"]},
        "status": {**status, "conditions": told},
    }


def text_of(found: dict[str, Object]) -> str:
    """Return the file's text."""
    return f"# Recorded by `make statuses`.\n{yaml.safe_dump(found, sort_keys=False, width=100)}"


def main() -> int:
    """Write the file; return the exit code."""
    if KUBECONFIG is None:
        print("FINETUNE_TEST_KUBECONFIG names no cluster; the statuses are recorded on a real one")
        return 2
    with open_api(KUBECONFIG) as api, api.namespace("statuses") as namespace:
        found = record(api, namespace)
    FILE.write_text(text_of(found), encoding="utf-8")
    print(f"wrote {len(found)} jobs to {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
