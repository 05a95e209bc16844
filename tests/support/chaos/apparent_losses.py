"""Cause 20 running jobs all faults that only look like a lost node: no attempt may end.

`make apparent-losses` runs it on a control plane of its own, with Kubernetes' controllers; the
script is the kubelet of every node. Each namespace has five jobs, five nodes and an operator. Two
operators have wrong clocks, the pods of one namespace fail a readiness gate while their ranks hang,
and the pages of another are blocked. KUBEBUILDER_ASSETS names the folder of Kubernetes' programs;
the clocks need the Debian package libfaketime.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import FINE_TUNE_JOBS, NAMESPACES, NODES, PODS, Object
from finetune_trainer.config import Phase, Progress
from support.cluster.control_plane import PROGRAMS, ControlPlane
from support.cluster.operators import Api, OperatorProcess
from support.cluster.played_pods import (
    ProgressServer,
    keep_ready,
    own_address,
    report_ready,
    run_pod,
)
from support.cluster.running_jobs import training

JOBS_EACH = 5
STARTED_SECONDS = 120
FLAPS_SECONDS = (15, 45, 90)
REST_SECONDS = 60
LONG_SECONDS = 200
OUTAGE_SECONDS = 300
GATE = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
WHOLE = {"type": "ContainersReady", "status": "True"}


@dataclass
class Group:
    """A namespace with its operator, whose clock differs from the one of its nodes.

    Attributes:
        clock: Offset of the operator's clock, in the syntax of libfaketime; "" for none.
        fails_gate: Its pods are not Ready, and its ranks make no progress.
        is_blocked: Its pages do not respond.
    """

    name: str
    clock: str = ""
    fails_gate: bool = False
    is_blocked: bool = False

    def __post_init__(self) -> None:
        self.page = ProgressServer(Progress(phase=Phase.TRAINING, step=7, total_steps=100_000))
        self.hearts: dict[str, asyncio.Task[None]] = {}

    @property
    def node(self) -> str:
        """Name of the node that the faults concern."""
        return f"{self.name}-1"

    async def advance(self) -> None:
        """Let the ranks train."""
        while True:
            await asyncio.sleep(1)
            step = self.page.progress.step + 1
            self.page.progress = self.page.progress.model_copy(update={"step": step})


GROUPS = (
    Group("ahead", clock="+1h"),
    Group("behind", clock="-1h"),
    Group("gates", fails_gate=True),
    Group("blocked", is_blocked=True),
)


async def be_silent(client: KubeClient, groups: Sequence[Group], seconds: float) -> None:
    """Let the kubelet of one node per group be silent, and then report node and pods again."""
    for group in groups:
        group.hearts[group.node].cancel()
    await asyncio.sleep(seconds)
    for group in groups:
        node = await client.get(NODES, group.node)
        (was,) = [one for one in node["status"]["conditions"] if one["type"] == "Ready"]
        print(f"  {group.node}: Ready {was['status']} after {seconds} s of silence", flush=True)
        group.hearts[group.node] = asyncio.create_task(keep_ready(client, group.node))
        await report_ready(client, group.node)
        for pod in await pods_of(client, group):
            if pod["spec"]["nodeName"] == group.node:
                await report(client, group, pod)


async def pods_of(client: KubeClient, group: Group) -> list[Object]:
    return (await client.list(PODS, group.name)).items


async def report(client: KubeClient, group: Group, pod: Object) -> None:
    """Report a pod as its kubelet does."""
    await run_pod(client, pod, own_address())
    if group.fails_gate:
        name = pod["metadata"]["name"]
        status = {"status": {"conditions": [WHOLE, GATE]}}
        await client.patch(PODS, name, group.name, status, subresource="status")


async def check(client: KubeClient) -> int:
    """Print the jobs that have lost their first attempt, and return their number."""
    lost = 0
    for group in GROUPS:
        gone = [
            pod["metadata"]["name"]
            for pod in await pods_of(client, group)
            if "deletionTimestamp" in pod["metadata"]
        ]
        reasons = set()
        for job in (await client.list(FINE_TUNE_JOBS, group.name)).items:
            status = job["status"]
            (ready,) = [one for one in status["conditions"] if one["type"] == "Ready"]
            reasons.add(ready["reason"])
            ended = [one for one in status.get("attempts", ()) if "failureClass" in one]
            if status["attempt"] != 1 or ended:
                lost += 1
                print(f"  {group.name}/{job['metadata']['name']}: {ready['message']}")
        print(f"  {group.name}: {', '.join(sorted(reasons))}; deleted pods: {gone}", flush=True)
        lost += len(gone)
    return lost


async def cause_all(plane: ControlPlane, client: KubeClient) -> int:
    """Cause the faults one after another, and return the number of lost attempts."""
    lost = 0
    for seconds in FLAPS_SECONDS:
        print(f"one node in five is silent for {seconds} s", flush=True)
        await be_silent(client, GROUPS, seconds)
        await asyncio.sleep(REST_SECONDS)
        lost += await check(client)
    print(f"one node in five is silent for {LONG_SECONDS} s while its ranks train", flush=True)
    await be_silent(client, [one for one in GROUPS if not one.fails_gate], LONG_SECONDS)
    await asyncio.sleep(REST_SECONDS)
    lost += await check(client)
    print(f"the API server does not respond for {OUTAGE_SECONDS} s", flush=True)
    with plane.frozen_server():
        await asyncio.sleep(OUTAGE_SECONDS)
    await asyncio.sleep(2 * REST_SECONDS)
    for group in GROUPS:  # the node controller may have marked pods of all nodes
        for pod in await pods_of(client, group):
            await report(client, group, pod)
    await asyncio.sleep(REST_SECONDS)
    return lost + await check(client)


async def until_trained(client: KubeClient) -> None:
    async with asyncio.timeout(STARTED_SECONDS):
        while True:
            jobs = [
                job for one in GROUPS for job in (await client.list(FINE_TUNE_JOBS, one.name)).items
            ]
            conditions = [job.get("status", {}).get("conditions", ()) for job in jobs]
            reasons = [
                one["reason"] for found in conditions for one in found if one["type"] == "Ready"
            ]
            if reasons == ["Training"] * len(GROUPS) * JOBS_EACH:
                return
            await asyncio.sleep(1)


def operator_of(group: Group, plane: ControlPlane, folder: Path) -> OperatorProcess:
    """Start the operator of a group; with a wrong clock it cannot verify a new certificate."""
    file, clock = plane.kubeconfig, {}
    if group.clock:
        config: Object = yaml.safe_load(file.read_text())
        config["clusters"][0]["cluster"].pop("certificate-authority")
        config["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
        file = folder / f"kubeconfig-{group.name}"
        file.write_text(yaml.safe_dump(config))
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        clock = {"LD_PRELOAD": str(library), "FAKETIME": group.clock, "DONT_FAKE_MONOTONIC": "1"}
    return OperatorProcess(file, group.name, environ=clock, backends="")


async def run(plane: ControlPlane, folder: Path) -> int:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await HttpClient.connect(str(plane.kubeconfig)))
        blocked = AsyncExitStack()
        tasks = []
        for group in GROUPS:
            await client.create(NAMESPACES, {"metadata": {"name": group.name}})
            operator = await asyncio.to_thread(operator_of, group, plane, folder)
            stack.callback(operator.end)
            await asyncio.to_thread(operator.wait_for, "synced", 60)
            pages = blocked if group.is_blocked else stack
            await pages.enter_async_context(group.page.serving(own_address()))
            jobs = training(
                client,
                group.name,
                group.name,
                group.page.port,
                running=JOBS_EACH,
                backends=["kubernetes"],
                nodes=JOBS_EACH,
            )
            group.hearts = await stack.enter_async_context(jobs)
            tasks.append(asyncio.create_task(group.advance()))
        await until_trained(client)
        for group, task in zip(GROUPS, tasks, strict=True):
            if group.fails_gate:
                task.cancel()
                for pod in await pods_of(client, group):
                    await report(client, group, pod)
        await blocked.aclose()
        lost = await cause_all(plane, client)
        for one in [*tasks, *(heart for group in GROUPS for heart in group.hearts.values())]:
            one.cancel()
        return lost


def main() -> int:
    """Print each fault with the reasons of the jobs after it; exit code 1 if a job lost one."""
    assert PROGRAMS is not None, "KUBEBUILDER_ASSETS names the folder of Kubernetes' programs"
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ControlPlane(PROGRAMS, Path(folder)) as plane:
        api = Api(str(plane.kubeconfig))
        api.install_crds()
        api.close()
        plane.start_controllers()
        lost = asyncio.run(run(plane, Path(folder)))
    count = len(GROUPS) * JOBS_EACH
    print(f"{lost} failovers of {count} jobs in {(time.monotonic() - begun) / 60:.0f} minutes")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
