"""The informers of one leader term: one for each kind and namespace that its backends watch."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from finetune_operator.backends.base import Backend
from finetune_operator.kernel.informer import Informer, NotShown
from finetune_operator.kube.resources import Resource
from finetune_operator.kube.watch import Watch

Place = str | None
"""A namespace; None for all namespaces, and for kinds without namespaces."""


class Informers:
    """All informers of one leader term.

    Args:
        namespaces: Namespaces served; empty for all.
        make: Returns the informer of one kind in one place.
    """

    def __init__(
        self, namespaces: Sequence[str], make: Callable[[Watch, Place, str], Informer]
    ) -> None:
        self._namespaces = namespaces
        self._make = make
        self._vital: dict[str, frozenset[Resource]] = {}
        self.all: list[Informer] = []

    def add(self, backends: Mapping[str, Backend]) -> None:
        """Create the informers of the kinds that these backends watch."""
        self._vital = {
            name: frozenset(watch.resource for watch in backend.watches if watch.is_vital)
            for name, backend in backends.items()
        }
        watches = {
            watch.resource: watch for backend in backends.values() for watch in backend.watches
        }
        self.all = [
            self._make(watch, place, _used_by(backends, watch))
            for watch in watches.values()
            for place in _places(watch.resource, self._namespaces)
        ]

    async def wait_until_synced(self) -> None:
        """Wait until each kind has been listed once, or refused."""
        for informer in self.all:
            await informer.is_synced.wait()

    def not_shown_to(self, namespace: str, backend: str) -> NotShown | None:
        """Return why a backend's attempts in a namespace are hidden; None if they are shown."""
        needed = self._vital.get(backend, frozenset())
        found = (
            informer.not_shown
            for informer in self.all
            if informer.watch.resource in needed and informer.namespace in (None, namespace)
        )
        return min(filter(None, found), key=lambda reason: reason.since, default=None)

    def forbidden(self) -> dict[str, str]:
        """Return the message of each informer whose objects are hidden."""
        return {
            name_of(informer): informer.forbidden.message
            for informer in self.all
            if informer.forbidden
        }

    def absent(self) -> dict[str, str]:
        """Return the API server's message for each kind that it does not serve."""
        return {name_of(informer): informer.absent for informer in self.all if informer.absent}

    def silent_seconds(self) -> dict[str, float]:
        """Return the time since the last request or event of each informer."""
        now = asyncio.get_running_loop().time()
        return {name_of(informer): now - informer.last_activity for informer in self.all}


def name_of(informer: Informer) -> str:
    """Return `KIND NAMESPACE` of an informer."""
    return name_in(informer.watch.resource, informer.namespace)


def name_in(resource: Resource, place: Place) -> str:
    """Return `KIND NAMESPACE`."""
    return f"{resource} {place or ''}".strip()


def _used_by(backends: Mapping[str, Backend], watch: Watch) -> str:
    return ", ".join(name for name, backend in backends.items() if watch in backend.watches)


def _places(resource: Resource, namespaces: Sequence[str]) -> Sequence[Place]:
    return namespaces if resource.namespaced and namespaces else (None,)
