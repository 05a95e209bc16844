"""Objects with versions and history, and their garbage collection, as in etcd and Kubernetes.

`server.py` calls it, on one event loop. A stored object is never changed in place, only replaced,
so no caller has to copy it.
"""

import asyncio
import logging
import os
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import orjson

from finetune_operator.embedded.kinds import Kind, builtin_kinds, custom_kind
from finetune_operator.embedded.status_errors import expired
from finetune_operator.errors import FineTuneError
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import CRDS, EVENTS, NAMESPACES, Object

log = logging.getLogger(__name__)

FOREGROUND = "foregroundDeletion"
_CONTENT = "kubernetes"
_DEPENDENT_FINALIZERS = {FOREGROUND, _CONTENT}  # removed with an object's last dependent
_HISTORY_LENGTH = 20_000
_EVENT_TTL = timedelta(hours=1)  # as on a real API server
_DELAY_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_VERSION_GAP = 10_000  # a crash may lose the last versions, and no version may be reused


ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one version in the history.

    Attributes:
        plural: Full name of the kind, such as `jobs.batch`.
        before: The previous object; None if the object is new.
        obj: The new object, or the last state of a deleted object, with the version of the change.
    """

    type: ChangeType
    plural: str
    before: Object | None
    obj: Object


class StateError(FineTuneError):
    """The file of the stored objects cannot be parsed or written."""


class Store:
    """All objects of all kinds.

    Args:
        file: File that stores the objects between runs; None: only in memory.

    Raises:
        StateError: the file cannot be parsed.

    Attributes:
        version: Number of the last change.
        oldest: Version after which the history is complete.
        kinds: The served kinds, by full name.
        is_closed: Whether watches have to end.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.version = self.oldest = 1
        self.is_closed = False
        self.kinds: dict[str, Kind] = {str(kind.resource): kind for kind in builtin_kinds()}
        self._file = file
        self._objects: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._history: list[Change] = []
        self._next_change = asyncio.Event()
        self._has_changed = asyncio.Event()
        if file is not None and file.exists():
            try:
                self._load(orjson.loads(file.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StateError(
                    f"{file} holds no objects of an embedded API server ({error!r}); move it away "
                    "to start without objects"
                ) from error

    def get(self, kind: Kind, key: Key) -> Object | None:
        """Return an object; None if it does not exist."""
        return self._objects[str(kind.resource)].get(key)

    def objects(self, kind: Kind) -> list[Object]:
        """Return all objects of a kind, sorted by namespace and name."""
        return [obj for _, obj in sorted(self._objects[str(kind.resource)].items())]

    def put(self, kind: Kind, obj: Object) -> Object:
        """Store an object, replacing an object of the same name; return it with its version.

        A deleted object without finalizers is removed instead.
        """
        objects, key = self._objects[str(kind.resource)], key_of(obj)
        before = objects.get(key)
        self.version += 1
        metadata = {**obj["metadata"], "resourceVersion": str(self.version)}
        obj = {**obj, "metadata": metadata}
        type_: ChangeType = "MODIFIED" if before else "ADDED"
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            type_ = "DELETED"
            del objects[key]
        else:
            objects[key] = obj
        self._history.append(Change(type_, str(kind.resource), before, obj))
        if len(self._history) > 2 * _HISTORY_LENGTH:
            self.oldest += _HISTORY_LENGTH
            del self._history[:_HISTORY_LENGTH]
        if kind.resource == CRDS:
            self._serve(obj, is_deleted=type_ == "DELETED")
        self._has_changed.set()
        self._wake()
        return obj

    def delete(self, kind: Kind, obj: Object, *, is_foreground: bool = False) -> Object:
        """Mark an object as deleted, and return it; without finalizers, remove it at once.

        With `is_foreground`, and for namespaces and CRDs, the object remains until its dependents
        are removed.
        """
        metadata = obj["metadata"]
        if "deletionTimestamp" in metadata:
            return obj
        marks = {"deletionTimestamp": timestamp(), "deletionGracePeriodSeconds": 0}
        marks["finalizers"] = [
            *metadata.get("finalizers", ()),
            *([FOREGROUND] if is_foreground else ()),
            *([_CONTENT] if kind.resource in (NAMESPACES, CRDS) else ()),
        ]
        if "generation" in metadata:
            marks["generation"] = metadata["generation"] + 1
        return self.put(kind, {**obj, "metadata": {**metadata, **marks}})

    def orphan(self, uid: str) -> None:
        """Remove the owner references to an object from its dependents."""
        for kind, obj in self._everything():
            owners = obj["metadata"].get("ownerReferences", ())
            rest = [owner for owner in owners if owner["uid"] != uid]
            if len(rest) < len(owners):
                metadata = {**obj["metadata"], "ownerReferences": rest}
                if not rest:
                    del metadata["ownerReferences"]
                self.put(kind, {**obj, "metadata": metadata})

    def since(self, version: int, plural: str) -> list[Change]:
        """Return the changes of a kind after `version`.

        Raises:
            StatusError: the history does not contain all of them.
        """
        if not self.oldest <= version <= self.version:
            raise expired(version, self.oldest)
        return [entry for entry in self._history[version - self.oldest :] if entry.plural == plural]

    def forget(self) -> None:
        """Clear the history: all versions until now become too old for a watch."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()
        self._wake()

    async def changed(self) -> None:
        """Wait until the next change or until the store is closed."""
        await self._next_change.wait()

    def _wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self._next_change.set()
        self._next_change = asyncio.Event()

    def close(self) -> None:
        """End all watches."""
        self.is_closed = True
        self._wake()

    async def maintain(self) -> None:
        """Collect garbage and write the file shortly after each change, until cancelled."""
        is_saved = True
        while True:
            await self._has_changed.wait()
            await asyncio.sleep(_DELAY_SECONDS if is_saved else _RETRY_SECONDS)
            self._has_changed.clear()
            self._collect_garbage()
            was_saved, is_saved = is_saved, True
            try:
                self.save()
            except StateError as error:
                is_saved = False
                self._has_changed.set()
                if was_saved:
                    log.warning("objects not saved yet", extra={"why": str(error)})

    def save(self) -> None:
        """Write the file, if there is one.

        Raises:
            StateError: the file cannot be written; its previous content remains.
        """
        try:
            self._write()
        except OSError as error:
            raise StateError(
                f"{self._file} cannot be written ({error.strerror}), so that it lacks what changed "
                "last; make room, or make it writable"
            ) from error

    def _write(self) -> None:
        if self._file is None:
            return
        objects = {plural: list(by_key.values()) for plural, by_key in self._objects.items()}
        draft = self._file.with_name(f".{self._file.name}.new")
        # Readable by its owner only, because it contains Secrets.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(orjson.dumps({"version": self.version, "objects": objects}))
        draft.replace(self._file)

    def _load(self, content: Object) -> None:
        self.version = self.oldest = int(content["version"]) + _VERSION_GAP
        for plural, objects in content["objects"].items():
            self._objects[plural] = {key_of(obj): obj for obj in objects}
        for definition in self.objects(self.kinds[str(CRDS)]):
            self._serve(definition, is_deleted=False)
        self._has_changed.set()

    def _serve(self, definition: Object, *, is_deleted: bool) -> None:
        kind = custom_kind(definition)
        self.kinds[str(kind.resource)] = kind
        if is_deleted:
            del self.kinds[str(kind.resource)]

    def _everything(self) -> list[tuple[Kind, Object]]:
        return [(kind, obj) for kind in self.kinds.values() for obj in self.objects(kind)]

    def _collect_garbage(self) -> None:
        """Delete objects without remaining owners, and finish deletions that wait for dependents.

        A namespace and a CRD count as owners of all their objects.
        """
        everything = self._everything()
        parents = {
            obj["metadata"]["name"]: obj["metadata"]["uid"]
            for resource in (NAMESPACES, CRDS)
            for obj in self.objects(self.kinds[str(resource)])
        }

        def parents_of(kind: Kind, metadata: Object) -> set[str]:
            names = {metadata.get("namespace"), str(kind.resource) if kind.is_custom else None}
            return {parents[name] for name in names if name in parents}

        owning, blocked = set[str](), set[str]()
        for kind, obj in everything:
            metadata = obj["metadata"]
            if not _waits_for_dependents(metadata):
                owning.add(metadata["uid"])
            owners = metadata.get("ownerReferences", ())
            blocked |= {entry["uid"] for entry in owners if entry.get("blockOwnerDeletion")}
            blocked |= parents_of(kind, metadata)
        oldest_event = timestamp(-_EVENT_TTL)
        for kind, obj in everything:
            metadata = obj["metadata"]
            owners = {entry["uid"] for entry in metadata.get("ownerReferences", ())}
            if _waits_for_dependents(metadata) and metadata["uid"] not in blocked:
                rest = [
                    entry for entry in metadata["finalizers"] if entry not in _DEPENDENT_FINALIZERS
                ]
                self.put(kind, {**obj, "metadata": {**metadata, "finalizers": rest}})
            elif (
                (owners and owners.isdisjoint(owning))
                or not parents_of(kind, metadata) <= owning
                or (kind.resource == EVENTS and metadata["creationTimestamp"] < oldest_event)
            ):
                self.delete(kind, obj)


def _waits_for_dependents(metadata: Object) -> bool:
    return "deletionTimestamp" in metadata and not _DEPENDENT_FINALIZERS.isdisjoint(
        metadata.get("finalizers", ())
    )


def timestamp(later: timedelta = timedelta()) -> str:
    """Return the time of now plus `later`, in the format of Kubernetes."""
    return (datetime.now(UTC) + later).strftime("%Y-%m-%dT%H:%M:%SZ")
