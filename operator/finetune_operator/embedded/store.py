"""Objects, their versions and their history: what etcd and the garbage collector do together.

`server.py` calls it, on one event loop. A stored object is never changed, only replaced, so whoever
holds one need not copy it.
"""

import asyncio
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import orjson

from finetune_operator.embedded.kinds import Kind, builtin_kinds, custom_kind
from finetune_operator.embedded.refusals import expired
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import EVENTS, NAMESPACES, Object

CRDS = "customresourcedefinitions.apiextensions.k8s.io"
FOREGROUND = "foregroundDeletion"
_REMEMBERED = 20_000
_EVENTS_LIVE = timedelta(hours=1)  # as on a real API server
_SAVE_SECONDS = 0.2
_LEAP = 10_000  # a crash may lose the last versions; none of them may come again


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history.

    Attributes:
        plural: Full name of the kind, as `jobs.batch`.
        before: The object before; None where it is new.
        made: The object after, or its last state, with the version of the change.
    """

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    plural: str
    before: Object | None
    made: Object


class StateError(FineTuneError):
    """The file that keeps the objects cannot be understood."""


class Store:
    """All objects of all kinds.

    Args:
        file: Where objects are kept between runs; None keeps them in memory only.

    Raises:
        StateError: the file cannot be understood.

    Attributes:
        version: Number of the last change.
        oldest: Version before which nothing is remembered.
        kinds: What is served, by full name.
        is_closed: Watches are to end.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.version = 1
        self.oldest = 1
        self.is_closed = False
        self.kinds: dict[str, Kind] = {str(one.resource): one for one in builtin_kinds()}
        self._file = file
        self._objects: dict[str, dict[Key, Object]] = {}
        self._history: list[Change] = []
        self._news: asyncio.Future[None] | None = None
        self._needs_sweep = asyncio.Event()
        self._needs_save = asyncio.Event()
        if file is not None and file.exists():
            try:
                self._load(orjson.loads(file.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                raise StateError(
                    f"{file} holds no objects of an embedded API server ({error!r}); move it away "
                    "to start with none"
                ) from error

    def get(self, kind: Kind, key: Key) -> Object | None:
        """Return one object."""
        return self._objects.get(str(kind.resource), {}).get(key)

    def objects(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Return all objects of a kind, or those of one namespace, in the order of their names."""
        stored = self._objects.get(str(kind.resource), {})
        return [stored[key] for key in sorted(stored) if namespace in (None, key.namespace)]

    def put(self, kind: Kind, made: Object) -> Object:
        """Store an object in place of the one of its name, and return it with its version.

        An object whose deletion was only waiting for its finalizers is removed instead.
        """
        metadata = made["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            return self.remove(kind, made)
        before = self.get(kind, key_of(made))
        made = self._log(kind, "MODIFIED" if before else "ADDED", before, made)
        self._objects.setdefault(str(kind.resource), {})[key_of(made)] = made
        if str(kind.resource) == CRDS:
            added = custom_kind(made)
            self.kinds[str(added.resource)] = added
        known = before["metadata"].get("ownerReferences") if before else None
        if metadata.get("ownerReferences") != known:
            self._needs_sweep.set()  # its owners may be gone already
        return made

    def remove(self, kind: Kind, made: Object) -> Object:
        """Take an object away, and in time what it owned; return its last state."""
        before = self._objects[str(kind.resource)].pop(key_of(made))
        made = self._log(kind, "DELETED", before, made)
        if str(kind.resource) == CRDS:
            gone = custom_kind(made)
            for one in self.objects(gone):
                self.remove(gone, one)
            self.kinds.pop(str(gone.resource), None)
        self._needs_sweep.set()
        return made

    def delete(self, kind: Kind, made: Object) -> Object | None:
        """Remove an object, or mark it where finalizers stand against that.

        Returns:
            The marked object; None where it is gone.
        """
        if not made["metadata"].get("finalizers") and kind.resource != NAMESPACES:
            self.remove(kind, made)
            return None
        if "deletionTimestamp" in made["metadata"]:
            return made
        marks = {"deletionTimestamp": timestamp(), "deletionGracePeriodSeconds": 0}
        made = {**made, "metadata": {**made["metadata"], **marks}}
        if kind.resource == NAMESPACES:
            made["status"] = {"phase": "Terminating"}
        generation = made["metadata"].get("generation")
        if generation is not None:
            made["metadata"]["generation"] = generation + 1
        made = self._log(kind, "MODIFIED", self.get(kind, key_of(made)), made)
        self._objects[str(kind.resource)][key_of(made)] = made
        self._needs_sweep.set()
        return made

    def orphan(self, uid: str) -> None:
        """Take an owner's uid out of everything it owned."""
        for kind, made in list(self._everything()):
            owners = made["metadata"].get("ownerReferences", ())
            rest = [one for one in owners if one["uid"] != uid]
            if len(rest) < len(owners):
                metadata = {**made["metadata"], "ownerReferences": rest}
                if not rest:
                    del metadata["ownerReferences"]
                self.put(kind, {**made, "metadata": metadata})

    def since(self, version: int, plural: str) -> list[Change]:
        """Return the changes of a kind after `version`.

        Raises:
            RefusalError: they are not all remembered.
        """
        if not self.oldest <= version <= self.version:
            raise expired(version, self.oldest)
        first = bisect_right(self._history, version, key=lambda change: change.version)
        return [change for change in self._history[first:] if change.plural == plural]

    def forget(self) -> None:
        """Forget the history: every version up to now is too old to watch from."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()
        self.wake()

    async def changed(self) -> None:
        """Return at the next change, or when `wake` is called."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._news)

    def close(self) -> None:
        """Let every watch end."""
        self.is_closed = True
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits for a change look again."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def collect_garbage(self) -> None:
        """Remove for ever what nobody owns any more and what was in namespaces that are gone."""
        while True:
            await self._needs_sweep.wait()
            self._needs_sweep.clear()
            for kind, made in list(self._garbage()):
                if self.get(kind, key_of(made)) is made:
                    self._collect(kind, made)

    async def save_changes(self) -> None:
        """Write the file for ever, soon after a change."""
        while True:
            await self._needs_save.wait()
            await asyncio.sleep(_SAVE_SECONDS)
            self.save()

    def save(self) -> None:
        """Write the file, if there is one."""
        self._needs_save.clear()
        if self._file is None:
            return
        objects = {plural: list(there.values()) for plural, there in self._objects.items()}
        said = orjson.dumps({"version": self.version, "objects": objects})
        # Readable by its owner only, as it holds Secrets.
        handle, draft = tempfile.mkstemp(dir=self._file.parent, prefix=f".{self._file.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(said)
        Path(draft).replace(self._file)

    def _load(self, said: Object) -> None:
        self.version = self.oldest = int(said["version"]) + _LEAP
        for plural, objects in said["objects"].items():
            self._objects[plural] = {key_of(one): one for one in objects}
        for definition in self.objects(self.kinds[CRDS]):
            kind = custom_kind(definition)
            self.kinds[str(kind.resource)] = kind
        self._needs_sweep.set()

    def _log(
        self,
        kind: Kind,
        type_: Literal["ADDED", "MODIFIED", "DELETED"],
        before: Object | None,
        made: Object,
    ) -> Object:
        self.version += 1
        metadata = {**made["metadata"], "resourceVersion": str(self.version)}
        made = {**made, "metadata": metadata}
        self._history.append(Change(self.version, type_, str(kind.resource), before, made))
        if len(self._history) > 2 * _REMEMBERED:
            self.oldest = self._history[_REMEMBERED - 1].version
            del self._history[:_REMEMBERED]
        self._needs_save.set()
        self.wake()
        return made

    def _everything(self) -> Iterator[tuple[Kind, Object]]:
        for plural, there in self._objects.items():
            for made in there.values():
                yield self.kinds[plural], made

    def _garbage(self) -> Iterator[tuple[Kind, Object]]:
        """Yield what is to be deleted, or has waited for the deletion of something else."""
        uids, held, marked, dying, used = set(), set(), set(), set(), set()
        for kind, made in self._everything():
            metadata = made["metadata"]
            uids.add(metadata["uid"])
            owners = metadata.get("ownerReferences", ())
            held |= {one["uid"] for one in owners if one.get("blockOwnerDeletion")}
            used.add(metadata.get("namespace"))
            if "deletionTimestamp" in metadata:
                if kind.resource == NAMESPACES:
                    dying.add(metadata["name"])
                elif FOREGROUND in metadata.get("finalizers", ()):
                    marked.add(metadata["uid"])
        long_ago = timestamp(-_EVENTS_LIVE)
        for kind, made in self._everything():
            metadata = made["metadata"]
            owners = {one["uid"] for one in metadata.get("ownerReferences", ())}
            if (
                (metadata["uid"] in marked and metadata["uid"] not in held)
                or (owners and not owners & (uids - marked))
                or metadata.get("namespace") in dying
                or (kind.resource == NAMESPACES and metadata["name"] in dying - used)
                or (kind.resource == EVENTS and metadata["creationTimestamp"] < long_ago)
            ):
                yield kind, made

    def _collect(self, kind: Kind, made: Object) -> None:
        metadata = made["metadata"]
        finalizers = metadata.get("finalizers", ())
        if kind.resource == NAMESPACES:
            self.remove(kind, made)
        elif "deletionTimestamp" in metadata and FOREGROUND in finalizers:
            rest = [one for one in finalizers if one != FOREGROUND]
            self.put(kind, {**made, "metadata": {**metadata, "finalizers": rest}})
        else:
            self.delete(kind, made)


def timestamp(later: timedelta = timedelta()) -> str:
    """Return the time now, or so much later, as Kubernetes writes it."""
    return (datetime.now(UTC) + later).strftime("%Y-%m-%dT%H:%M:%SZ")
