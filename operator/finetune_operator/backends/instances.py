"""Backends by name, each imported and made once, when it is first asked for.

The operator's kernel holds them; what is registered says `registry`.
"""

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.errors import BrokenBackendError, FineTuneError, UnknownBackendError
from finetune_operator.kube.resources import Resource
from finetune_operator.kube.watch import Watch

log = logging.getLogger(__name__)


class Backends:
    """Backends by name, each made once.

    Args:
        context: What each is given.
        points: Entry points besides those of installed packages.
        given: By name, in place of those of installed packages; None for those.
    """

    def __init__(
        self,
        context: BackendContext,
        points: Iterable[EntryPoint],
        given: Mapping[str, Backend] | None = None,
    ) -> None:
        self._context = context
        installed = entry_points(group=registry.GROUP) if given is None else ()
        self._points = [*installed, *points]
        self._has_only_given = given is not None
        self._made: dict[str, Backend] = dict(given or {})
        self._broken: dict[str, FineTuneError] = {}

    def load_all(self) -> dict[str, Backend]:
        """Return every backend that can be used, by its name; the log tells why one cannot.

        Caches are shared by kind. A plugin that keeps other fields of a kind than those before it
        is left out; those of this package come first.
        """
        found: dict[str, Backend] = {}
        kept: dict[Resource, tuple[Watch, str]] = {}
        ours = {
            point.name for point in self._points if point.value.startswith("finetune_operator.")
        }
        names = {*self._made, *registry.available(self._points)}
        for name in sorted(names, key=lambda one: (one not in ours, one)):
            try:
                backend = self.get(name)
                for watch in backend.watches:
                    there, other = kept.setdefault(watch.resource, (watch, name))
                    if there != watch:
                        raise BrokenBackendError(
                            f"spec.backend.type {name} keeps other fields of {watch.resource} than "
                            f"{other} does, and they share a cache; uninstall one of the two, or "
                            "let both declare the same Watch"
                        )
            except FineTuneError as error:
                self._broken[name] = error
                log.error("backend left out", extra={"backend": name, "error": str(error)})
            else:
                found[name] = backend
        return found

    def get(self, name: str) -> Backend:
        """Return the backend of that name.

        Raises:
            UnknownBackendError: none is registered under it.
            BrokenBackendError: it cannot be imported or made, or was left out.
        """
        if name in self._broken:
            raise self._broken[name]
        if name not in self._made:
            if self._has_only_given and name not in registry.available(self._points):
                raise UnknownBackendError(
                    f"spec.backend.type {name} does not run here (available: "
                    f"{', '.join(self._made)}); use one of these, or apply the job to a cluster"
                )
            kind = registry.load(name, self._points)
            try:
                self._made[name] = kind(self._context)
            except Exception as error:
                raise BrokenBackendError(
                    f"spec.backend.type {name} cannot be used here "
                    f"({type(error).__name__}: {error}); mend that, or use another backend"
                ) from error
        return self._made[name]

    def of(self, job: FineTuneJob) -> Backend:
        """Return the backend of a job.

        Raises:
            UnknownBackendError: none is registered under its name.
            BrokenBackendError: it cannot be imported or made.
        """
        return self.get(job.spec.backend.type)

    def needs_finalizer(self, name: str) -> bool:
        """Say whether attempts of the backend outlive their jobs; not where it cannot be used."""
        try:
            return self.get(name).needs_finalizer
        except FineTuneError:
            return False

    def finds_from_cache(self, name: str) -> bool | None:
        """Say whether it finds attempts without a request; None where it cannot be used."""
        try:
            return self.get(name).finds_from_cache
        except FineTuneError:
            return None
