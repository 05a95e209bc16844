"""Objects, their versions and their history: what etcd and the garbage collector do together.

`server.py` calls it, on one event loop. A stored object is never changed, only replaced, so nobody
needs to copy one.
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
_WAITING = {FOREGROUND, _CONTENT}  # finalizers that go with an object's last dependent
_REMEMBERED = 20_000
_EVENTS_LIVE = timedelta(hours=1)  # as on a real API server
_DELAY_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_LEAP = 10_000  # a crash may lose the last versions, and none may be used twice


ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of the history; there is one for each version.

    Attributes:
        plural: Full name of the kind, as `jobs.batch`.
        before: The object before; None where it is new.
        made: The object after, or its last state, with the version of the change.
    """

    type: ChangeType
    plural: str
    before: Object | None
    made: Object


class StateError(FineTuneError):
    """The file that keeps the objects cannot be understood, or not be written."""


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
        self.version = self.oldest = 1
        self.is_closed = False
        self.kinds: dict[str, Kind] = {str(one.resource): one for one in builtin_kinds()}
        self._file = file
        self._objects: dict[str, dict[Key, Object]] = defaultdict(dict)
        self._history: list[Change] = []
        self._news = asyncio.Event()
        self._has_changed = asyncio.Event()
        if file is not None and file.exists():
            try:
                self._load(orjson.loads(file.read_bytes()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StateError(
                    f"{file} holds no objects of an embedded API server ({error!r}); move it away "
                    "to start with none"
                ) from error

    def get(self, kind: Kind, key: Key) -> Object | None:
        """Return one object."""
        return self._objects[str(kind.resource)].get(key)

    def objects(self, kind: Kind) -> list[Object]:
        """Return all objects of a kind, in the order of their names."""
        return [made for _, made in sorted(self._objects[str(kind.resource)].items())]

    def put(self, kind: Kind, made: Object) -> Object:
        """Store an object in place of the one of its name, and return it with its version.

        An object whose deletion was only waiting for its finalizers is removed instead.
        """
        there, key = self._objects[str(kind.resource)], key_of(made)
        before = there.get(key)
        self.version += 1
        metadata = {**made["metadata"], "resourceVersion": str(self.version)}
        made = {**made, "metadata": metadata}
        type_: ChangeType = "MODIFIED" if before else "ADDED"
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            type_ = "DELETED"
            del there[key]
        else:
            there[key] = made
        self._history.append(Change(type_, str(kind.resource), before, made))
        if len(self._history) > 2 * _REMEMBERED:
            self.oldest += _REMEMBERED
            del self._history[:_REMEMBERED]
        if kind.resource == CRDS:
            self._serve(made, is_gone=type_ == "DELETED")
        self._has_changed.set()
        self._wake()
        return made

    def delete(self, kind: Kind, made: Object, *, is_foreground: bool = False) -> Object:
        """Mark an object as deleted, and return it; without finalizers it is removed at once.

        With `is_foreground` it stays until its dependents are gone, as namespaces and CRDs do.
        """
        metadata = made["metadata"]
        if "deletionTimestamp" in metadata:
            return made
        marks = {"deletionTimestamp": timestamp(), "deletionGracePeriodSeconds": 0}
        marks["finalizers"] = [
            *metadata.get("finalizers", ()),
            *([FOREGROUND] if is_foreground else ()),
            *([_CONTENT] if kind.resource in (NAMESPACES, CRDS) else ()),
        ]
        if "generation" in metadata:
            marks["generation"] = metadata["generation"] + 1
        return self.put(kind, {**made, "metadata": {**metadata, **marks}})

    def orphan(self, uid: str) -> None:
        """Take an owner's uid out of everything it owned."""
        for kind, made in self._everything():
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
            StatusError: they are not all remembered.
        """
        if not self.oldest <= version <= self.version:
            raise expired(version, self.oldest)
        return [one for one in self._history[version - self.oldest :] if one.plural == plural]

    def forget(self) -> None:
        """Forget the history: every version up to now is too old to watch from."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()
        self._wake()

    async def changed(self) -> None:
        """Return at the next change, or at the end."""
        await self._news.wait()

    def _wake(self) -> None:
        """Wake all who wait for a change."""
        self._news.set()
        self._news = asyncio.Event()

    def close(self) -> None:
        """Let every watch end."""
        self.is_closed = True
        self._wake()

    async def maintain(self) -> None:
        """Collect garbage and write the file soon after each change, until cancelled."""
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
            StateError: it cannot be written; what was written before is still there.
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
        objects = {plural: list(there.values()) for plural, there in self._objects.items()}
        draft = self._file.with_name(f".{self._file.name}.new")
        # Readable by its owner only, as it holds Secrets.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(orjson.dumps({"version": self.version, "objects": objects}))
        draft.replace(self._file)

    def _load(self, said: Object) -> None:
        self.version = self.oldest = int(said["version"]) + _LEAP
        for plural, objects in said["objects"].items():
            self._objects[plural] = {key_of(one): one for one in objects}
        for definition in self.objects(self.kinds[str(CRDS)]):
            self._serve(definition, is_gone=False)
        self._has_changed.set()

    def _serve(self, definition: Object, *, is_gone: bool) -> None:
        kind = custom_kind(definition)
        self.kinds[str(kind.resource)] = kind
        if is_gone:
            del self.kinds[str(kind.resource)]

    def _everything(self) -> list[tuple[Kind, Object]]:
        return [(kind, made) for kind in self.kinds.values() for made in self.objects(kind)]

    def _collect_garbage(self) -> None:
        """Delete what has lost its owners, and finish deletions that waited for dependents.

        A namespace and a CRD count as owners of all their objects.
        """
        everything = self._everything()
        homes = {
            made["metadata"]["name"]: made["metadata"]["uid"]
            for resource in (NAMESPACES, CRDS)
            for made in self.objects(self.kinds[str(resource)])
        }

        def homes_of(kind: Kind, metadata: Object) -> set[str]:
            names = {metadata.get("namespace"), str(kind.resource) if kind.is_custom else None}
            return {homes[name] for name in names if name in homes}

        owning, needed = set[str](), set[str]()
        for kind, made in everything:
            metadata = made["metadata"]
            if not _is_waiting(metadata):
                owning.add(metadata["uid"])
            owners = metadata.get("ownerReferences", ())
            needed |= {one["uid"] for one in owners if one.get("blockOwnerDeletion")}
            needed |= homes_of(kind, metadata)
        long_ago = timestamp(-_EVENTS_LIVE)
        for kind, made in everything:
            metadata = made["metadata"]
            owners = {one["uid"] for one in metadata.get("ownerReferences", ())}
            if _is_waiting(metadata) and metadata["uid"] not in needed:
                rest = [one for one in metadata["finalizers"] if one not in _WAITING]
                self.put(kind, {**made, "metadata": {**metadata, "finalizers": rest}})
            elif (
                (owners and owners.isdisjoint(owning))
                or not homes_of(kind, metadata) <= owning
                or (kind.resource == EVENTS and metadata["creationTimestamp"] < long_ago)
            ):
                self.delete(kind, made)


def _is_waiting(metadata: Object) -> bool:
    return "deletionTimestamp" in metadata and not _WAITING.isdisjoint(
        metadata.get("finalizers", ())
    )


def timestamp(later: timedelta = timedelta()) -> str:
    """Return the current time, or that much later, as Kubernetes writes it."""
    return (datetime.now(UTC) + later).strftime("%Y-%m-%dT%H:%M:%SZ")
