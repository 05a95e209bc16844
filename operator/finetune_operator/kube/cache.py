"""Objects of one kind as they were last seen; filled by watches, lists and answers to writes.

It may be late, so readers must cope with that. It never goes back to an older version of an object:
an answer to a write may overtake the watch, and the watch an answer.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from finetune_operator.kube.labels import JOB_LABEL
from finetune_operator.kube.resources import Object, Resource


class Key(NamedTuple):
    """Namespace and name; of a job where nothing else is said."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """`NAMESPACE/NAME`."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


def key_of(made: Object) -> Key:
    """Return the key of an object itself."""
    metadata = made["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


def job_key_of(made: Object) -> Key | None:
    """Return the key of the job that an object belongs to by its label."""
    metadata = made["metadata"]
    name = (metadata.get("labels") or {}).get(JOB_LABEL)
    return Key(metadata.get("namespace", ""), name) if name else None


def version_of(made: Object) -> int:
    """Return the resourceVersion as a number, which Kubernetes 1.35 declares it to be.

    Every API server before counts too, as it hands out etcd's revision.
    """
    return int(made["metadata"]["resourceVersion"])


class ObjectCache:
    """All objects of one kind, by key and by the job they belong to.

    Attributes:
        is_synced: Whether it has had a full list; before that, absence means nothing.
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
        """Yield every object; the cache may change meanwhile."""
        return iter(list(self._objects.values()))

    def get(self, key: Key) -> Object | None:
        """Return the object as last seen; do not change it."""
        return self._objects.get(key)

    def of_job(self, job: Key) -> list[Object]:
        """Return the objects whose label names the job, in the order of their names.

        Compare their owner's uid: a deleted job of the same name may have left some.
        """
        return [self._objects[key] for key in sorted(self._of_job.get(job, ()))]

    def listen(self, listener: Callable[[Key], object]) -> None:
        """Call a function with the key of each object now, and later of each that changes."""
        self._listeners.append(listener)
        for key in self._objects:
            listener(key)

    def put(self, made: Object) -> bool:
        """Store an object unless the cache has one as new; return whether it is news.

        An older object is news, too: the newer one is the answer to a write of ours that overtook
        it, and includes a change by somebody else that nobody has reacted to.
        """
        key, version = key_of(made), version_of(made)
        there = self._objects.get(key)
        if there is not None and version <= version_of(there):
            return version < version_of(there)
        if version <= self._deleted.get(key, -1):
            return False
        self._forget(key)
        self._deleted.pop(key, None)
        self._objects[key] = made
        if (job := job_key_of(made)) is not None:
            self._of_job.setdefault(job, set()).add(key)
        self._tell(key)
        return True

    def remove(self, made: Object) -> bool:
        """Remove an object that was deleted; `made` is its last state, or a newer one."""
        key, version = key_of(made), version_of(made)
        there = self._objects.get(key)
        if there is not None and version_of(there) > version:
            return False
        self._deleted[key] = max(version, self._deleted.get(key, -1))
        return self._forget(key)

    def forget_deletions(self, version: int) -> None:
        """Forget deletions up to a version; no answer older than that may still arrive."""
        self._deleted = {key: seen for key, seen in self._deleted.items() if seen > version}

    def replace(
        self, items: Iterable[Object], version: str, namespace: str | None = None
    ) -> list[Object]:
        """Store a full list, and remove what it lacks.

        Args:
            items: All objects, of one namespace or of all.
            version: The list's resourceVersion: what is newer in the cache stays.
            namespace: The namespace that was listed; None for all.

        Returns:
            The objects that are news (see `put`) or gone.
        """
        listed = {key_of(one): one for one in items}
        at = int(version)
        gone = [
            one
            for key, one in self._objects.items()
            if key not in listed
            and version_of(one) <= at
            and (namespace is None or key.namespace == namespace)
        ]
        for one in gone:
            self._forget(key_of(one))
        self.forget_deletions(at)
        self.is_synced = True
        return gone + [one for one in listed.values() if self.put(one)]

    def _forget(self, key: Key) -> bool:
        there = self._objects.pop(key, None)
        if there is None:
            return False
        if (job := job_key_of(there)) is not None:
            keys = self._of_job[job]
            keys.discard(key)
            if not keys:
                del self._of_job[job]
        self._tell(key)
        return True

    def _tell(self, key: Key) -> None:
        for listener in self._listeners:
            listener(key)
