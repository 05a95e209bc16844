"""What a term sees of the cluster besides FineTuneJobs: the kinds its backends watch, by place."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from finetune_operator.backends.base import Backend
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.watches import WATCHED, KindWatch, Refused, Watched
from finetune_operator.kube.resources import Resource

log = logging.getLogger(__name__)

Place = str | None
"""A namespace; None for all of them, and for what lives in none."""


class Sight:
    """Every watch of one term.

    Args:
        backends: By name, or why one cannot be used.
        namespaces: Namespaces served; empty for all.
        watch: Makes the watch of one kind in one place.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend | FineTuneError],
        namespaces: Sequence[str],
        watch: Callable[[Watched, Place], KindWatch],
    ) -> None:
        self._needs = {name: frozenset(_kinds(name, one)) for name, one in backends.items()}
        wanted = {kind: WATCHED[kind] for kinds in self._needs.values() for kind in kinds}
        self.watches = [
            watch(watched, place)
            for watched in wanted.values()
            for place in _places(watched.resource, namespaces)
        ]

    async def settle(self) -> None:
        """Return when everything was seen once, or the API server has refused to show it."""
        for watch in self.watches:
            await watch.is_synced.wait()

    def lacks(self, namespace: str, backend: str) -> Refused | None:
        """Return what keeps the attempts of a backend in a namespace from being seen."""
        named = (WATCHED[kind] for kind in self._needs.get(backend, ()))
        needed = {one.resource for one in named if one.is_vital}
        found = (
            watch.refused
            for watch in self.watches
            if watch.refused
            and watch.watched.resource in needed
            and watch.namespace in (None, namespace)
        )
        return min(found, key=lambda one: one.since, default=None)

    def refused(self) -> dict[str, str]:
        """Return what is not shown, and why."""
        return {name_of(one): one.refused.message for one in self.watches if one.refused}

    def absent(self) -> dict[str, str]:
        """Return which kinds the API server does not serve, and what it says."""
        return {name_of(one): one.absent for one in self.watches if one.absent}

    def silent_seconds(self) -> dict[str, float]:
        """Return for how long nothing was heard of each watch."""
        now = asyncio.get_running_loop().time()
        return {name_of(one): now - one.heard_at for one in self.watches}


def name_of(watch: KindWatch) -> str:
    """Return `KIND NAMESPACE` of a watch."""
    return name_in(watch.watched.resource, watch.namespace)


def name_in(resource: Resource, place: Place) -> str:
    """Return `KIND NAMESPACE`."""
    return f"{resource} {place or ''}".strip()


def _kinds(name: str, backend: Backend | FineTuneError) -> Iterable[str]:
    if isinstance(backend, FineTuneError):
        log.error("backend left out", extra={"backend": name, "error": str(backend)})
        return
    for kind in backend.watches:
        if kind in WATCHED:
            yield kind
        else:
            log.error("kind cannot be watched", extra={"backend": name, "kind": kind})


def _places(resource: Resource, namespaces: Sequence[str]) -> Sequence[Place]:
    return namespaces if resource.namespaced and namespaces else (None,)
