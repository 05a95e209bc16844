"""What a process knows of open attempts and no status holds yet.

Nothing here is needed: after a crash it is found again, at the cost of calls.
"""

from dataclasses import dataclass

from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneJobStatus
from finetune_operator.backends.base import Handle
from finetune_operator.kube.cache import Key
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.conditions import is_finished


@dataclass(frozen=True)
class _Submitted:
    uid: str
    number: int
    handle: Handle


class Unwritten:
    """First attempts whose opening waits to be written, and handles, of each job the newest."""

    def __init__(self) -> None:
        self._opened: dict[Key, tuple[str, FineTuneJobStatus]] = {}
        self._submitted: dict[Key, _Submitted] = {}

    def __contains__(self, key: Key) -> bool:
        """Say whether the opening of the job's first attempt waits to be written."""
        return key in self._opened

    def note_opened(self, key: Key, uid: str, status: FineTuneJobStatus) -> None:
        """Keep a status that opens the first attempt of the job with that uid."""
        self._opened[key] = (uid, status)

    def note_written(self, key: Key) -> None:
        """Drop the opening: the status tells of the attempt now, or that there is none."""
        self._opened.pop(key, None)

    def note_handle(self, key: Key, uid: str, number: int, handle: Handle) -> None:
        """Keep the handle of an attempt that was submitted, or found."""
        self._submitted[key] = _Submitted(uid, number, handle)

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is over."""
        self._opened.pop(key, None)
        self._submitted.pop(key, None)

    def status_of(self, key: Key, uid: str, written: FineTuneJobStatus) -> FineTuneJobStatus:
        """Return the status with the first attempt that it does not hold yet."""
        noted_for, status = self._opened.get(key, ("", written))
        # Whoever wrote that the job is finished did not know of the attempt; it is found again.
        is_lacking = not written.attempt and not is_finished(written)
        return status if noted_for == uid and is_lacking else written

    def added_to(self, key: Key, job: FineTuneJob) -> FineTuneJob:
        """Return the job with the attempt and the handle that its status does not hold yet."""
        uid = job.metadata.uid
        status = self.status_of(key, uid, job.status)
        attempt, noted = attempts.current(status), self._submitted.get(key)
        if status.backend_ref is None and noted and attempt:
            is_of_it = (noted.uid, noted.number) == (uid, attempt.number)
            status = attempts.with_handle(status, noted.handle) if is_of_it else status
        return job if status is job.status else job.model_copy(update={"status": status})
