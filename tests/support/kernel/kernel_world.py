"""A cluster in memory with one job and an operator process that may die, for tests."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.validation import defaulted
from finetune_operator.backends import registry
from finetune_operator.backends.base import Attempt, Backend, BackendContext
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.events import EventPoster
from finetune_operator.kernel.finalizer import DELETION_SECONDS
from finetune_operator.kernel.queue import Result
from finetune_operator.kernel.reconciler import FIRST_OBSERVATION_SECONDS, Reconciler
from finetune_operator.kube.api_errors import ForbiddenError
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.cluster import Cluster
from finetune_operator.kube.resources import CONFIG_MAPS, EVENTS, FINE_TUNE_JOBS, Object, Resource
from finetune_operator.planner.plan import make_plan
from support.api.builders import manifest
from support.kernel.fake_api import BeforeCall, FakeApi

KEY = Key("ns", "tiny")
START = datetime(2026, 1, 1, tzinfo=UTC)
POINTS = [
    EntryPoint(
        "kubernetes",
        "finetune_operator.backends.kubernetes.backend:KubernetesBackend",
        registry.GROUP,
    ),
    EntryPoint("configmap", "support.kernel.configmap_backend:ConfigMapBackend", registry.GROUP),
    EntryPoint("fake", "support.kernel.fake_backend:FakeBackend", registry.GROUP),
]
PLAYS: dict[str, dict[str, str]] = {
    "runs": {"phase": "Running", "ready": "1", "step": "3"},
    "is stuck": {"phase": "Pending", "reason": "Unschedulable", "message": "no node"},
    "fails": {"phase": "Failed", "code": "137"},
    "is preempted": {"phase": "Failed", "code": "75", "gone": "yes"},
    "finds bad data": {"phase": "Failed", "code": "65", "gone": "yes"},
    "is gone": {"gone": "yes", "phase": "Failed"},
    "completes": {"phase": "Succeeded", "code": "0", "gone": "yes"},
}
QUOTA_SENTENCE = "configmaps is forbidden: exceeded quota: team"
HAPPENINGS = (*PLAYS, "vanishes", "suspend", "resume", "restart", "wait")
"""What can happen to a job; see `happen`."""
WRITES = ("create", "patch", "update", "delete")


class Crash(BaseException):
    """The process is gone."""


class RationedApi(FakeApi):
    """A server with a quota on ConfigMaps.

    Attributes:
        is_used_up: No ConfigMap may be created.
    """

    is_used_up = False

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None
    ) -> Object:
        if self.is_used_up and resource == CONFIG_MAPS:
            raise ForbiddenError(403, "Forbidden", QUOTA_SENTENCE)
        return await super().create(resource, body, namespace)


class World:
    """A cluster, its clock, and an operator process that may die.

    Attributes:
        woken: Jobs that the process has had looked at by itself.
    """

    def __init__(self) -> None:
        self.api = RationedApi()
        self.api.now = lambda: self.now
        self.now = START
        self.writes = 0
        self.writes_but_events = 0
        self.most_alive = 0
        self.crashes = 0
        self.start_process()
        self.api.after = self._count

    def start_process(self, points: Sequence[EntryPoint] = POINTS) -> None:
        """Begin with nothing but what the API server knows, and with these plugins."""
        self.caches: dict[Resource, ObjectCache] = {}
        self.woken: list[Key] = []
        cluster = Cluster(self.api, self.cache)
        context = BackendContext(Path(), {}, cluster, now=lambda: self.now)
        self.backends = Backends(context, points, self.given(context))
        self.reconciler = Reconciler(
            self.api,
            self.cache(FINE_TUNE_JOBS),
            self.backends,
            EventPoster(self.api, "test"),
            now=lambda: self.now,
            wake=self.woken.append,
        )

    def given(self, context: BackendContext) -> Mapping[str, Backend] | None:
        """Return the backends in place of those of installed packages; None for those."""
        return None

    def cache(self, resource: Resource) -> ObjectCache:
        return self.caches.setdefault(resource, ObjectCache(resource))

    def _count(self, verb: str, resource: Resource, name: str) -> None:
        self.writes += 1
        self.writes_but_events += resource != EVENTS
        alive = [one for one in self.api.objects(CONFIG_MAPS) if "gone" not in one["data"]]
        self.most_alive = max(self.most_alive, len(alive))

    async def catch_up(self) -> None:
        """Let the watches deliver everything."""
        for resource in (FINE_TUNE_JOBS, CONFIG_MAPS):
            listing = await self.api.list(resource)
            self.cache(resource).replace(listing.items, listing.resource_version)

    async def look_once(self) -> Result:
        """Reconcile once; a job that waits for its finalizer to keep it has waited."""
        await self.catch_up()
        look = await self.reconciler.reconcile(KEY)
        if look.requeue_seconds == DELETION_SECONDS and "attempts" not in self.job["status"]:
            self.now += timedelta(seconds=DELETION_SECONDS)
            return await self.look_once()
        return look

    async def settle(self) -> Result:
        """Reconcile until nothing changes; what breaks off or dies is followed by another try."""
        for _ in range(60):
            before = self.writes
            try:
                look = await self.look_once()
            except FineTuneError:
                continue
            except Crash:
                self.crashes += 1
                self.start_process()
                continue
            if self.writes == before and look.requeue_seconds not in (0, FIRST_OBSERVATION_SECONDS):
                return look
        raise AssertionError("it does not settle")

    async def apply(self, **overrides: Any) -> None:
        fields: dict[str, Any] = {"model__source": "hf://a/b", "dataset__source": "hf://a/c"}
        fields |= {"backend": {"type": "configmap"}, **overrides}
        made = defaulted(manifest(**fields))
        await self.api.create(FINE_TUNE_JOBS, made, "ns")

    async def leave_unrecorded(self, points: Sequence[EntryPoint] = POINTS) -> None:
        """Create attempt 1 as operator 0.1.0 did, before any status records it, and restart."""
        await self.catch_up()
        job = FineTuneJob.model_validate(self.job)
        backend = self.backends.of(job)
        await backend.submit(backend.render(make_plan(job), Attempt(1)))
        self.start_process(points)

    async def change(self, **spec: Any) -> None:
        await self.api.patch(FINE_TUNE_JOBS, "tiny", "ns", {"spec": spec})

    async def play(self, number: int, **data: str) -> None:
        await self.api.patch(CONFIG_MAPS, f"tiny-{number}", "ns", {"data": data})

    @property
    def job(self) -> Object:
        (made,) = self.api.objects(FINE_TUNE_JOBS)
        return made

    def condition(self, kind: str) -> Object:
        found: Object = next(one for one in self.job["status"]["conditions"] if one["type"] == kind)
        return found

    @property
    def attempts(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.api.objects(CONFIG_MAPS)]


def nothing(verb: str, resource: Resource, name: str) -> None:
    """Let it happen."""


def at_write(number: int, error: BaseException) -> BeforeCall:
    """Return a hook that raises at the write of that number, once."""
    seen = 0

    def hook(verb: str, resource: Resource, name: str) -> None:
        nonlocal seen
        if verb in WRITES:
            seen += 1
            if seen == number:
                raise error

    return hook


async def happen(world: World, what: str) -> None:
    """Let one thing happen in the cluster, unless nothing is there that it could happen to."""
    newest: Object | None = next(
        (one for one in reversed(world.api.objects(CONFIG_MAPS)) if "gone" not in one["data"]),
        None,
    )
    if what in ("quota is used up", "quota allows"):
        world.api.is_used_up = what == "quota is used up"
    elif what in ("suspend", "resume"):
        await world.change(suspend=what == "suspend")
    elif what == "restart":
        world.start_process()
    elif what == "wait":
        world.now += timedelta(minutes=1)
    elif newest is not None and what == "vanishes":
        world.api.remove(CONFIG_MAPS, newest["metadata"]["name"], "ns")
    elif newest is not None:
        name = newest["metadata"]["name"]
        await world.api.patch(CONFIG_MAPS, name, "ns", {"data": PLAYS[what]})
