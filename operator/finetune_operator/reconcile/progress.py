"""Copy what an attempt tells into the status: progress, checkpoint ledger, resumed step."""

from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.status import (
    CheckpointEntry,
    CheckpointLedger,
    FineTuneJobStatus,
    ProgressStatus,
)
from finetune_operator.reconcile.attempts import change_current
from finetune_operator.reconcile.conditions import parse_rfc3339, rfc3339
from finetune_trainer.config import CheckpointRef, Progress


def due_at(status: FineTuneJobStatus, spec: FineTuneJobSpec) -> datetime | None:
    """Return when progress may be written again; None when it was never written."""
    if status.progress is None or status.progress.last_update_time is None:
        return None
    interval = timedelta(seconds=spec.observability.status_interval_seconds)
    return parse_rfc3339(status.progress.last_update_time) + interval


def take_over(
    status: FineTuneJobStatus, spec: FineTuneJobSpec, said: Progress, now: datetime
) -> FineTuneJobStatus:
    """Return the status with what rank 0 of the newest attempt said; unchanged if it is no news."""
    news = _progress(said)
    old = status.progress
    if old is None or old.model_copy(update={"last_update_time": None}) != news:
        news = news.model_copy(update={"last_update_time": rfc3339(now)})
        status = status.model_copy(update={"progress": news})
    status = status.model_copy(update={"checkpoint": _ledger(status.checkpoint, spec, said)})
    if said.resumed_step is not None:
        status = change_current(status, resumed_step=said.resumed_step)
    return status


def _progress(said: Progress) -> ProgressStatus:
    """Return it without digits that mean nothing, as `kubectl get` prints every one there is."""
    return ProgressStatus(
        step=said.step,
        total_steps=said.total_steps,
        epoch=float(f"{said.epoch:.5g}"),
        loss=_short(said.loss),
        eval_loss=_short(said.eval_loss),
        tokens_per_second=_short(said.tokens_per_second),
        eta_seconds=None if said.eta_seconds is None else float(round(said.eta_seconds)),
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _ledger(ledger: CheckpointLedger, spec: FineTuneJobSpec, said: Progress) -> CheckpointLedger:
    """An attempt that has not saved yet says nothing about the checkpoints before it."""
    last = _entry(said.checkpoint, spec) if said.checkpoint else ledger.last
    best = _entry(said.best_checkpoint, spec) if said.best_checkpoint else ledger.best
    return CheckpointLedger(last=last, best=best)


def _entry(ref: CheckpointRef, spec: FineTuneJobSpec) -> CheckpointEntry:
    """Name the checkpoint so that other machines find it: below `checkpoint.uri` where it is set.

    A `file://` URI may be relative to the manifest, so there the rank's own absolute path is used.
    """
    base = spec.checkpoint.uri
    if base is None or base.startswith("file://"):
        uri = f"file://{ref.path}"
    else:
        uri = f"{base.rstrip('/')}/{PurePosixPath(ref.path).name}"
    return CheckpointEntry(
        step=ref.step,
        uri=uri,
        time=rfc3339(datetime.fromtimestamp(ref.time, UTC)),
        world_size=ref.world_size,
        eval_loss=ref.eval_loss,
    )
