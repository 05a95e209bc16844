"""Jobs through upgrade, rollback, downgrade, uninstall and reinstall by helm; 50 of them run.

Chart and code of the last release come out of git. Controllers are real, pods are played; operators
run as processes, with exactly the rights that the chart in force gives their account. At the end
the pods fail, and the second attempts repeat the plans of the first attempts.
"""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.api.crd_revision import REVISIONS, revision_of
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.http import HttpClient
from finetune_operator.kube.resources import (
    CRDS,
    FINE_TUNE_JOBS,
    NAMESPACES,
    PODS,
    Object,
    Resource,
)
from finetune_trainer.config import ExitCode, FailureClass, Phase, Progress, Termination
from support.cluster.control_plane import CONTROLLERS, PROGRAMS, ControlPlane
from support.cluster.last_release import BACKENDS, COMMIT, LastRelease, unpack
from support.cluster.operators import ROOT, OperatorProcess, phase_of, wait_until
from support.cluster.planned_jobs import (
    OF_0_1_0,
    Settings,
    chosen_by_trainers,
    configured,
    lose_workers,
    planned,
)
from support.cluster.played_pods import ProgressServer, end_pod, own_address
from support.cluster.running_jobs import NODES, body, children, jobs, training

HELM = shutil.which("helm")
HAS_CONTROLLERS = PROGRAMS is not None and all(
    (Path(PROGRAMS) / one).exists() for one in CONTROLLERS
)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(HELM is None, reason="helm is not on the PATH"),
    pytest.mark.skipif(
        not HAS_CONTROLLERS,
        reason="KUBEBUILDER_ASSETS names no folder with Kubernetes' controllers",
    ),
]
RUNNING = 50
CHOSEN = 25
"""Jobs of the present release; the 50 jobs are of the last release."""
CHART = ROOT / "charts" / "finetune-operator"
HOME = "ops"
OTHERS = "others"
"""Namespace of the jobs that do not run."""
NEWER = "newer"
"""Namespace of the jobs whose settings their trainers choose."""
_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
_DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
OTHER_PHASES = {
    "job-0": "Succeeded",
    "job-1": "Failed",
    "suspended": "Suspended",
    "waiting": "Pending",
}
KEEP_NEWER = ("--reset-then-reuse-values", "--set", "crds.install=false")


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    assert PROGRAMS is not None
    with ControlPlane(PROGRAMS, tmp_path_factory.mktemp("plane")) as made:
        made.start_controllers()
        yield made


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> LastRelease:
    if (found := unpack(tmp_path_factory.mktemp("last"))) is None:
        pytest.skip(f"git does not have commit {COMMIT} here")
    return found


class World:
    """One cluster, its helm, and the jobs that run in it.

    Attributes:
        before: Every child and every job at the time when all trained.
    """

    def __init__(self, plane: ControlPlane, client: KubeClient, progress: ProgressServer) -> None:
        self._plane = plane
        self._progress = progress
        self.client = client
        self.before: dict[str, Any] = {}
        self.before_others: dict[str, Any] = {}

    async def helm(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run helm in the operator's namespace, whatever comes of it."""
        assert HELM is not None
        command = [HELM, *arguments, "--namespace", HOME]
        environ = {**os.environ, "KUBECONFIG": str(self._plane.kubeconfig)}
        return await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True
        )

    async def helm_works(self, *arguments: str) -> None:
        done = await self.helm(*arguments)
        assert done.returncode == 0, done.stderr

    async def go_back(self, last: LastRelease, installed: list[int], newest: list[int]) -> None:
        """Roll back to the last release, whose own definitions had the revisions `installed`."""
        done = await self.helm("rollback", "ft", "1")
        if installed == newest:
            assert done.returncode == 0, done.stderr
        else:  # refused for the definitions, with the command that goes back without them
            assert done.returncode != 0
            raised = [new for old, new in zip(installed, newest, strict=True) if old != new]
            refusals = [f"is older than {one}, which the cluster has" for one in raised]
            assert any(one in done.stderr for one in refusals), done.stderr
            assert " ".join(KEEP_NEWER) in done.stderr
        assert await self.revisions() == newest
        await self.helm_works("upgrade", "ft", str(last.chart), *KEEP_NEWER)

    async def revisions(self) -> list[int]:
        return [revision_of(await self.client.get(CRDS, name)) for name in REVISIONS]

    async def snapshot(self) -> dict[str, Any]:
        """Return children with their versions, and jobs with their specs and attempts."""
        found: dict[str, Any] = await children(self.client, HOME, versions=True)
        for one in (await self.client.list(FINE_TUNE_JOBS, HOME)).items:
            told = (one["metadata"]["uid"], one["metadata"]["generation"], one["spec"])
            found[f"job {one['metadata']['name']}"] = told
        return found

    async def settle(self) -> None:
        """Remember all objects once all jobs train and no client writes."""
        async with asyncio.timeout(240):
            while await jobs(self.client, HOME) != [("Running", 1)] * RUNNING:
                await asyncio.sleep(0.5)
            while self.before != (now := await self.snapshot()):
                self.before = now
                await asyncio.sleep(2)
        # The job, its batch Job, policy, Service, slice and pods.
        assert len(self.before) == (5 + NODES) * RUNNING

    async def end_others(self) -> None:
        """End one job successfully and one in failure, and create jobs that wait."""
        ends = {"job-0": (ExitCode.DONE, FailureClass.COMPLETED)}
        ends["job-1"] = (ExitCode.CONFIG, FailureClass.CONFIG_ERROR)
        for pod in (await self.client.list(PODS, OTHERS)).items:
            name = pod["metadata"]["name"]
            code, kind = next(end for job, end in ends.items() if name.startswith(f"{job}-"))
            words = Termination(failure_class=kind, exit_code=code, message="as played")
            await end_pod(self.client, pod, code, words.to_json())
        suspended = body("suspended", "ended", 2048, "aks")
        suspended["spec"]["suspend"] = True
        await self.client.create(FINE_TUNE_JOBS, suspended, OTHERS)
        await self.client.create(FINE_TUNE_JOBS, body("waiting", "missing", 2048, "aks"), OTHERS)
        async with asyncio.timeout(60):
            while {name: one[0] for name, one in (await self.others()).items()} != OTHER_PHASES:
                await asyncio.sleep(0.5)
        self.before_others = await self.others()

    async def others(self) -> dict[str, Any]:
        """Return phase, attempt, uid and spec of the jobs that do not run."""
        found = (await self.client.list(FINE_TUNE_JOBS, OTHERS)).items
        return {
            one["metadata"]["name"]: (
                phase_of(one) if "status" in one else "",
                one.get("status", {}).get("attempt"),
                one["metadata"]["uid"],
                one["spec"],
            )
            for one in found
        }

    async def is_untouched(self) -> None:
        """Every child has the version it had, and every job runs on in its first attempt."""
        assert await self.others() == self.before_others
        now = await self.snapshot()
        assert sorted(now) == sorted(self.before)
        assert [key for key in now if now[key] != self.before[key]] == []
        assert await jobs(self.client, HOME) == [("Running", 1)] * RUNNING

    async def repeat_plans(self, namespace: str, plans: dict[str, Settings]) -> None:
        """End the first attempts; the second attempts have exactly the settings of the plans."""
        await lose_workers(self.client, namespace)
        async with asyncio.timeout(60):
            while len(found := await configured(self.client, namespace, 2)) < len(plans):
                await asyncio.sleep(0.2)
        assert found == plans
        assert await planned(self.client, namespace) == plans

    @asynccontextmanager
    async def operator(self, folder: Path, source: Path | None) -> AsyncIterator[OperatorProcess]:
        """Run an operator as its account, until it has looked at each attempt."""
        kubeconfig = await self._account(folder)
        asked = self._progress.asked
        process = await asyncio.to_thread(
            OperatorProcess,
            kubeconfig,
            HOME,
            source=source,
            backends=BACKENDS if source else "",
            namespaces="",
            health_host="127.0.0.1",
        )
        try:
            await asyncio.to_thread(process.wait_for, "synced", 60)
            if self.before:
                async with asyncio.timeout(60):
                    while self._progress.asked < asked + RUNNING:
                        await asyncio.sleep(0.2)
                await asyncio.to_thread(
                    wait_until, lambda: process.health()["queue"] == 0, 30, "the queue is empty"
                )
            yield process
        finally:
            await asyncio.to_thread(process.end)

    async def _account(self, folder: Path) -> Path:
        """Write a kubeconfig of the release's service account."""
        [name] = [
            one["metadata"]["name"]
            for one in (await self.client.list(_ACCOUNTS, HOME)).items
            if one["metadata"]["name"] != "default"
        ]
        requests = Resource("", "v1", f"{_ACCOUNTS.plural}/{name}/token", "TokenRequest")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": requests.kind, "spec": {}}
        made = await self.client.create(requests, body, HOME)
        config: Object = yaml.safe_load(self._plane.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": made["status"]["token"]}
        file = folder / "account"
        file.write_text(yaml.safe_dump(config))
        return file


async def through_all(plane: ControlPlane, last: LastRelease, folder: Path) -> None:
    image = ("--set", "image.repository=registry.test/operator")
    newest = [len(digests) for digests in REVISIONS.values()]
    async with (
        await HttpClient.connect(str(plane.kubeconfig)) as client,
        ProgressServer(Progress(phase=Phase.TRAINING, step=1, total_steps=10)).serving(
            own_address()
        ) as progress,
    ):
        world = World(plane, client, progress)
        await client.create(NAMESPACES, {"metadata": {"name": HOME}})
        await world.helm_works("install", "ft", str(last.chart), *image)
        installed = await world.revisions()
        await client.create(NAMESPACES, {"metadata": {"name": OTHERS}})
        async with (
            world.operator(folder, last.source) as old,
            training(client, OTHERS, "ended", progress.port, running=2, backends=["aks"]),
            training(
                client,
                HOME,
                "played",
                progress.port,
                running=RUNNING,
                backends=["aks"],
                changes=OF_0_1_0,
            ),
        ):
            await world.end_others()
            await world.settle()
            plans = await planned(client, HOME)
            assert plans == await configured(client, HOME, 1)
            await asyncio.to_thread(old.end)

            # Upgrade: new definitions, rights and operator.
            await world.helm_works("upgrade", "ft", str(CHART), "--reset-then-reuse-values")
            assert await world.revisions() == newest
            async with world.operator(folder, None):
                await world.is_untouched()

            await world.go_back(last, installed, newest)
            assert await world.revisions() == newest
            async with world.operator(folder, last.source):
                await world.is_untouched()

            # Forward again, from a release that has no definitions of its own.
            again = ("--reset-then-reuse-values", "--set", "crds.install=true")
            await world.helm_works("upgrade", "ft", str(CHART), *again)
            async with world.operator(folder, None):
                await world.is_untouched()

            # No operator serves the jobs, and they run.
            await world.helm_works("uninstall", "ft")
            assert (await client.list(_DEPLOYMENTS, HOME)).items == []
            assert await world.revisions() == newest
            await world.is_untouched()

            # The same name again, which helm asked for the definitions that were kept.
            await world.helm_works("install", "ft", str(CHART), *image)
            assert await world.revisions() == newest
            await client.create(NAMESPACES, {"metadata": {"name": NEWER}})
            async with (
                world.operator(folder, None) as first,
                chosen_by_trainers(client, NEWER, "chosen", running=CHOSEN) as choices,
            ):
                await world.is_untouched()
                await asyncio.to_thread(first.end)
                async with world.operator(folder, None):
                    await world.repeat_plans(HOME, plans)
                    await world.repeat_plans(NEWER, choices)


def test_jobs_outlive_every_change_of_the_release_and_later_attempts_repeat_their_plans(
    plane: ControlPlane, last: LastRelease, tmp_path: Path
) -> None:
    asyncio.run(through_all(plane, last, tmp_path))
