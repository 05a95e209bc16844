"""A backend for tests of the kernel: one attempt is one ConfigMap, and a test plays its part.

Like `kubernetes`, it lives in the cluster (watched by its label, found again by its name, collected
by its owner reference), but needs no node: a test writes into the ConfigMap what became of the
attempt (`play` in `operators.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

from finetune_operator.api.problems import Problem
from finetune_operator.api.v1alpha1 import API_VERSION, KIND
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.base import (
    Attempt,
    AttemptPhase,
    AttemptRef,
    Backend,
    BackendContext,
    Effect,
    Found,
    Handle,
    Limits,
    Observation,
    Obstacle,
    Request,
    Written,
)
from finetune_operator.errors import (
    AlreadyOwnedError,
    NoSuchRankError,
    NotCreatedError,
    TransientError,
)
from finetune_operator.kube.api_errors import AlreadyExistsError, NotFoundError
from finetune_operator.kube.cache import Key
from finetune_operator.kube.compact import compact
from finetune_operator.kube.labels import ATTEMPT_LABEL, JOB_LABEL, JOB_UID_LABEL
from finetune_operator.kube.resources import CONFIG_MAPS, Object, Resource
from finetune_operator.kube.watch import Watch
from finetune_operator.planner.plan import Plan
from finetune_trainer.config import FailureClass, Phase, Progress, Termination
from support.kernel.fake_backend import FakeBackend, folders_named_by_uri

PENDING = {"phase": "Pending"}
RETRY_AFTER_SECONDS = 40.0
WIDGETS = Resource("example.com", "v1", "widgets", "Widget")


def _demand_quiet(job: FineTuneJob) -> None:
    """Refuse to go on beside what is left of another attempt: for the revision `lingers`."""
    if job.spec.model.revision == "lingers":
        raise NotCreatedError("a pod is still there; waiting until it is gone")


class ConfigMapBackend(Backend):
    """Backend `configmap`."""

    name: ClassVar[str] = "configmap"
    needs_finalizer: ClassVar[bool] = False
    finds_from_cache: ClassVar[bool] = True
    runs_without_cluster: ClassVar[bool] = False
    watches: ClassVar[tuple[Watch, ...]] = (Watch(CONFIG_MAPS),)

    def __init__(self, context: BackendContext) -> None:
        assert context.cluster is not None
        self._cluster = context.cluster
        self._cache = context.cluster.cache(CONFIG_MAPS)

    def validate(self, job: FineTuneJob) -> Sequence[Problem]:
        """Refuse the model's revision `forbidden`, and break on `breaks`."""
        revision = job.spec.model.revision
        if revision == "breaks":
            raise RuntimeError("a fault of the plugin")
        if revision == "forbidden":
            return [Problem("spec.model.revision", "forbidden is not allowed; use another")]
        return ()

    def writes(self, job: FineTuneJob) -> Sequence[Written]:
        return folders_named_by_uri(job)

    def render(self, plan: Plan, attempt: Attempt) -> Request:
        _demand_quiet(plan.job)
        metadata = plan.job.metadata
        name = f"{metadata.name}-{attempt.number}"
        labels = {
            JOB_LABEL: metadata.name,
            JOB_UID_LABEL: metadata.uid,
            ATTEMPT_LABEL: str(attempt.number),
        }
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata.name,
            "uid": metadata.uid,
            "controller": True,
        }
        made: Mapping[str, Any] = {
            "metadata": {
                "name": name,
                "namespace": metadata.namespace,
                "labels": labels,
                "ownerReferences": [owner],
            },
            "data": PENDING,
        }
        return Request(self.name, metadata.uid, attempt.number, name, (made,))

    async def submit(self, request: Request) -> Handle:
        (made,) = request.objects
        namespace = made["metadata"]["namespace"]
        try:
            there = await self._cluster.client.create(CONFIG_MAPS, made, namespace)
        except AlreadyExistsError:
            there = await self._cluster.client.get(CONFIG_MAPS, request.name, namespace)
            owners = there["metadata"].get("ownerReferences") or [{"kind": "nobody", "name": ""}]
            if owners[0].get("uid") != request.job_uid:
                raise AlreadyOwnedError(
                    f"ConfigMap {request.name} belongs to {owners[0]['kind']} "
                    f"{owners[0]['name']}; delete it or rename this job"
                ) from None
        self._cache.put(there)
        return Handle("ConfigMap", f"{namespace}/{request.name}", there["metadata"]["uid"])

    async def find(self, job: FineTuneJob, attempt: Attempt) -> Found | None:
        if job.status.attempt:
            _demand_quiet(job)
        namespace, name = job.metadata.namespace, f"{job.metadata.name}-{attempt.number}"
        made = self._cache.get(Key(namespace, name))
        if made is None and attempt.number <= job.status.attempt:
            made = await self._ask(name, namespace)
        owners = made["metadata"].get("ownerReferences") if made else None
        if made is None or not owners or owners[0].get("uid") != job.metadata.uid:
            return None
        handle = Handle("ConfigMap", f"{namespace}/{name}", made["metadata"]["uid"])
        return Found(handle, datetime.fromisoformat(made["metadata"]["creationTimestamp"]))

    async def _ask(self, name: str, namespace: str) -> Object | None:
        try:
            made = await self._cluster.client.get(CONFIG_MAPS, name, namespace)
        except NotFoundError:
            return None
        self._cache.put(made)
        return made

    async def observe(self, ref: AttemptRef) -> Observation:
        handle = ref.handle
        made = self._cache.get(Key(*handle.name.split("/")))
        if made is None or made["metadata"]["uid"] != handle.uid:
            return Observation(AttemptPhase.UNKNOWN, all_gone=True, message="it is gone")
        return _seen(made)

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        namespace, name = ref.handle.name.split("/")
        there = self._cache.get(Key(namespace, name))
        if there is None or there["data"]["phase"] == AttemptPhase.FAILED:
            return True
        change = {"data": {"phase": AttemptPhase.FAILED.value, "code": "75", "gone": "true"}}
        try:
            made = await self._cluster.client.patch(CONFIG_MAPS, name, namespace, change)
        except NotFoundError:
            return True
        self._cache.put(made)
        return True

    async def logs(self, ref: AttemptRef, rank: int, follow: bool = False) -> AsyncIterator[str]:
        name = ref.handle.name
        if rank:
            raise NoSuchRankError(f"rank {rank} does not exist; {name} has rank 0 alone")
        yield f"{name} says nothing"

    async def collect(self, ref: AttemptRef) -> Sequence[str]:
        return (f"file:///{ref.handle.name}",)


class UnwatchedBackend(ConfigMapBackend):
    """Backend `unwatched`: lives in the cluster, and is asked instead of watched."""

    name: ClassVar[str] = "unwatched"
    watches: ClassVar[tuple[Watch, ...]] = ()


class SecludedBackend(ConfigMapBackend):
    """Backend `secluded`: nobody can read the pages of its nodes."""

    name: ClassVar[str] = "secluded"
    pages_are_scraped: ClassVar[bool] = False


class DistantBackend(FakeBackend):
    """Backend `distant`: lives elsewhere, and is woken by what happens in the cluster."""

    name: ClassVar[str] = "distant"
    watches: ClassVar[tuple[Watch, ...]] = (Watch(CONFIG_MAPS),)


_EFFECTS = {"Queued": Effect.QUEUED, "CreationFailed": Effect.STALLED}


def _seen(made: Object) -> Observation:
    data: dict[str, str] = made["data"]
    code, word = data.get("code"), data.get("reason")
    return Observation(
        AttemptPhase(data["phase"]),
        all_gone="gone" in data,
        nodes_ready=int(data.get("ready", "0")),
        termination=_words(int(code)) if code else None,
        progress=_progress(data),
        unheard=data.get("unheard", ""),
        obstacle=Obstacle(word, data.get("message", ""), _EFFECTS.get(word, Effect.DELAYED))
        if word
        else None,
        message=data.get("message", ""),
    )


def _progress(data: Mapping[str, str]) -> Progress | None:
    """Return what `progress` has as JSON, or else what `step` says alone."""
    if text := data.get("progress"):
        return Progress.model_validate_json(text)
    if step := data.get("step"):
        return Progress(phase=Phase.TRAINING, step=int(step), total_steps=10)
    return None


def _words(code: int) -> Termination:
    kinds = {0: FailureClass.COMPLETED, 75: FailureClass.PREEMPTED}
    kind = kinds.get(code, FailureClass.WORKER_LOST)
    return Termination(failure_class=kind, exit_code=code, message=f"it ended with {code}")


class GreedyBackend(ConfigMapBackend):
    """Backend `greedy`: keeps less of a ConfigMap than `configmap` does."""

    name: ClassVar[str] = "greedy"
    watches: ClassVar[tuple[Watch, ...]] = (Watch(CONFIG_MAPS, trim=compact),)


class HoardingBackend(ConfigMapBackend):
    """Backend `hoarder`: keeps other fields than others do of two kinds."""

    name: ClassVar[str] = "hoarder"
    watches: ClassVar[tuple[Watch, ...]] = (
        Watch(WIDGETS, trim=compact),
        Watch(CONFIG_MAPS, trim=compact),
    )


class UnservedBackend(FakeBackend):
    """Backend `unserved`: watches a kind that no API server has by itself."""

    name: ClassVar[str] = "unserved"
    watches: ClassVar[tuple[Watch, ...]] = (Watch(WIDGETS),)


class FirstVersionBackend(ConfigMapBackend):
    """Backend `first-version`: names the kinds that it watches, as contracts once had it."""

    name: ClassVar[str] = "first-version"
    watches: ClassVar[tuple[Watch, ...]] = ("v1/ConfigMap",)  # type: ignore[assignment]


class ThrottledBackend(FakeBackend):
    """Backend `throttled`: its service asks to wait once before it takes an attempt.

    Attributes:
        asked: When `submit` was called, on the loop's clock.
    """

    name: ClassVar[str] = "throttled"
    asked: ClassVar[list[float]] = []

    async def submit(self, request: Request) -> Handle:
        self.asked.append(asyncio.get_running_loop().time())
        if len(self.asked) == 1:
            raise TransientError("too many requests", retry_after=RETRY_AFTER_SECONDS)
        return await super().submit(request)


class PatientBackend(FakeBackend):
    """Backend `patient`: what it was asked for may happen late, or never be confirmed."""

    name: ClassVar[str] = "patient"
    limits: ClassVar[Limits] = Limits(submit=30, late_submit=120, unconfirmed_cancel=300)


class CheapBackend(FakeBackend):
    """Backend `cheap`: its attempts are found without a request, and go with their job."""

    name: ClassVar[str] = "cheap"
    needs_finalizer: ClassVar[bool] = False
    finds_from_cache: ClassVar[bool] = True
