"""Values of the metrics of one job, from its object and its ledger."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from finetune_operator.api.v1alpha1.status import JobPhase
from finetune_operator.kube.packed_jobs import unpack
from finetune_operator.kube.resources import Object
from finetune_operator.metrics import catalogue
from finetune_operator.reconcile.conditions import parse_rfc3339
from finetune_operator.reconcile.ledger import Ledger
from finetune_trainer.config import Progress
from finetune_trainer.config.metrics import Metric

Series = Iterator[tuple[tuple[str, ...], float]]


_SPEC_SHOWN = ("backend", "model", "queue", "topology")
_STATUS_SHOWN = (*("attempts", "checkpoint", "ledger", "phase", "plan", "progress", "suspects"),)


@dataclass(frozen=True)
class JobNow:
    """State of a job at the moment of a scrape.

    Attributes:
        obj: Object of the job, packed (see `pack`) or not.
        ledger: Ledger of the job at that moment.
        now: That moment.
        report: Last report of rank 0, if its page cannot be scraped.
    """

    obj: Object
    ledger: Ledger
    now: datetime
    report: Progress | None = None

    @property
    def labels(self) -> tuple[str, str]:
        """Values of the labels `catalogue.OF_JOB`."""
        metadata = self.obj["metadata"]
        return metadata.get("namespace", ""), metadata["name"]

    def unpacked(self) -> "JobNow":
        """Return the state with the decoded fields of the object that metrics show, and no others.

        A report of an attempt that has ended is dropped. Not called on the event loop, because the
        whole object is decoded.
        """
        obj = unpack(self.obj)
        spec = {name: value for name, value in obj["spec"].items() if name in _SPEC_SHOWN}
        status = _part(obj, "status")
        status = {name: value for name, value in status.items() if name in _STATUS_SHOWN}
        status["attempts"] = newest = (status.get("attempts") or [])[-1:]
        is_open = bool(newest) and not newest[0].get("endTime")
        obj = {"metadata": self.obj["metadata"], "spec": spec, "status": status}
        return replace(self, obj=obj, report=self.report if is_open else None)

    def series(self, metric: Metric) -> Series:
        """Yield the series of a metric: values of the labels after the job's, and the value."""
        return _SERIES[metric.name](self)

    @property
    def spec(self) -> Object:
        """Spec with its defaults; a spec of another version may lack any field."""
        return _part(self.obj, "spec")

    @property
    def status(self) -> Object:
        """Status that was written last."""
        return _part(self.obj, "status")


def _part(whole: Mapping[str, Any], name: str) -> Object:
    part: Object = whole.get(name) or {}
    return part


def _info(job: JobNow) -> Series:
    topology = _part(job.spec, "topology")
    gpus = topology.get("nodes", 1) * topology.get("gpusPerNode", 0)
    values = (
        _part(job.spec, "backend").get("type", ""),
        _part(job.status, "plan").get("strategy", ""),
        _part(job.spec, "model").get("source", ""),
        gpus,
        _part(job.spec, "queue").get("name", ""),
    )
    yield tuple(map(str, values)), 1.0


def _phase(job: JobNow) -> Series:
    now = job.status.get("phase", JobPhase.PENDING)
    for phase in JobPhase:
        yield (phase.value,), float(phase == now)


def _wallclock(job: JobNow) -> Series:
    for category, spent in job.ledger.time.items():
        yield (category.value,), spent / 1000


def _gpu_seconds(job: JobNow) -> Series:
    for category, spent in job.ledger.gpu_time.items():
        yield (category.value,), spent / 1000


def _restarts(job: JobNow) -> Series:
    """Yield the restarts of the written status; a new leader would count others again."""
    written = _part(job.status, "ledger").get("restarts") or ()
    counts = {suspect["failureClass"]: suspect["count"] for suspect in written}
    for failure in catalogue.RESTARTED:
        yield (failure,), counts.get(failure, 0)


def _recovery(job: JobNow) -> Series:
    if job.ledger.recovery is not None:
        yield (), job.ledger.recovery / 1000


def _checkpoint_age(job: JobNow) -> Series:
    if job.ledger.is_closed:
        return
    if job.report is not None and job.report.checkpoint is not None:
        yield (), max(0.0, job.now.timestamp() - job.report.checkpoint.time)
    elif last := _part(_part(job.status, "checkpoint"), "last"):
        yield (), max(0.0, (job.now - parse_rfc3339(last["time"])).total_seconds())


def _progress(job: JobNow) -> Series:
    progress = _part(job.status, "progress")
    if total := progress.get("totalSteps"):
        yield (), min(1.0, progress.get("step", 0) / total)


def _eta(job: JobNow) -> Series:
    eta = _part(job.status, "progress").get("etaSeconds")
    if eta is not None and not job.ledger.is_closed:
        yield (), eta


def _suspects(job: JobNow) -> Series:
    attempts = job.status.get("attempts") or []
    if attempts and not attempts[-1].get("endTime"):
        for suspect in job.status.get("suspects") or []:
            yield (suspect.get("node", ""), str(suspect["rank"]), suspect["cause"]), 1.0


def _reported(value_of: Callable[[JobNow, Progress], float | None]) -> Callable[[JobNow], Series]:
    def series(job: JobNow) -> Series:
        """Yield the reported value of rank 0 of an open attempt."""
        if job.report is None or job.ledger.is_closed:
            return
        value = value_of(job, job.report)
        if value is not None:
            yield ("0",), value

    return series


_SERIES: dict[str, Callable[[JobNow], Series]] = {
    catalogue.JOB_INFO.name: _info,
    catalogue.JOB_PHASE.name: _phase,
    catalogue.WALLCLOCK.name: _wallclock,
    catalogue.GPU_SECONDS.name: _gpu_seconds,
    catalogue.RESTARTS.name: _restarts,
    catalogue.LAST_RECOVERY.name: _recovery,
    catalogue.CHECKPOINT_AGE.name: _checkpoint_age,
    catalogue.PROGRESS_RATIO.name: _progress,
    catalogue.ETA.name: _eta,
    catalogue.SUSPECT.name: _suspects,
    catalogue.RANK_ZERO_STEP.name: _reported(lambda job, report: report.step),
    catalogue.RANK_ZERO_LOSS.name: _reported(lambda job, report: report.loss),
    catalogue.RANK_ZERO_TOKENS.name: _reported(lambda job, report: report.tokens_per_second),
    catalogue.RANK_ZERO_AGE.name: _reported(
        lambda job, report: max(0.0, job.now.timestamp() - report.time)
    ),
}
