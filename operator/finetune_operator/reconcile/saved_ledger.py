"""Conversion of a time ledger to and from `status.ledger`. Pure."""

from dataclasses import replace
from datetime import datetime

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.api.v1alpha1.time_ledger import (
    HeardTime,
    Milliseconds,
    RestartCount,
    TimeLedger,
)
from finetune_operator.reconcile.categories import Category, is_recovering
from finetune_operator.reconcile.conditions import is_finished
from finetune_operator.reconcile.ledger import Heard, Ledger, Times, age, current_category
from finetune_trainer.config import TimeSpent

_MAX_CLASSES = 32


def saved(ledger: Ledger) -> TimeLedger:
    """Return a ledger in the form of the status."""
    return TimeLedger(
        time=_milliseconds(ledger.time),
        gpu_time=_milliseconds(ledger.gpu_time),
        highest_step=ledger.highest_step,
        first_step=ledger.first_step,
        lost_at=ledger.lost_at,
        recovery=ledger.recovery,
        recoveries=ledger.recoveries,
        attempt=ledger.attempt,
        restarts=[
            RestartCount(failure_class=name[:64], count=count)
            for name, count in list(ledger.restarts.items())[:_MAX_CLASSES]
        ],
        heard=_heard_time(ledger.heard) if ledger.heard is not None else None,
    )


def restored(status: FineTuneJobStatus, created: datetime, gpus: int, now: datetime) -> Ledger:
    """Return the ledger in a status, restored at `now`.

    Args:
        status: Status of the job.
        created: Creation time of the job.
        gpus: GPUs of the running nodes.
        now: The time, with a zone.
    """
    stored = status.ledger or TimeLedger()
    ledger = Ledger(
        created,
        time=_times(stored.time),
        gpu_time=_times(stored.gpu_time),
        heard=_heard(stored.heard) if stored.heard is not None else None,
        highest_step=stored.highest_step,
        first_step=stored.first_step,
        lost_at=stored.lost_at,
        recovery=stored.recovery,
        recoveries=stored.recoveries,
        attempt=stored.attempt if status.ledger is not None else status.attempt,
        restarts={entry.failure_class: entry.count for entry in stored.restarts},
    )
    if is_finished(status):
        return replace(ledger, is_closed=True)
    if status.ledger is None and status.observed_generation:
        # A version without ledgers wrote this status: the category of this time is unknown.
        ledger = replace(ledger, time={Category.OTHER: age(ledger, now)})
    running, is_reported = current_category(ledger, status)
    return replace(
        ledger,
        running=running,
        is_reported=is_reported,
        gpus=gpus,
        is_recovering=is_recovering(status),
    )


def _milliseconds(times: Times) -> Milliseconds:
    return Milliseconds(**{category.value: spent for category, spent in times.items()})


def _times(stored: Milliseconds) -> Times:
    return {Category(name): spent for name, spent in stored if spent}


def _heard_time(heard: Heard) -> HeardTime:
    return HeardTime(
        attempt=heard.attempt,
        restarts_in_place=heard.restarts_in_place,
        time=heard.time,
        step=heard.step,
        **(heard.spent or {}),
    )


def _heard(stored: HeardTime) -> Heard:
    fields = {word: getattr(stored, word) for word in TimeSpent.model_fields}
    spent = {word: value for word, value in fields.items() if value is not None}
    return Heard(stored.attempt, stored.restarts_in_place, stored.time, stored.step, spent or None)
