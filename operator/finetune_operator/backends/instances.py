"""Backends by name, each imported and made once, when it is first asked for.

The operator's kernel holds them; what is registered says `registry`.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.errors import BrokenBackendError, FineTuneError, UnknownBackendError


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

    def load_all(self) -> dict[str, Backend | FineTuneError]:
        """Return every registered backend by its name, or why it cannot be used."""
        found: dict[str, Backend | FineTuneError] = {}
        for name in {*self._made, *registry.available(self._points)}:
            try:
                found[name] = self.get(name)
            except FineTuneError as error:
                found[name] = error
        return found

    def get(self, name: str) -> Backend:
        """Return the backend of that name.

        Raises:
            UnknownBackendError: none is registered under it.
            BrokenBackendError: it cannot be imported or made.
        """
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

    def live_in_cluster(self, name: str) -> bool | None:
        """Say whether the backend's attempts do; None where it cannot be used."""
        try:
            return self.get(name).lives_in_cluster
        except FineTuneError:
            return None

    def live_outside(self, name: str) -> bool:
        """Say whether they outlive their jobs: nothing in the cluster would collect them."""
        return self.live_in_cluster(name) is False
