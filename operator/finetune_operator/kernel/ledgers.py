"""Time ledgers of the jobs of a leader term, and the fleet metrics derived from them.

`Observer` passes observations of attempts, `StatusWriter` decided and written statuses. A ledger is
saved with each written status and never causes a write by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1 import FineTuneJobStatus
from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.backends.base import Observation
from finetune_operator.kernel.jobs import JobView
from finetune_operator.kube.cache import Key, key_of
from finetune_operator.kube.resources import Object
from finetune_operator.metrics import catalogue
from finetune_operator.metrics.counts import Counts
from finetune_operator.metrics.job_values import JobNow
from finetune_operator.reconcile.conditions import ConditionType, is_finished, parse_rfc3339
from finetune_operator.reconcile.ledger import Ledger, accrue_until, apply_report, apply_status
from finetune_operator.reconcile.saved_ledger import restored, saved
from finetune_trainer.config import Progress

ENDED_SHOWN = timedelta(hours=1)
"""Time for which the metrics page shows a finished job, unless it is deleted earlier."""

DELETED_SHOWN = timedelta(minutes=5)
"""Time for which the page shows a deleted job, so that no scrape misses its last values."""


@dataclass(slots=True)
class _Entry:
    """Ledger of one job.

    Attributes:
        obj: Object of the job, packed (see `pack`).
        report: Last report of rank 0; only if its page cannot be scraped.
    """

    obj: Object
    uid: str
    ledger: Ledger
    report: Progress | None = None


class LedgerBook:
    """Ledgers by job.

    Args:
        counts: Counters of the process.
        now: The time, with a zone.
    """

    def __init__(self, counts: Counts, now: Callable[[], datetime]) -> None:
        self._counts = counts
        self._now = now
        self._entries: dict[Key, _Entry] = {}
        self._ended: dict[Key, datetime] = {}
        self._deleted: dict[Key, tuple[_Entry, datetime]] = {}

    def prepare(self, backend: str) -> None:
        """Export all fleet metrics of a backend, starting at 0."""
        for metric in catalogue.OF_FLEET:
            if metric.buckets:
                self._counts.prepare(metric, backend)
            else:
                (label,) = metric.labels[1:]
                for value in label.values:
                    self._counts.add(metric, backend, value, amount=0)

    def apply_report(self, view: JobView, seen: Observation, *, is_scraped: bool) -> None:
        """Apply the report of rank 0 of the open attempt, if the observation has one.

        Args:
            view: The job.
            seen: Observation of the attempt.
            is_scraped: Whether Prometheus can scrape rank 0 itself.
        """
        report = (seen.termination.progress if seen.termination else None) or seen.progress
        if report is None or view.attempt is None:
            return
        entry, now = self._entry(view), self._now()
        entry.report = None if is_scraped else report
        gpus = seen.nodes_ready * _gpus_per_node(view.raw) or entry.ledger.gpus
        entry.ledger = apply_report(entry.ledger, view.attempt.number, report, gpus, now)

    def apply_status(self, view: JobView, status: FineTuneJobStatus) -> None:
        """Apply a decided status."""
        if is_finished(view.written) and is_finished(status):
            return  # its ledger is closed and written
        entry = self._entry(view)
        gpus = status.nodes.ready * _gpus_per_node(view.raw)
        entry.ledger = apply_status(entry.ledger, status, gpus, self._now())

    def with_ledger(self, view: JobView, status: FineTuneJobStatus) -> FineTuneJobStatus:
        """Return the status with the job's ledger, ready to be written."""
        self.apply_status(view, status)
        return status.model_copy(update={"ledger": saved(self._entry(view).ledger)})

    def note_written(
        self, view: JobView, before: FineTuneJobStatus, after: FineTuneJobStatus
    ) -> None:
        """Count the events that this written status reports first; only one leader writes it.

        Args:
            view: The job.
            before: The previous status.
            after: The written status, with its ledger.
        """
        old, new = before.ledger, after.ledger
        assert new is not None, "whatever is written has a ledger"
        backend, queued = view.backend, (new.time.queued or 0) / 1000
        if new.first_step is not None and (old is None or old.first_step is None):
            seconds = new.first_step / 1000
            self._counts.observe(catalogue.TIME_TO_FIRST_STEP, backend, value=seconds)
            self._counts.observe(catalogue.QUEUE_WAIT, backend, value=queued)
        if new.recovery is not None and new.recoveries > (old.recoveries if old else 0):
            self._counts.observe(catalogue.RECOVERY, backend, value=new.recovery / 1000)
        if is_finished(after) and not is_finished(before):
            if new.first_step is None:
                self._counts.observe(catalogue.QUEUE_WAIT, backend, value=queued)
            entry = self._entry(view)
            self._ended[view.key] = self._now()
            self._count_end(backend, after.phase, entry.ledger)
            self._drop_old()

    def remove(self, key: Key) -> None:
        """Close the ledger of a job that was deleted."""
        self._ended.pop(key, None)
        if (entry := self._entries.pop(key, None)) is None:
            return
        now = self._now()
        if not entry.ledger.is_closed:
            entry.ledger = replace(accrue_until(entry.ledger, now), is_closed=True)
            backend = (entry.obj["spec"].get("backend") or {}).get("type", "")
            self._count_end(str(backend), JobPhase.DELETING, entry.ledger)
        self._deleted.pop(key, None)
        self._deleted[key] = (entry, now)
        self._drop_old()

    def now_of(self, obj: Object, read: Callable[[Key], JobView | None]) -> JobNow | None:
        """Return the figures of a job for the metrics page; None if it finished too long ago.

        Args:
            obj: The job, packed (see `pack`).
            read: Returns the job, parsed; called once per job that has no ledger yet.
        """
        now, ended = self._now(), _end_of(obj)
        if ended is not None and now - ended > ENDED_SHOWN:
            return None
        key, entry = key_of(obj), self._entries.get(key_of(obj))
        if entry is None or entry.uid != obj["metadata"]["uid"]:
            if (view := read(key)) is None:
                return None
            entry = self._entry(view)
            if ended is not None:
                self._ended[key] = ended
        entry.obj = obj
        return JobNow(obj, accrue_until(entry.ledger, now), now, entry.report)

    def deleted(self) -> Iterator[JobNow]:
        """Yield the figures of recently deleted jobs for the metrics page."""
        self._drop_old()
        for key, (entry, when) in self._deleted.items():
            if key not in self._entries:
                yield JobNow(entry.obj, entry.ledger, when)

    def _entry(self, view: JobView) -> _Entry:
        entry = self._entries.get(view.key)
        if entry is None or entry.uid != view.uid:
            self.remove(view.key)
            entry = self._entries[view.key] = self._new_entry(view)
        entry.obj = view.packed
        return entry

    def _new_entry(self, view: JobView) -> _Entry:
        """Return the ledger in the status of a job."""
        created = parse_rfc3339(view.raw["metadata"]["creationTimestamp"])
        gpus = view.written.nodes.ready * _gpus_per_node(view.raw)
        return _Entry(view.packed, view.uid, restored(view.written, created, gpus, self._now()))

    def _count_end(self, backend: str, phase: JobPhase, ledger: Ledger) -> None:
        self._counts.add(catalogue.ENDS, backend, phase.value)
        for metric, times in (
            (catalogue.ENDED_WALLCLOCK, ledger.time),
            (catalogue.ENDED_GPU, ledger.gpu_time),
        ):
            for category, spent in times.items():
                self._counts.add(metric, backend, category.value, amount=spent / 1000)

    def _drop_old(self) -> None:
        now = self._now()
        for key, when in list(self._ended.items()):
            if now - when > ENDED_SHOWN:
                del self._ended[key]
                self._entries.pop(key, None)
        for key, (_, when) in list(self._deleted.items()):
            if now - when <= DELETED_SHOWN:
                break
            del self._deleted[key]


def _end_of(obj: Object) -> datetime | None:
    """Return the time at which a job, packed or not, has finished; None if it has not."""
    status = obj.get("status") or {}
    types = [
        condition["type"]
        for condition in status.get("conditions") or ()
        if condition["status"] == "True"
    ]
    is_final = ConditionType.COMPLETE in types or ConditionType.FAILED in types
    ended = status.get("completionTime") if is_final else None
    return parse_rfc3339(ended) if ended else None


def _gpus_per_node(obj: Object) -> int:
    return int((obj["spec"].get("topology") or {}).get("gpusPerNode") or 0)
