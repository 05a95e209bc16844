"""Bring jobs of the release into each phase on a real API server, and store them.

`record.py` calls it with the folder of the release's packages, which are also on PYTHONPATH, as are
the release's test helpers. API server and controllers are real, the operator is the release's, and
this script plays the kubelet. Each file has the job, then its children.
"""

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import finetune_operator
from aks_cases import JOB, profile
from control_plane import PROGRAMS, ControlPlane
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.labels import JOB_UID_LABEL
from finetune_operator.kube.resources import (
    ENDPOINT_SLICES,
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    SERVICES,
    Object,
    Resource,
)
from finetune_trainer.config import (
    CheckpointRef,
    FailureClass,
    Phase,
    Progress,
    Termination,
)
from loop_thread import loop_thread
from operators import Api, OperatorProcess, open_api, wait_until
from played_job import CLAIMS, NODES, PlayedJob
from played_pods import (
    ProgressServer,
    bound_claims,
    end_pod,
    own_address,
    played_node,
    profile_nodes,
)
from proxies import WriteProxy

STORED = Path(__file__).with_name("jobs")
NAMESPACE, NODE = "team", "node"
POD_ADDRESS = "192.0.2.10"
"""In the place of this machine's address."""
LOADING_PORT, TRAINING_PORT = 21001, 21002
CHILDREN = (JOBS, SERVICES, NETWORK_POLICIES, ENDPOINT_SLICES, PODS)
HOLD = "example.com/hold"
CHECKPOINT = CheckpointRef(
    step=10,
    path="/volumes/checkpoints/job/step-10.0-1-1-0a1b2c3d",
    time=1700000000.0,
    world_size=2,
    eval_loss=1.5,
)
LOADS = Progress(phase=Phase.LOADING)
TRAINS = Progress(
    phase=Phase.TRAINING,
    step=12,
    total_steps=100,
    loss=1.25,
    checkpoint=CHECKPOINT,
    best_checkpoint=CHECKPOINT,
    eval_loss_before=2.5,
    eval_loss=1.5,
    tokens_per_second=1000.0,
)
DONE = Termination(
    failure_class=FailureClass.COMPLETED,
    exit_code=0,
    message="finished after 100 steps",
    progress=TRAINS.model_copy(update={"phase": Phase.DONE, "step": 100}),
)
BAD_DATA = Termination(
    failure_class=FailureClass.DATA_ERROR, exit_code=65, message="row 7 has no completion"
)
PREEMPTED = Termination(
    failure_class=FailureClass.PREEMPTED, exit_code=75, message="stopped", progress=TRAINS
)


class Recorder:
    """Jobs of one namespace, and the pods of their attempts."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._played = PlayedJob(api, NAMESPACE)

    def apply(self, name: str, port: int = TRAINING_PORT, **spec: Any) -> None:
        """Create a job whose rank 0 serves its progress at a port."""
        fields = {
            **JOB,
            "topology__nodes": NODES,
            "observability__metricsPort": port,
            "restartPolicy__backoff": {"baseSeconds": 0, "maxSeconds": 1},
        }
        self._api.apply(NAMESPACE, name, **{**fields, **spec})

    def run(self, attempt: str) -> None:
        """Run the pods of an attempt."""
        self._played.run_pods(attempt)

    def end(self, attempt: str, code: int, words: str = "", *, pods: int = NODES) -> None:
        """End some pods of an attempt."""
        for pod in self._played.pods(attempt)[:pods]:
            self._api.run(end_pod(self._api.client, pod, code, words))

    def remove(self, attempt: str, code: int, words: str = "") -> None:
        """End the pods of an attempt that are to be deleted, and let them be gone."""

        def deleted() -> bool:
            return all("deletionTimestamp" in one["metadata"] for one in self._alive(attempt))

        wait_until(deleted, 30, f"the pods of {attempt} are deleted")
        for pod in self._alive(attempt):
            self._api.run(end_pod(self._api.client, pod, code, words))
            name = pod["metadata"]["name"]
            self._api.run(self._api.client.delete(PODS, name, NAMESPACE, grace_seconds=0))

    def _alive(self, attempt: str) -> list[Object]:
        over = ("Failed", "Succeeded")
        return [one for one in self._played.pods(attempt) if one["status"]["phase"] not in over]

    def reach(self, name: str, phase: str, attempt: int = 1) -> None:
        """Wait until the job's status has this phase and attempt."""

        def reached(status: Object) -> bool:
            return bool((status["phase"], status["attempt"]) == (phase, attempt))

        def status() -> Object:
            job = self._api.job(NAMESPACE, name)
            return job["status"] if job is not None else {"phase": None, "attempt": None}

        try:
            wait_until(lambda: reached(status()), 60)
        except AssertionError as error:
            raise AssertionError(f"{name} is not {phase}: {status()}") from error

    def store(self, name: str, file: str = "") -> None:
        """Write the file of a job, which is named as the job if not given."""
        job = self._api.job(NAMESPACE, name)
        assert job is not None
        selector = f"{JOB_UID_LABEL}={job['metadata']['uid']}"
        found = [labelled(FINE_TUNE_JOBS, job)]
        for kind in CHILDREN:
            listing = self._api.client.list(kind, NAMESPACE, label_selector=selector)
            found += [labelled(kind, one) for one in self._api.run(listing).items]
        write(file or name, found)


def labelled(kind: Resource, item: Object) -> Object:
    """Return an object with its kind, which items of a list lack, and without field managers."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    head = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    return {**head, **{key: value for key, value in item.items() if key not in head}}


def write(name: str, objects: list[Object]) -> None:
    """Write objects as one file of YAML documents."""
    text = yaml.safe_dump_all(objects, sort_keys=False, explicit_start=True, width=96)
    (STORED / f"{name}.yaml").write_text(text.replace(own_address(), POD_ADDRESS))


def live(recorder: Recorder, api: Api) -> list[str]:
    """Bring each job into its phase; return their names."""
    recorder.apply("queued", queue={"name": "team"})
    recorder.apply("starting", LOADING_PORT)
    running = ("running", "running-again", "deleting", "succeeded", "failed", "suspended")
    last = ("restarting", "suspending")  # their next phase comes when a time limit ends
    for name in (*running, *last):
        recorder.apply(name)
    wait_until(lambda: api.get(JOBS, NAMESPACE, "queued-1"), 60, "queued-1 is created")
    suspended = {"spec": {"suspend": True}}  # as Kueue does
    api.run(api.client.patch(JOBS, "queued-1", NAMESPACE, suspended))
    for name in ("starting", *running, *last):
        recorder.run(f"{name}-1")
    for name in (*running, *last):
        recorder.reach(name, "Running")

    recorder.end("running-again-1", 137, pods=1)
    recorder.remove("running-again-1", 143)
    recorder.run("running-again-2")
    recorder.end("succeeded-1", 0, DONE.to_json())
    recorder.end("failed-1", 65, BAD_DATA.to_json(), pods=1)
    recorder.remove("failed-1", 143)
    api.change(NAMESPACE, "suspended", suspend=True)
    recorder.remove("suspended-1", 75, PREEMPTED.to_json())
    hold = {"metadata": {"finalizers": [HOLD]}}
    api.run(api.client.patch(FINE_TUNE_JOBS, "deleting", NAMESPACE, hold))
    api.delete(NAMESPACE, "deleting")
    recorder.end("restarting-1", 137, pods=1)
    api.change(NAMESPACE, "suspending", suspend=True)

    expected = {
        "queued": "Queued",
        "starting": "Starting",
        "running": "Running",
        "succeeded": "Succeeded",
        "failed": "Failed",
        "suspended": "Suspended",
        "deleting": "Deleting",
        "restarting": "Restarting",
        "suspending": "Suspending",
    }
    for name, phase in expected.items():
        recorder.reach(name, phase)
    recorder.reach("running-again", "Running", attempt=2)
    return [*expected, "running-again"]


def open_unwritten(api: Api, recorder: Recorder, source: Path, folder: Path) -> str:
    """Kill the operator between the creation of a batch Job and the write of the job's status.

    Returns:
        The name of a job whose batch Job exists and whose status has no attempt.
    """
    names = [f"opened-{number}" for number in range(8)]
    for name in names:
        recorder.apply(name)
    processes: list[OperatorProcess] = []

    def kill(method: str, path: str, response: bytes) -> None:
        if method == "POST" and path.endswith("/jobs"):
            processes[0].send(signal.SIGKILL)

    with WriteProxy(api.kubeconfig, folder, kill) as proxy:
        kubeconfig = proxy.kubeconfig
        with OperatorProcess(kubeconfig, NAMESPACE, source=source, backends="") as operator:
            processes.append(operator)
            wait_until(lambda: not operator.is_running, 60, "the operator is killed")
    created = {one["metadata"]["name"] for one in api.run(api.client.list(JOBS, NAMESPACE)).items}
    for name in names:
        job = api.job(NAMESPACE, name)
        assert job is not None
        if f"{name}-1" in created and not job["status"]["attempt"]:
            return name
    raise AssertionError(f"each status has its attempt; batch Jobs: {created}")


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Api]:
    """Start a control plane with a node, claims and a profile, and serve progress."""
    assert PROGRAMS is not None, "KUBEBUILDER_ASSETS names the folder of Kubernetes' programs"
    stack = contextlib.ExitStack()
    with ControlPlane(PROGRAMS, folder) as plane, loop_thread() as loop, stack:
        plane.start_controllers()
        api = stack.enter_context(open_api(str(plane.kubeconfig)))
        api.run(api.client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}}))

        async def enter(entered: contextlib.AsyncExitStack) -> None:
            for port, progress in ((LOADING_PORT, LOADS), (TRAINING_PORT, TRAINS)):
                # Not `serving`, which chooses a port: the texts of a batch Job contain it.
                respond = ProgressServer(progress)._answer
                await asyncio.start_server(respond, own_address(), port)
            client = await entered.enter_async_context(await HttpClient.connect(api.kubeconfig))
            await entered.enter_async_context(played_node(client, NODE))
            await entered.enter_async_context(bound_claims(client, CLAIMS, NAMESPACE))

        entered = contextlib.AsyncExitStack()
        loop.run(enter(entered))
        stack.callback(lambda: loop.run(entered.aclose()))
        stack.enter_context(api.profile("default", profile(nodes=profile_nodes(NODE))))
        yield api


def main(source: Path) -> None:
    """Record every file."""
    assert Path(str(finetune_operator.__file__)).is_relative_to(source)
    STORED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as api:
        recorder = Recorder(api)
        stored = api.run(api.client.get(FINE_TUNE_PROFILES, "default"))
        write("profile", [labelled(FINE_TUNE_PROFILES, stored)])
        recorder.apply("pending")
        recorder.store("pending")
        name = open_unwritten(api, recorder, source, Path(folder))
        recorder.store(name, "pending-with-its-batch-job")
        for job in api.run(api.client.list(FINE_TUNE_JOBS, NAMESPACE)).items:
            api.delete(NAMESPACE, job["metadata"]["name"])
        with OperatorProcess(api.kubeconfig, NAMESPACE, source=source, backends="") as operator:
            operator.wait_for("synced")
            names = live(recorder, api)
        for phase in names:
            recorder.store(phase)
        print(f"wrote {len(list(STORED.iterdir()))} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
