"""What the operator is measured at: bursts, restarts, takeovers, and single lives of jobs.

Each function measures one thing on a quiet cluster and leaves nothing of it behind.
"""

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench_cluster import BenchCluster, cpu_seconds, peak_mib
from bursts import Sightings, count_surplus, create_all, fresh_namespace, watching

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.api.validation import defaulted
from finetune_operator.backends.base import Attempt, BackendContext
from finetune_operator.backends.kubernetes.backend import KubernetesBackend
from finetune_operator.kube.api_errors import AlreadyExistsError
from finetune_operator.kube.client import KubeClient
from finetune_operator.kube.resources import (
    FINE_TUNE_JOBS,
    FINE_TUNE_PROFILES,
    JOBS,
    NAMESPACES,
    PODS,
    Object,
    Resource,
)
from finetune_operator.planner.plan import make_plan
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.api.builders import manifest
from support.cluster import permissions
from support.cluster.audit import AuditLog, counted
from support.cluster.operators import OperatorProcess, condition, phase_of
from support.cluster.played_pods import (
    ProgressServer,
    bound_claims,
    end_pod,
    own_address,
    played_node,
    profile_nodes,
    run_pod,
)

Result = dict[str, Any]

HOME = "finetune-operator"
ACCOUNT = f"system:serviceaccount:{HOME}:finetune-operator"
LEASE_SECONDS = 15
PODS_EACH = 2
_CLAIM = "shared"
_SIMULATED = "simulated"
_PLAYED = "played"
_TIMEOUT = 240.0
_SETTLE_SECONDS = 3.0
# As long as a real pod waits for its image and its model at the least: a job that trains sooner
# would be told about in one status instead of two.
_START_SECONDS = _LOAD_SECONDS = 5.0
_RUN = {"finetune.test/run": "24h"}  # how long a simulated node lets a pod run
_LAST_WORDS = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")
_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Bench:
    """What every measurement needs.

    Attributes:
        kubeconfig: The operator's own, with the rights that the chart gives it.
    """

    cluster: BenchCluster
    client: KubeClient
    kubeconfig: Path

    def start(self, identity: str = "bench") -> OperatorProcess:
        """Start a replica that serves all namespaces."""
        return OperatorProcess(
            self.kubeconfig, HOME, identity, namespaces="", backends="", lease_seconds=LEASE_SECONDS
        )

    @asynccontextmanager
    async def operator(self, identity: str = "bench") -> AsyncIterator[OperatorProcess]:
        """Run one replica that has seen everything once."""
        process = await asyncio.to_thread(self.start, identity)
        try:
            await asyncio.to_thread(process.wait_for, "synced", 60)
            yield process
        finally:
            await asyncio.to_thread(process.end, signal.SIGTERM)

    @asynccontextmanager
    async def place(self, start: str) -> AsyncIterator[str]:
        """Yield a namespace with the claim that the jobs name."""
        async with (
            fresh_namespace(self.client, start) as namespace,
            bound_claims(self.client, [_CLAIM], namespace),
        ):
            yield namespace


async def prepare(client: KubeClient, folder: Path, server: str, authority: str) -> Path:
    """Install profiles and the operator's account; return the account's kubeconfig.

    Args:
        client: A cluster-admin's.
        folder: Where the kubeconfig is written.
        server: URL of the API server.
        authority: Its certificate authority, PEM in base64.
    """
    rules = [
        one.to_rule()
        for part in (
            permissions.WHERE_JOBS_ARE,
            permissions.CLUSTER_WIDE,
            permissions.FOR_THE_LEASE,
        )
        for one in part
    ]
    subject = {"kind": "ServiceAccount", "name": HOME, "namespace": HOME}
    role = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": HOME}
    wanted: list[tuple[Resource, Object, str | None]] = [
        (FINE_TUNE_PROFILES, _profile(_SIMULATED), None),
        (FINE_TUNE_PROFILES, _profile(_PLAYED, nodes=profile_nodes(_PLAYED)), None),
        (NAMESPACES, {"metadata": {"name": HOME}}, None),
        (_core("serviceaccounts"), {"metadata": {"name": HOME}}, HOME),
        (_rbac("clusterroles"), {"metadata": {"name": HOME}, "rules": rules}, None),
        (
            _rbac("clusterrolebindings"),
            {"metadata": {"name": HOME}, "roleRef": role, "subjects": [subject]},
            None,
        ),
    ]
    for resource, body, namespace in wanted:
        try:
            await client.create(resource, body, namespace)
        except AlreadyExistsError:
            continue
    token = await client.create(_core(f"serviceaccounts/{HOME}/token"), {"spec": {}}, HOME)
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(_kubeconfig(server, authority, token["status"]["token"])))
    return path


def _profile(name: str, **more: Any) -> Object:
    allow = {
        "namespaces": ["*"],
        "claims": [_CLAIM],
        "maxNodes": 2,
        "metadata": ["finetune.test/*"],
    }
    kind = {"apiVersion": FINE_TUNE_PROFILES.api_version, "kind": FINE_TUNE_PROFILES.kind}
    spec = {"image": "registry.test/trainer:1", "allow": allow, **more}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def _core(plural: str) -> Resource:
    return Resource("", "v1", plural, "")


def _rbac(plural: str) -> Resource:
    return Resource(_RBAC, "v1", plural, "", namespaced=False)


def _kubeconfig(server: str, authority: str, token: str) -> Object:
    cluster = {"server": server, "certificate-authority-data": authority}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bench",
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "bench", "user": {"token": token}}],
    }


def fine_tune_jobs(count: int, profile: str = _SIMULATED, **spec: Any) -> list[Object]:
    """Return jobs of two nodes; `spec` is changed in them as in `builders.manifest`."""
    made = []
    for number in range(count):
        name = f"job-{number:04d}"
        one = manifest(
            name=name,
            model__source="hf://org/model",
            dataset__source=f"pvc://{_CLAIM}/train.jsonl",
            checkpoint__uri=f"pvc://{_CLAIM}/{name}/checkpoints",
            output__uri=f"pvc://{_CLAIM}/{name}/output",
            topology__nodes=PODS_EACH,
            podTemplate={"metadata": {"annotations": _RUN}},
            **{"backend": {"type": "kubernetes", "kubernetes": {"profile": profile}}, **spec},
        )
        del one["metadata"]["namespace"]
        made.append(one)
    return made


def plain_jobs(count: int) -> list[Object]:
    """Return the least that makes two pods: Indexed batch Jobs."""
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "registry.test/a:1"}]}
    template = {"metadata": {"annotations": _RUN}, "spec": pod}
    spec: Object = {"completionMode": "Indexed", "completions": PODS_EACH, "parallelism": PODS_EACH}
    spec |= {"backoffLimit": 0, "template": template}
    names = (f"job-{number:04d}" for number in range(count))
    return [{"metadata": {"name": name}, "spec": spec} for name in names]


def same_pods_jobs(count: int) -> list[Object]:
    """Return plain batch Jobs with the very pods that the operator would make."""
    profile = FineTuneProfile.model_validate(_profile(_SIMULATED))
    backend = KubernetesBackend(BackendContext(Path(), profiles={_SIMULATED: profile}))
    made = []
    for number, one in enumerate(fine_tune_jobs(count)):
        job = FineTuneJob.model_validate(defaulted(one))
        metadata = job.metadata.model_copy(update={"uid": f"uid-{number}"})
        plan = make_plan(job.model_copy(update={"metadata": metadata}))
        batch_job = dict(backend.render(plan, Attempt(1)).objects[-1])
        left_out = ("namespace", "ownerReferences")
        kept = {key: val for key, val in batch_job["metadata"].items() if key not in left_out}
        made.append({**batch_job, "metadata": kept})
    return made


async def same_pods_burst(bench: Bench, count: int) -> Result:
    """Create the operator's batch Jobs at once, without it."""
    jobs = same_pods_jobs(count)
    async with bench.place("pods") as namespace:
        return await _burst(bench, JOBS, jobs, namespace)


async def plain_burst(bench: Bench, count: int) -> Result:
    """Create plain batch Jobs at once; nobody but Kubernetes works on them."""
    async with bench.place("plain") as namespace:
        return await _burst(bench, JOBS, plain_jobs(count), namespace)


async def our_burst(bench: Bench, count: int) -> Result:
    """Create FineTuneJobs at once, with an operator of its own for each burst."""
    async with bench.place("ours") as namespace, bench.operator() as process:
        before = cpu_seconds(process.pid)
        with AuditLog(bench.cluster.audit_log, ACCOUNT) as audit:
            result = await _burst(bench, FINE_TUNE_JOBS, fine_tune_jobs(count), namespace)
            writes = audit.writes()
        health = await asyncio.to_thread(process.health)
        return result | {
            "operator_cpu_ms_per_job": 1000 * (cpu_seconds(process.pid) - before) / count,
            "operator_peak_mib": peak_mib(process.pid),
            "operator_writes": counted(writes),
            "operator_calls": health["calls"],
            "surplus_children": await count_surplus(bench.client, namespace, count, PODS_EACH),
        }


async def _burst(
    bench: Bench, resource: Resource, bodies: Sequence[Mapping[str, Any]], namespace: str
) -> Result:
    """Create them, wait until all pods run, and say how long it took and what the cluster used."""
    async with watching(bench.client, namespace) as seen:
        count, before = len(bodies), bench.cluster.cpu_seconds()
        sent = await create_all(bench.client, resource, bodies, namespace)
        await _all_running(seen, count)
        begun = min(sent.values())
        # What an all-running cluster still does about the burst belongs to it.
        await asyncio.sleep(_SETTLE_SECONDS)
        used = bench.cluster.cpu_seconds()
        parts = {name: 1000 * (used[name] - before[name]) / count for name in used}
        return {
            "jobs_exist_seconds": max(seen.jobs.values()) - begun,
            "all_running_seconds": max(seen.running.values()) - begun,
            "cluster_cpu_ms_per_job": sum(parts.values()),
            "cluster_cpu_ms_per_job_by_process": parts,
        }


async def _all_running(seen: Sightings, count: int) -> None:
    wanted = count * PODS_EACH
    await seen.wait(lambda: len(seen.running) >= wanted, _TIMEOUT, f"{wanted} pods Running")


async def killed_burst(bench: Bench, count: int) -> Result:
    """Kill the operator when half of a burst's batch Jobs exist, and start it again at once."""
    loop = asyncio.get_running_loop()
    async with bench.place("killed") as namespace, watching(bench.client, namespace) as seen:
        first = await asyncio.to_thread(bench.start)
        await asyncio.to_thread(first.wait_for, "synced", 60)
        creating = asyncio.create_task(
            create_all(bench.client, FINE_TUNE_JOBS, fine_tune_jobs(count), namespace)
        )
        half = count // 2
        await seen.wait(lambda: len(seen.jobs) >= half, _TIMEOUT, f"{half} batch Jobs")
        await asyncio.to_thread(first.kill)
        at_kill, begun = len(seen.jobs), loop.time()
        async with bench.operator() as second:
            synced = loop.time() - begun
            await _without(second, "backlog")
            drained = loop.time() - begun
            await creating
            await _without(second, "queue")
            idle = loop.time() - begun
            await _all_running(seen, count)
            await _without(second, "queue")  # of what follows from pods that run
            surplus = await count_surplus(bench.client, namespace, count, PODS_EACH)
    return {
        "jobs_at_kill": at_kill,
        "synced_seconds": synced,
        "drained_seconds": drained,
        "idle_seconds": idle,
        "surplus_children": surplus,
    }


async def _without(process: OperatorProcess, field: str) -> None:
    """Wait until the process counts none of what a field of its health page counts."""
    while (await asyncio.to_thread(process.health))[field]:
        await asyncio.sleep(0.02)


async def single_applies(bench: Bench, count: int) -> list[float]:
    """Return the seconds from each apply to its batch Job, one after the other."""
    taken = []
    async with (
        bench.place("single") as namespace,
        watching(bench.client, namespace) as seen,
        bench.operator(),
    ):
        for body in fine_tune_jobs(count):
            sent = await create_all(bench.client, FINE_TUNE_JOBS, [body], namespace)
            name = body["metadata"]["name"]
            child = f"{name}-1"
            await seen.wait(lambda child=child: child in seen.jobs, _TIMEOUT, child)  # type: ignore[misc]
            taken.append(seen.jobs[child] - sent[name])
    return taken


async def refusals(bench: Bench, count: int) -> Result:
    """Return the seconds until a missing profile is told, and from its coming to the batch Job."""
    loop, client = asyncio.get_running_loop(), bench.client
    told, mended = [], []
    async with (
        bench.place("refused") as namespace,
        watching(client, namespace) as seen,
        bench.operator(),
    ):
        for number in range(count):
            missing = f"{namespace}-{number}"
            body = fine_tune_jobs(count, missing)[number]
            name = body["metadata"]["name"]
            begun = loop.time()
            await client.create(FINE_TUNE_JOBS, body, namespace)
            await _refused(client, namespace, name)
            told.append(loop.time() - begun)
            begun = loop.time()
            await client.create(FINE_TUNE_PROFILES, _profile(missing))
            child = f"{name}-1"
            await seen.wait(lambda child=child: child in seen.jobs, _TIMEOUT, child)  # type: ignore[misc]
            mended.append(seen.jobs[child] - begun)
            await client.delete(FINE_TUNE_PROFILES, missing)
    return {"told_seconds": told, "mended_seconds": mended}


async def _refused(client: KubeClient, namespace: str, name: str) -> None:
    async with asyncio.timeout(_TIMEOUT):
        while True:
            made = await client.get(FINE_TUNE_JOBS, name, namespace)
            if condition(made, "Accepted")["status"] == "False":
                return
            await asyncio.sleep(0.01)


async def next_attempts(bench: Bench, count: int) -> list[float]:
    """Return the seconds from an attempt's last pod to the next attempt's batch Job, each job's."""
    async with (
        bench.place("again") as namespace,
        watching(bench.client, namespace) as seen,
        bench.operator(),
    ):
        await create_all(bench.client, FINE_TUNE_JOBS, fine_tune_jobs(count), namespace)
        await _all_running(seen, count)
        pods = (await bench.client.list(PODS, namespace)).items
        for pod in pods:
            if pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "0":
                await end_pod(bench.client, pod, 137)
        names = [f"job-{number:04d}" for number in range(count)]
        second = {f"{name}-2" for name in names}
        await seen.wait(lambda: second <= seen.jobs.keys(), _TIMEOUT, "all second attempts")
        return [seen.jobs[f"{name}-2"] - seen.gone[f"{name}-1"] for name in names]


async def takeover(bench: Bench) -> float:
    """Kill the leader; return the seconds until its standby leads."""
    loop = asyncio.get_running_loop()
    first = await asyncio.to_thread(bench.start, "first")
    try:
        await asyncio.to_thread(first.wait_for, "synced", 60)
        second = await asyncio.to_thread(bench.start, "second")
        try:
            await asyncio.to_thread(second.wait_for, "started")
            await asyncio.sleep(LEASE_SECONDS / 3)  # it has seen whose the Lease is
            begun = loop.time()
            await asyncio.to_thread(first.kill)
            await asyncio.to_thread(second.wait_for, "leading", 3 * LEASE_SECONDS)
            return loop.time() - begun
        finally:
            await asyncio.to_thread(second.end)
    finally:
        if first.is_running:
            await asyncio.to_thread(first.end)


async def whole_lives(bench: Bench, count: int, idle_seconds: float) -> Result:
    """Play jobs from apply to Complete; return the operator's writes of each part of their lives.

    Progress is served, and stays the same while they are idle.
    """
    address, client = own_address(), bench.client
    async with (
        played_node(client, _PLAYED),
        ProgressServer().serving(address) as rank_zero,
        bench.place("lives") as namespace,
        watching(client, namespace) as seen,
        bench.operator(),
    ):
        port = {"observability": {"metricsPort": rank_zero.port}}
        jobs = fine_tune_jobs(count, _PLAYED, **port)
        with AuditLog(bench.cluster.audit_log, ACCOUNT) as audit:
            await create_all(client, FINE_TUNE_JOBS, jobs, namespace)
            await _each_pod(client, namespace, seen, count, address)
            await asyncio.sleep(_LOAD_SECONDS)
            rank_zero.progress = Progress(phase=Phase.TRAINING, step=1, total_steps=10)
            await _phase(client, namespace, "Running")
            start = audit.writes()
            await asyncio.sleep(idle_seconds)
            idle = audit.writes()
            words = Termination(failure_class=FailureClass.COMPLETED, exit_code=0, message="done")
            for pod in (await client.list(PODS, namespace)).items:
                await end_pod(client, pod, 0, words.to_json())
            await _phase(client, namespace, "Succeeded")
            end = audit.writes()
    return {
        "jobs": count,
        "start": counted(start),
        "idle": counted(idle),
        "end": counted(end),
        "idle_seconds": idle_seconds,
        "pods_start_seconds": _START_SECONDS,
        "pods_load_seconds": _LOAD_SECONDS,
    }


async def _each_pod(
    client: KubeClient, namespace: str, seen: Sightings, count: int, address: str
) -> None:
    """Let all pods run some time after they have a node."""
    placed: list[Object] = []
    while len(placed) < count * PODS_EACH:
        await asyncio.sleep(0.1)
        pods = (await client.list(PODS, namespace)).items
        placed = [pod for pod in pods if pod["spec"].get("nodeName")]
    await asyncio.sleep(_START_SECONDS)
    for pod in placed:
        await run_pod(client, pod, address)
    await _all_running(seen, count)


async def _phase(client: KubeClient, namespace: str, phase: str) -> None:
    async with asyncio.timeout(_TIMEOUT):
        while True:
            jobs = (await client.list(FINE_TUNE_JOBS, namespace)).items
            if all(phase_of(job) == phase for job in jobs):
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1.0)  # an Event follows its status


def authority_of(kubeconfig: Path) -> tuple[str, str]:
    """Return URL and certificate authority of a kubeconfig's cluster."""
    (cluster,) = (one["cluster"] for one in yaml.safe_load(kubeconfig.read_text())["clusters"])
    if "certificate-authority" in cluster:
        text = Path(cluster["certificate-authority"]).read_bytes()
        return cluster["server"], base64.b64encode(text).decode()
    return cluster["server"], cluster["certificate-authority-data"]


def shown(result: Result) -> str:
    """Return a run's figures on one line, for whoever watches the benchmark."""
    return json.dumps({key: one for key, one in result.items() if not isinstance(one, dict)})
