"""A time ledger as `status.ledger` holds it, and back. Pure."""

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
from finetune_operator.reconcile.ledger import Heard, Ledger, Times, age, goes_on
from finetune_trainer.config import TimeSpent

_KEPT_CLASSES = 32


def saved(ledger: Ledger) -> TimeLedger:
    """Return what the status holds of a ledger."""
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
            for name, count in list(ledger.restarts.items())[:_KEPT_CLASSES]
        ],
        heard=_heard_time(ledger.heard) if ledger.heard is not None else None,
    )


def taken_up(status: FineTuneJobStatus, created: datetime, gpus: int, now: datetime) -> Ledger:
    """Return the ledger that a status holds, to go on from there.

    Args:
        status: What is known of the job.
        created: When it was.
        gpus: GPUs of the nodes that run.
        now: The time, with a zone.
    """
    there = status.ledger or TimeLedger()
    ledger = Ledger(
        created,
        time=_times(there.time),
        gpu_time=_times(there.gpu_time),
        heard=_heard(there.heard) if there.heard is not None else None,
        highest_step=there.highest_step,
        first_step=there.first_step,
        lost_at=there.lost_at,
        recovery=there.recovery,
        recoveries=there.recoveries,
        attempt=there.attempt if status.ledger is not None else status.attempt,
        restarts={one.failure_class: one.count for one in there.restarts},
    )
    if is_finished(status):
        return replace(ledger, is_closed=True)
    if status.ledger is None and status.observed_generation:
        # A version without a ledger has written it: nobody knows what this time went into.
        ledger = replace(ledger, time={Category.OTHER: age(ledger, now)})
    running, is_told = goes_on(ledger, status)
    return replace(
        ledger,
        running=running,
        is_told=is_told,
        gpus=gpus,
        is_recovering=is_recovering(status),
    )


def _milliseconds(times: Times) -> Milliseconds:
    return Milliseconds(**{category.value: spent for category, spent in times.items()})


def _times(there: Milliseconds) -> Times:
    return {Category(name): spent for name, spent in there if spent}


def _heard_time(heard: Heard) -> HeardTime:
    return HeardTime(
        attempt=heard.attempt,
        restarts_in_place=heard.restarts_in_place,
        time=heard.time,
        step=heard.step,
        **(heard.spent or {}),
    )


def _heard(there: HeardTime) -> Heard:
    said = {word: getattr(there, word) for word in TimeSpent.model_fields}
    spent = {word: value for word, value in said.items() if value is not None}
    return Heard(there.attempt, there.restarts_in_place, there.time, there.step, spent or None)
