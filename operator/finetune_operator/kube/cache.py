"""Cache of the objects of one kind, filled by watches, lists and responses to writes.

The cache may be stale, and readers must allow for that. It never replaces an object by an older
version, although a response to a write and the watch may overtake each other.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import Object, Resource


class Key(NamedTuple):
    """Namespace and name of an object, by default of a job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Return `NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def key_of(obj: Object) -> Key:
    """Return the key of an object itself."""
    metadata = obj["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


def job_key_of(obj: Object) -> Key | None:
    """Return the key of the job that an object belongs to by its label."""
    metadata = obj["metadata"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None


def version_of(obj: Object) -> int:
    """Return the resourceVersion as a number.

    Kubernetes 1.35 documents that versions are ordered numbers. Earlier API servers use the
    revision of etcd, which is one, too.
    """
    return int(obj["metadata"]["resourceVersion"])


class ObjectCache:
    """All objects of one kind, by key and by the job they belong to.

    Attributes:
        is_synced: Whether the cache has received a full list. Until then an absent object may
            exist.
    """

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.is_synced = False
        self._objects: dict[Key, Object] = {}
        self._of_job: dict[Key, set[Key]] = {}
        self._deleted: dict[Key, int] = {}
        self._listeners: list[Callable[[Key], object]] = []

    def __len__(self) -> int:
        """Count the objects."""
        return len(self._objects)

    def __iter__(self) -> Iterator[Object]:
        """Iterate over a snapshot of all objects; the cache may change meanwhile."""
        return iter(list(self._objects.values()))

    def get(self, key: Key) -> Object | None:
        """Return the cached object, which callers must not change; None if there is none."""
        return self._objects.get(key)

    def of_job(self, job: Key) -> list[Object]:
        """Return the objects whose label names the job, sorted by name.

        Callers compare the owner's uid, because objects of a deleted job with the same name may
        remain.
        """
        return [self._objects[key] for key in sorted(self._of_job.get(job, ()))]

    def listen(self, listener: Callable[[Key], object]) -> None:
        """Call a function with the key of each object now, and later on every change."""
        self._listeners.append(listener)
        for key in self._objects:
            listener(key)

    def put(self, obj: Object) -> bool:
        """Store an object unless the cached version is at least as new.

        Returns:
            Whether the object requires a reconcile. An older object does, too: the cached version
            is then the response to our own write, which overtook the watch and includes another
            writer's change that no reconcile has seen yet.
        """
        key, version = key_of(obj), version_of(obj)
        cached = self._objects.get(key)
        if cached is not None and version <= version_of(cached):
            return version < version_of(cached)
        if version <= self._deleted.get(key, -1):
            return False
        self._take(key)
        self._deleted.pop(key, None)
        self._objects[key] = obj
        if (job := job_key_of(obj)) is not None:
            self._of_job.setdefault(job, set()).add(key)
        self._notify(key)
        return True

    def remove(self, obj: Object) -> bool:
        """Remove a deleted object; `obj` is its last version or newer.

        Returns:
            Whether an object was removed.
        """
        key, version = key_of(obj), version_of(obj)
        cached = self._objects.get(key)
        if cached is not None and version_of(cached) > version:
            return False
        self._deleted[key] = max(version, self._deleted.get(key, -1))
        return self._forget(key)

    def forget_deletions(self, version: int) -> None:
        """Forget deletions up to a version; call it only if no older response is in flight."""
        self._deleted = {key: seen for key, seen in self._deleted.items() if seen > version}

    def replace(
        self, items: Iterable[Object], version: str, namespace: str | None = None
    ) -> list[Object]:
        """Store a full list, and remove the objects that it lacks.

        Args:
            items: All objects, of one namespace or of all.
            version: resourceVersion of the list; newer objects remain in the cache.
            namespace: The namespace that was listed; None for all.

        Returns:
            The removed objects and the stored objects that require a reconcile (see `put`).
        """
        listed = {key_of(obj): obj for obj in items}
        at = int(version)
        removed = [
            obj
            for key, obj in self._objects.items()
            if key not in listed
            and version_of(obj) <= at
            and (namespace is None or key.namespace == namespace)
        ]
        for obj in removed:
            self._forget(key_of(obj))
        self.forget_deletions(at)
        self.is_synced = True
        return removed + [obj for obj in listed.values() if self.put(obj)]

    def _forget(self, key: Key) -> bool:
        if not self._take(key):
            return False
        self._notify(key)
        return True

    def _take(self, key: Key) -> bool:
        cached = self._objects.pop(key, None)
        if cached is None:
            return False
        if (job := job_key_of(cached)) is not None:
            keys = self._of_job[job]
            keys.discard(key)
            if not keys:
                del self._of_job[job]
        return True

    def _notify(self, key: Key) -> None:
        for listener in self._listeners:
            listener(key)
