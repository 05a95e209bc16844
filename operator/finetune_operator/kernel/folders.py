"""Arbitration of output folders: the first job that opens an attempt in a folder owns it.

`Reconciler` asks before it opens an attempt. Among jobs without an attempt, the oldest goes first.
The result follows from the jobs in the cache, where `status.folders` records the folders of each
attempt, so a new process decides in the same way. A lookup sends no request and takes one step per
level of the path.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.api.v1alpha1.topology import backend_name
from finetune_operator.backends.base import Written
from finetune_operator.backends.folder_index import FolderIndex, sentence
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.job_memory import JobMemory
from finetune_operator.kernel.jobs import JobView, read_job
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.kube.resources import Object
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, is_finished
from finetune_operator.reconcile.decide import Rejection

_Rank = tuple[bool, str, str, str]


@dataclass(slots=True)
class _Entry:
    """Folders of one job, and the facts of the job that the arbitration needs.

    Attributes:
        packed: Newest version of the job in the cache.
        memory: In-memory state of the job.
        spec: Identity of the spec: uid and generation.
        attempt: Number of the newest attempt in the written status; 0 before the first.
        has_open_attempt: Whether the written status has an open attempt.
        start_time: Start of the job in the written status.
        opened_with: URIs of the folders in the written status.
        may_open: Whether the job may open an attempt unless a user acts.
        folders: Folders that its spec names.
        previous: Folders of its earlier specs, while an attempt of an earlier spec may still run.
        has_opened: Whether the job has opened an attempt, or is opening its first one.
        contends: Whether the job may open its first attempt with its next reconcile.
        is_gone: Whether the job was deleted while its last attempt may still run.
    """

    packed: Object
    memory: JobMemory
    spec: tuple[str, int]
    attempt: int = 0
    has_open_attempt: bool = False
    start_time: str | None = None
    opened_with: tuple[str, ...] = ()
    may_open: bool = False
    folders: tuple[Written, ...] = ()
    previous: tuple[Written, ...] = ()
    has_opened: bool = False
    contends: bool = False
    is_gone: bool = False

    def view(self) -> JobView:
        """Return the job, parsed."""
        return read_job(self.packed, self.memory)

    def update(self, view: JobView) -> None:
        """Record a newer version of the job."""
        status = view.written
        self.packed, self.memory, self.spec = view.packed, view.memory, _spec_of(view)
        self.attempt, self.start_time = status.attempt, status.start_time
        self.has_open_attempt = attempts.current(status) is not None
        self.opened_with = tuple(status.folders or ())
        self.may_open = _may_open(view)

    @property
    def occupied(self) -> tuple[Written, ...]:
        """Folders that other jobs may not use now."""
        return (*self.folders, *self.previous) if self.has_opened or self.contends else ()


class FolderBook:
    """Folders of all jobs in the cache.

    Args:
        cache: The FineTuneJobs.
        read: Returns a job of the cache, parsed.
        backends: List the folders that a job writes.
        wake: Requeues a job that was refused a folder and may get it now.
    """

    def __init__(
        self,
        cache: ObjectCache,
        read: Callable[[Key], JobView | None],
        backends: Backends,
        wake: Callable[[Key], None],
    ) -> None:
        self._read = read
        self._backends = backends
        self._wake = wake
        self._changed: dict[Key, None] = {}
        self._entries: dict[Key, _Entry] = {}
        self._index = FolderIndex[Key]()
        self._opening: set[Key] = set()  # jobs whose status may have been written with an attempt
        self._waiting: dict[Key, dict[Key, None]] = {}  # blocking job -> jobs waiting for it
        cache.listen(lambda key: self._changed.update({key: None}))

    def catch_up(self) -> None:
        """Apply the changes of the cache."""
        while self._changed:
            key = next(iter(self._changed))
            del self._changed[key]
            self._update(key)

    def rejection(self, key: Key) -> Rejection | None:
        """Return why a job may not open an attempt now, if another job owns a folder of it."""
        self.catch_up()
        if (entry := self._entries.get(key)) is None:
            return None
        try:
            view = self._read(key) or entry.view()
            entry.folders = self._named_folders(view)  # a profile may have changed meanwhile
        except FineTuneError as error:
            return Rejection(Reason.BACKEND_FAILED, str(error))
        conflicts = [
            (rank, mine, theirs, other)
            for mine in entry.folders
            for other, theirs in self._index.touching(mine, besides=key)
            if self._claims(other, theirs)
            and (rank := self._rank(other, theirs)) < self._rank(key, mine)
        ]
        if not conflicts:
            return None
        _, mine, theirs, other = min(conflicts, key=lambda conflict: conflict[0])
        self._waiting.setdefault(other, {})[key] = None
        return Rejection(
            Reason.FOLDER_IN_USE, f"{mine.field} {self._why(key, mine, theirs, other)}"
        )

    def opened(self, key: Key, status: FineTuneJobStatus) -> FineTuneJobStatus:
        """Record that the job opens an attempt; return its status with the attempt's folders."""
        if (entry := self._entries.get(key)) is None:
            return status
        self._opening.add(key)
        self._place(key, entry)
        return status.model_copy(update={"folders": [folder.uri for folder in entry.folders]})

    def record_result(self, key: Key, *, is_certain: bool) -> None:
        """Record the result of a reconcile and wake waiters if the job opened no attempt.

        Args:
            key: The reconciled job.
            is_certain: Whether the cache has the newest status. After a write without a response it
                may not show an open attempt yet.
        """
        self.catch_up()
        if is_certain:
            self._opening.discard(key)
        if (entry := self._entries.get(key)) is not None and not entry.is_gone:
            contended, entry.contends = entry.contends, False
            self._place(key, entry)
            if contended:
                self._release(key)

    async def has_live_writer(self, key: Key) -> bool:
        """Whether an attempt of a deleted job still runs.

        Raises:
            FineTuneError: The backend has not responded; try again.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.is_gone:
            return False
        view = entry.view().with_known_handle()
        if view.parsed is not None and (ref := view.ref) is not None:
            try:
                if not (await self._backends.get(view.backend).observe(ref)).all_gone:
                    return True
            except FineTuneError as error:
                if error.retryable:
                    raise
        if self._entries.get(key) is entry:
            self._drop(key)
        return False

    def _update(self, key: Key) -> None:
        view, entry = self._read(key), self._entries.get(key)
        if view is None:
            if entry is not None and self._may_outlive_job(entry):
                entry.is_gone = True
            elif entry is not None:
                self._drop(key)
            return
        if entry is not None and entry.spec == _spec_of(view):
            entry.update(view)
            entry.is_gone = False
            self._place(key, entry)
            return
        folders = self._folders_if_known(view)
        previous: tuple[Written, ...] = ()
        if entry is not None and entry.spec[0] == view.uid:
            if view.parsed is None:
                folders = entry.folders  # of the last spec that could be parsed
            previous = tuple(
                folder for folder in (*entry.folders, *entry.previous) if folder not in folders
            )
        entry = _Entry(view.packed, view.memory, _spec_of(view), folders=folders, previous=previous)
        entry.update(view)
        entry.contends = entry.may_open
        self._entries[key] = entry
        self._place(key, entry)
        self._release(key)

    def _place(self, key: Key, entry: _Entry) -> None:
        """Put the folders of a job into the index; wake waiters if it frees any."""
        before = entry.occupied
        entry.has_opened = key in self._opening or bool(entry.attempt)
        if not entry.has_open_attempt:
            entry.previous = ()
        self._index.put(key, entry.occupied)
        if not set(before) <= set(entry.occupied):
            self._release(key)

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._opening.discard(key)
        self._index.remove(key)
        self._release(key)

    def _release(self, key: Key) -> None:
        """Wake the jobs that wait for a job; the oldest gets the folder, whichever runs first."""
        waiting = [waiter for waiter in self._waiting.pop(key, ()) if waiter in self._entries]
        for waiter in waiting:
            entry = self._entries[waiter]
            entry.contends = entry.may_open
            self._place(waiter, entry)
        for waiter in waiting:
            self._wake(waiter)

    def _claims(self, key: Key, folder: Written) -> bool:
        """Whether a job owns, or is about to own, a folder that its spec names."""
        entry = self._entries[key]
        return entry.contends or self._owns(key, entry, folder)

    def _owns(self, key: Key, entry: _Entry, folder: Written) -> bool:
        """Whether an attempt of the job was opened, or is being opened, with this folder."""
        is_recorded = not entry.opened_with or folder.uri in entry.opened_with
        return key in self._opening or (entry.has_opened and is_recorded)

    def _rank(self, key: Key, folder: Written) -> _Rank:
        """Return the rank of a job for a folder; the job with the lowest rank owns the folder."""
        entry = self._entries[key]
        metadata = entry.packed["metadata"]
        created, uid = metadata.get("creationTimestamp", ""), metadata["uid"]
        if self._owns(key, entry, folder):
            return (False, entry.start_time or "9", created, uid)
        return (True, "", created, uid)

    def _may_outlive_job(self, entry: _Entry) -> bool:
        """Whether the attempt of a deleted job may still run; true if unknown."""
        backend = backend_name(entry.packed["spec"].get("backend"))
        is_free = self._backends.finds_from_cache(backend)
        return bool(entry.has_opened and entry.folders and is_free and entry.has_open_attempt)

    def _folders_if_known(self, view: JobView) -> tuple[Written, ...]:
        with suppress(FineTuneError):  # reported once the job itself is reconciled
            return self._named_folders(view)
        return ()

    def _named_folders(self, view: JobView) -> tuple[Written, ...]:
        if view.parsed is None:
            return ()
        return tuple(self._backends.get(view.backend).writes(view.job))

    def _why(self, key: Key, mine: Written, theirs: Written, other: Key) -> str:
        conflict = sentence(mine, theirs, f"the job {other}")
        if key.namespace != other.namespace:  # whose names and paths this namespace may not know
            conflict = f"{mine.uri} is, holds or is inside a folder of a job in another namespace"
        if self._entries[other].is_gone:
            return (
                f"{conflict}, whose attempt still runs after its deletion; this job continues once "
                "that attempt has ended"
            )
        return (
            f"{conflict}, and a folder belongs to its first job permanently, even after that job "
            "is deleted; use another folder, such as a path with {namespace} and {name} in it"
        )


def _spec_of(view: JobView) -> tuple[str, int]:
    """Return the identity of a spec: uid and generation."""
    return (view.uid, view.raw["metadata"].get("generation", 1))


def _may_open(view: JobView) -> bool:
    """Whether the job may open its first attempt, or one with other folders, unless a user acts."""
    if view.parsed is None or not view.is_ours or view.is_deleted:
        return False
    return not view.job.spec.suspend and not is_finished(view.status)
