"""Find backends by name. Plugins register their class under one entry-point group.

Listing names does not import plugins; only `load` imports the requested plugin.
"""

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, packages_distributions
from typing import Any

from finetune_operator.backends.base import Backend
from finetune_operator.errors import BrokenBackendError, UnknownBackendError
from finetune_operator.kube.watch import Watch

log = logging.getLogger(__name__)

GROUP = "finetune_operator.backends"

_DATA = ("name", "needs_finalizer", "finds_from_cache", "runs_without_cluster")


def available(points: Iterable[EntryPoint] | None = None) -> tuple[str, ...]:
    """Return the names of all registered backends, sorted, without importing them.

    Args:
        points: Entry points to search; by default all installed ones.
    """
    return tuple(sorted({point.name for point in _points(points)}))


def load(name: str, points: Iterable[EntryPoint] | None = None) -> type[Backend]:
    """Import and return the backend class registered as `name`.

    Raises:
        UnknownBackendError: The name is not registered.
        BrokenBackendError: The import fails, two plugins register the name, or the class does not
            implement the contract of this release.
    """
    found = list(_points(points))
    targets = {point.value: point for point in found if point.name == name}
    if not targets:
        raise UnknownBackendError(_unknown(name, available(found)))
    if len(targets) > 1:
        raise BrokenBackendError(
            f"spec.backend.type {name} is registered by several plugins "
            f"({', '.join(sorted(targets))}); uninstall all but one"
        )
    (point,) = targets.values()
    try:
        kind: Any = point.load()
    except Exception as error:
        raise BrokenBackendError(
            f"spec.backend.type {name}: the plugin {point.value} cannot be imported "
            f"({cause_of(error, point.module)}); reinstall it or ask its author"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        fault = f"does not inherit {Backend.__module__}.{Backend.__name__}"
    else:
        fault = _fault(kind)
        if not fault:
            return kind
    raise BrokenBackendError(
        f"spec.backend.type {name}: the plugin {point.value} {fault}; it needs a version for this "
        "release of finetune-operator"
    )


def without_cluster(apart_from: str) -> dict[str, type[Backend]]:
    """Return the backends that need no cluster, by name; the log names unusable ones."""
    usable = {}
    for name in available():
        try:
            if name != apart_from and (kind := load(name)).runs_without_cluster:
                usable[name] = kind
        except BrokenBackendError as error:
            log.warning("backend left out", extra={"backend": name, "error": str(error)})
    return usable


def cause_of(error: Exception, module: str) -> str:
    """Return why a plugin does not start, and the package to install if a library is missing.

    Args:
        error: The plugin's exception.
        module: Module of its class.
    """
    reason = f"{type(error).__name__}: {error}"
    is_own = isinstance(error, ImportError) and f"{module}.".startswith(f"{error.name}.")
    if not isinstance(error, ModuleNotFoundError) or is_own:
        return reason
    owners = packages_distributions().get(module.partition(".")[0])
    return f"{reason}; pip install {owners[0] if owners else 'the package that has it'}"


def _fault(kind: type[Backend]) -> str:
    """Return why a class is not a backend of this release; empty if it is."""
    missing = [part for part in _DATA if not hasattr(kind, part)]
    missing += sorted(kind.__abstractmethods__)
    if missing:
        return f"lacks {', '.join(missing)}"
    if not all(isinstance(one, Watch) for one in kind.watches):
        return "has watches that are not of type finetune_operator.kube.watch.Watch"
    return ""


def _points(points: Iterable[EntryPoint] | None) -> Iterable[EntryPoint]:
    return entry_points(group=GROUP) if points is None else points


def _unknown(name: str, names: tuple[str, ...]) -> str:
    if not names:
        return (
            f"spec.backend.type {name} is not available: no backend is registered; "
            "install this package: pip install finetune-operator"
        )
    return (
        f"spec.backend.type {name} is not installed (available: {', '.join(names)}); use an "
        f"available one, or install the plugin that registers {name} under {GROUP}"
    )
