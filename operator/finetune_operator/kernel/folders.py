"""Which job has which folder: of those that are there, the first to open an attempt.

`Reconciler` asks before a first attempt is opened, and whenever another one is. Of jobs that have
opened none, the oldest goes first. All of it follows from the jobs in the cache (`status.folders`
says what an attempt was opened with), so a new process comes to the same answers; it costs no call
and no write, and a question no more than the folders are deep.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.backends.base import Written
from finetune_operator.backends.folder_index import FolderIndex, sentence
from finetune_operator.backends.instances import Backends
from finetune_operator.errors import FineTuneError
from finetune_operator.kernel.jobs import JobView, PendingStatuses
from finetune_operator.kube.cache import Key, ObjectCache
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import Reason, is_finished
from finetune_operator.reconcile.decide import Rejection

_Rank = tuple[bool, str, str, str]


class RivalsFirstError(Exception):
    """Another job may have opened an attempt in the folder, and was not reconciled yet."""


@dataclass
class _Entry:
    """One job.

    Attributes:
        view: As it was last seen.
        folders: What its spec has it write.
        left: What its spec had it write before, as long as an attempt made of that may run.
        has_opened: Whether it has opened an attempt, as far as this process knows.
        contends: Whether it may open its first one as soon as it is reconciled.
        is_seen: Whether this process has reconciled it; until then, it may have opened an attempt
            that its status does not hold.
        is_gone: It was deleted, and something of its last attempt may still run.
    """

    view: JobView
    folders: tuple[Written, ...] = ()
    left: tuple[Written, ...] = ()
    has_opened: bool = False
    contends: bool = False
    is_seen: bool = False
    is_gone: bool = False


class FolderBook:
    """Folders of all jobs in the cache.

    Args:
        cache: The FineTuneJobs.
        read: Returns a job of the cache, parsed.
        backends: Who knows what a job writes.
        pending: What this process knows of attempts and no status holds yet.
        wake: Called with a job that may have got what it was refused.
    """

    def __init__(
        self,
        cache: ObjectCache,
        read: Callable[[Key], JobView | None],
        backends: Backends,
        pending: PendingStatuses,
        wake: Callable[[Key], None],
    ) -> None:
        self._read = read
        self._backends = backends
        self._pending = pending
        self._wake = wake
        self._changed: dict[Key, None] = {}
        self._entries: dict[Key, _Entry] = {}
        self._index = FolderIndex[Key]()
        self._opening: set[Key] = set()
        self._deferred: set[Key] = set()
        self._waiting: dict[Key, dict[Key, None]] = {}  # for whom, and who
        cache.listen(lambda key: self._changed.update({key: None}))

    def catch_up(self) -> None:
        """Take in what has changed in the cache."""
        while self._changed:
            key = next(iter(self._changed))
            del self._changed[key]
            self._take_in(key)

    def rejection(self, key: Key) -> Rejection | None:
        """Return why a job may open no attempt now: a folder of it is another job's.

        Raises:
            RivalsFirstError: that cannot be said yet; the job is woken when it can.
        """
        self.catch_up()
        if (entry := self._entries.get(key)) is None:
            return None
        try:
            entry.folders = self._named(entry.view)  # a profile may have changed meanwhile
        except FineTuneError as error:
            return Rejection(Reason.BACKEND_FAILED, str(error))
        self._let_rivals_be_seen(key, entry)
        found = [
            (rank, mine, theirs, other)
            for mine in entry.folders
            for other, theirs in self._index.touching(mine, besides=key)
            if self._counts(other, theirs)
            and (rank := self._rank(other, theirs)) < self._rank(key, mine)
        ]
        if not found:
            return None
        _, mine, theirs, other = min(found, key=lambda one: one[0])
        self._waiting.setdefault(other, {})[key] = None
        return Rejection(Reason.FOLDER_IN_USE, f"{mine.field} {self._why(mine, theirs, other)}")

    def opened(self, key: Key, status: FineTuneJobStatus) -> FineTuneJobStatus:
        """Note that the job opens an attempt; return its status with what that writes."""
        if (entry := self._entries.get(key)) is None:
            return status
        self._opening.add(key)
        entry.has_opened = True
        self._index.put(key, entry.folders)
        return status.model_copy(update={"folders": [one.uri for one in entry.folders]})

    def settle(self, key: Key) -> None:
        """Take in what a reconcile came to: who opens nothing keeps nobody waiting."""
        self.catch_up()
        self._opening.discard(key)
        if (entry := self._entries.get(key)) is not None and not entry.is_gone:
            is_new, entry.is_seen = not entry.is_seen, True
            contended, entry.contends = entry.contends, key in self._deferred
            self._deferred.discard(key)
            left = entry.left
            self._place(key, entry)
            if is_new or contended or left != entry.left:
                self._release(key)

    async def is_written_still(self, key: Key) -> bool:
        """Say whether something of a job that was deleted still runs.

        Raises:
            FineTuneError: that is not known now; ask again.
        """
        entry = self._entries.get(key)
        if entry is None or not entry.is_gone:
            return False
        ref = self._pending.added_to(entry.view).ref
        if entry.view.parsed is not None and ref is not None:
            try:
                if not (await self._backends.get(entry.view.backend).observe(ref)).all_gone:
                    return True
            except FineTuneError as error:
                if error.retryable:
                    raise
        if self._entries.get(key) is entry:
            self._drop(key)
        return False

    def _let_rivals_be_seen(self, key: Key, entry: _Entry) -> None:
        unseen = [
            other
            for mine in entry.folders
            if not self._has(key, entry, mine)
            for other, _ in self._index.touching(mine, besides=key)
            if self._entries[other].contends and not self._entries[other].is_seen
        ]
        if unseen:
            # The last of them is reconciled last, so that of many copies none is woken by each.
            self._waiting.setdefault(unseen[-1], {})[key] = None
            self._deferred.add(key)
            raise RivalsFirstError

    def _take_in(self, key: Key) -> None:
        view, entry = self._read(key), self._entries.get(key)
        if view is None:
            if entry is not None and self._may_run_on(key, entry):
                entry.is_gone = True
            elif entry is not None:
                self._drop(key)
            return
        if entry is None or _spec_of(entry.view) != _spec_of(view):
            folders = self._written(view)
            if entry is not None and view.parsed is None and entry.view.uid == view.uid:
                folders = entry.folders  # as far as it could be read
            left: tuple[Written, ...] = ()
            if entry is not None and entry.view.uid == view.uid:
                left = tuple(one for one in (*entry.folders, *entry.left) if one not in folders)
            self._entries[key] = entry = _Entry(view, folders, left, contends=_may_open(view))
            self._place(key, entry)
            self._release(key)
            return
        entry.view, entry.is_gone = view, False
        self._place(key, entry)

    def _place(self, key: Key, entry: _Entry) -> None:
        """Put the job where others see it, if there is anything that it has or may have."""
        status = self._status(key, entry)
        entry.has_opened = key in self._opening or bool(status.attempt)
        if attempts.current(status) is None:
            entry.left = ()
        is_there = entry.has_opened or entry.contends
        self._index.put(key, (*entry.folders, *entry.left) if is_there else ())

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._opening.discard(key)
        self._deferred.discard(key)
        self._index.remove(key)
        self._release(key)

    def _release(self, key: Key) -> None:
        """Wake who waits for a job; the oldest of them goes first, whoever is reconciled first."""
        waiting = [one for one in self._waiting.pop(key, ()) if one in self._entries]
        for one in waiting:
            entry = self._entries[one]
            entry.contends = _may_open(entry.view)
            self._place(one, entry)
        for one in waiting:
            self._wake(one)

    def _counts(self, key: Key, folder: Written) -> bool:
        """Say whether a job has a folder that its spec names, or is about to."""
        entry = self._entries[key]
        return entry.contends or self._has(key, entry, folder)

    def _has(self, key: Key, entry: _Entry, folder: Written) -> bool:
        """Say whether the job's attempts were opened with this folder, or one is right now."""
        opened_with = self._status(key, entry).folders
        is_in = not opened_with or folder.uri in opened_with
        return key in self._opening or (entry.has_opened and is_in)

    def _rank(self, key: Key, folder: Written) -> _Rank:
        """Return who comes first: the least rank has the folder."""
        entry = self._entries[key]
        status, metadata = self._status(key, entry), entry.view.raw["metadata"]
        created, uid = metadata.get("creationTimestamp", ""), metadata["uid"]
        if self._has(key, entry, folder):
            return (False, status.start_time or "9", created, uid)
        return (True, "", created, uid)

    def _status(self, key: Key, entry: _Entry) -> FineTuneJobStatus:
        return self._pending.opened(entry.view)

    def _may_run_on(self, key: Key, entry: _Entry) -> bool:
        """Say whether the attempt of a job that is gone has not ended, as far as is known."""
        is_free = self._backends.finds_from_cache(entry.view.backend)
        is_open = attempts.current(self._status(key, entry)) is not None
        return bool(entry.has_opened and entry.folders and is_free and is_open)

    def _written(self, view: JobView) -> tuple[Written, ...]:
        with suppress(FineTuneError):  # told once the job itself is reconciled
            return self._named(view)
        return ()

    def _named(self, view: JobView) -> tuple[Written, ...]:
        if view.parsed is None:
            return ()
        return tuple(self._backends.get(view.backend).writes(view.job))

    def _why(self, mine: Written, theirs: Written, other: Key) -> str:
        said = sentence(mine, theirs, f"the job {other}")
        if self._entries[other].is_gone:
            return f"{said}, which was deleted and still runs; this job goes on once that has ended"
        return (
            f"{said}, and a folder has one writer for good, also when that one is deleted; use "
            "another, such as one with {namespace} and {name} in it"
        )


def _spec_of(view: JobView) -> tuple[str, int]:
    """Return what is different for each spec."""
    return (view.uid, view.raw["metadata"].get("generation", 1))


def _may_open(view: JobView) -> bool:
    """Say whether the job may open its first attempt, or one with other folders, by itself."""
    if view.parsed is None or not view.is_ours or view.is_deleted:
        return False
    return not view.job.spec.suspend and not is_finished(view.status)
