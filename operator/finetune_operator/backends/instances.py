"""Backends by name, each imported and created once per term, and closed at its end.

The operator's kernel owns them; `registry` lists the registered names.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.hosting import HostedBackend
from finetune_operator.backends.threads import BlockingCalls
from finetune_operator.errors import (
    BrokenBackendError,
    FineTuneError,
    TransientError,
    UnknownBackendError,
)
from finetune_operator.kube.cache import Key
from finetune_operator.kube.resources import Resource
from finetune_operator.kube.watch import Watch

log = logging.getLogger(__name__)

_IMPORT_SECONDS = 10.0  # the first reconcile waits for it


class Backends:
    """Backends by name, each created once.

    Args:
        context: Argument of each constructor.
        points: Entry points in addition to installed ones.
        given: Backends by name, instead of the installed ones; classes are instantiated. None for
            the installed ones.
        wake: Requeues a job; for backends that request it.
    """

    def __init__(
        self,
        context: BackendContext,
        points: Iterable[EntryPoint],
        given: Mapping[str, Backend | type[Backend]] | None = None,
        *,
        wake: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._context = context
        installed = entry_points(group=registry.GROUP) if given is None else ()
        self._points = [*installed, *points]
        self._given = given
        self._wake = wake
        self._hosted = {
            name: self._host(name, one)
            for name, one in (given or {}).items()
            if isinstance(one, Backend)
        }
        self._broken: dict[str, FineTuneError] = {}

    async def load_all(self) -> dict[str, Backend]:
        """Return every usable backend by name; the log has the reason for each unusable one.

        Each backend is imported in its own thread. Backends share the cache of a kind, so a plugin
        that caches other fields of a kind than an earlier backend is omitted. Backends of this
        package come first.
        """
        ours = {
            point.name for point in self._points if point.value.startswith("finetune_operator.")
        }
        names = sorted(
            {*(self._given or ()), *registry.available(self._points)},
            key=lambda name: (name not in ours, name),
        )
        faults = await asyncio.gather(*(self._load(name, name in ours) for name in names))
        found: dict[str, Backend] = {}
        kept: dict[Resource, tuple[Watch, str]] = {}
        for name, fault in zip(names, faults, strict=True):
            if fault := fault or self._conflict(name, kept):
                self._broken[name] = fault
                log.error("backend left out", extra={"backend": name, "error": str(fault)})
            else:
                found[name] = self._hosted[name].backend
        return found

    async def close(self) -> None:
        """Close the started backends; no verb is called afterwards."""
        await asyncio.gather(*(one.close() for one in self._hosted.values()))

    def get(self, name: str) -> HostedBackend:
        """Return the backend of that name.

        Raises:
            UnknownBackendError: The name is not registered.
            BrokenBackendError: The backend cannot be imported or created, or was left out.
        """
        if name in self._broken:
            raise self._broken[name]
        if name not in self._hosted:
            self._hosted[name] = self._host(name, self._make(name))
        return self._hosted[name]

    def __contains__(self, name: str) -> bool:
        """Return whether a backend of that name has been loaded."""
        return name in self._hosted

    def of(self, job: FineTuneJob) -> HostedBackend:
        """Return the backend of a job.

        Raises:
            UnknownBackendError: The name is not registered.
            BrokenBackendError: The backend cannot be imported or created.
        """
        return self.get(job.spec.backend.type)

    def needs_finalizer(self, name: str) -> bool:
        """Return whether the backend's attempts outlive their jobs; False if it is unusable."""
        try:
            return self.get(name).backend.needs_finalizer
        except FineTuneError:
            return False

    def finds_from_cache(self, name: str) -> bool | None:
        """Return whether the backend finds attempts without a request; None if it is unusable."""
        try:
            return self.get(name).backend.finds_from_cache
        except FineTuneError:
            return None

    def pages_are_scraped(self, name: str) -> bool:
        """Return whether Prometheus can scrape the nodes of a backend; True if it is unusable."""
        try:
            return self.get(name).backend.pages_are_scraped
        except FineTuneError:
            return True

    async def _load(self, name: str, is_ours: bool) -> FineTuneError | None:
        """Create a backend, unless it was given; return why it cannot be used."""
        if name in self._hosted:
            return None
        title = f"spec.backend.type {name}"
        seconds = None if is_ours else _IMPORT_SECONDS
        try:
            backend = await BlockingCalls(title, 1).run(
                "its import", lambda: self._make(name), seconds
            )
        except TransientError as error:
            return BrokenBackendError(f"{error}, and restart the operator")
        except FineTuneError as error:
            return error
        self._hosted[name] = self._host(name, backend)
        return None

    def _make(self, name: str) -> Backend:
        """Import and create a backend.

        Raises:
            UnknownBackendError: The name is not registered.
            BrokenBackendError: The backend cannot be imported or created.
        """
        kind = (self._given or {}).get(name)
        is_registered = name in registry.available(self._points)
        if self._given is not None and kind is None and not is_registered:
            raise UnknownBackendError(
                f"spec.backend.type {name} does not run here (available: "
                f"{', '.join(self._given)}); use an available one, or apply the job to a cluster"
            )
        if not isinstance(kind, type):
            kind = registry.load(name, self._points)
        try:
            return kind(self._context)
        except Exception as error:
            raise BrokenBackendError(
                f"spec.backend.type {name} cannot be used here "
                f"({type(error).__name__}: {error}); fix that, or use another backend"
            ) from error

    def _conflict(self, name: str, kept: dict[Resource, tuple[Watch, str]]) -> FineTuneError | None:
        """Record which fields of each kind a backend caches; return a conflict, if there is one."""
        declared = dict(kept)
        for watch in self._hosted[name].backend.watches:
            there, other = declared.setdefault(watch.resource, (watch, name))
            if there != watch:
                return BrokenBackendError(
                    f"spec.backend.type {name} keeps other fields of {watch.resource} than "
                    f"{other} does, and they share a cache; uninstall either, or "
                    "let both declare the same Watch"
                )
        kept.update(declared)
        return None

    def _host(self, name: str, backend: Backend) -> HostedBackend:
        cluster = self._context.cluster
        limit = cluster.client.options.seconds_to_write if cluster else None
        return HostedBackend(name, backend, self._wake, limit)
