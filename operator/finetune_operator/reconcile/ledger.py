"""The time ledger of a job: each millisecond since its creation in one category. Pure.

`kernel/ledgers.py` calls it on each observation of a job. Time is accounted up to a change that the
operator has seen, or up to the last report of rank 0. The time since then belongs to the current
category. The sum therefore always equals the age of the job, also after another operator restores a
saved ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from finetune_operator.api.v1alpha1.status import FineTuneJobStatus
from finetune_operator.reconcile import attempts
from finetune_operator.reconcile.categories import (
    Category,
    category_of,
    follows_suspension,
    has_failed,
    is_recovering,
)
from finetune_operator.reconcile.conditions import (
    ConditionType,
    is_finished,
    is_true,
    parse_rfc3339,
)
from finetune_trainer.config import SPENT_AS, FailureClass, Phase, Progress

_MILLISECOND, _SECOND = timedelta(milliseconds=1), timedelta(seconds=1)
_CATEGORY_OF = {
    "data": Category.DATA,
    "checkpoint": Category.CHECKPOINT,
    "evaluation": Category.EVALUATION,
    "exporting": Category.EXPORTING,
    "other": Category.OTHER,
}
Times = Mapping[Category, int]
"""Milliseconds by category; a missing category is 0."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A report of rank 0.

    Attributes:
        attempt: Number of the attempt.
        restarts_in_place: Number of restarts in place before the report.
        time: Time of the report by the clock of its node, in seconds since the epoch.
        step: Number of finished optimizer steps.
        spent: Time by the rank's own account, in milliseconds; None without such an account.
        phase: Phase of the rank; not stored, so unknown for a restored report.
    """

    attempt: int
    restarts_in_place: int
    time: float
    step: int
    spent: Mapping[str, int] | None
    phase: Phase = Phase.TRAINING

    @classmethod
    def of(cls, attempt: int, progress: Progress, now: datetime) -> "Heard":
        """Return the report in the progress of an attempt; its time is `now` if it has none."""
        spent = None
        if progress.spent is not None:
            spent = {word: max(0, round(seconds * 1000)) for word, seconds in progress.spent}
        time = progress.time or now.timestamp()
        return cls(attempt, progress.restarts_in_place, time, progress.step, spent, progress.phase)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounted time, and the category of the time since then.

    Attributes:
        created: Creation time of the job.
        time: Accounted milliseconds.
        gpu_time: Accounted milliseconds multiplied by the GPUs of the nodes that ran.
        running: Category of the time since then.
        is_reported: Whether `running` is from rank 0, which will account for that time.
        gpus: GPUs of the running nodes.
        is_recovering: Whether a start counts as restarting.
        heard: The last report whose account the ledger includes.
        highest_step: Highest step of any attempt.
        first_step: Milliseconds from creation to the first step; None before it.
        lost_at: Age of the job in milliseconds when it lost the ranks from whose loss it is
            recovering.
        recovery: Milliseconds from the last loss of ranks until they trained again.
        recoveries: Number of recoveries.
        attempt: The newest attempt that was observed open.
        restarts: Number of attempts that a further attempt followed, by failure class.
        is_closed: Whether the job is finished, and no time is added.
    """

    created: datetime
    time: Times = field(default_factory=dict)
    gpu_time: Times = field(default_factory=dict)
    running: Category = Category.QUEUED
    is_reported: bool = False
    gpus: int = 0
    is_recovering: bool = False
    heard: Heard | None = None
    highest_step: int = 0
    first_step: int | None = None
    lost_at: int | None = None
    recovery: int | None = None
    recoveries: int = 0
    attempt: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    is_closed: bool = False


def age(ledger: Ledger, now: datetime) -> int:
    """Return the age of the job in milliseconds: the sum of the ledger unless it is closed."""
    return max(sum(ledger.time.values()), (now - ledger.created) // _MILLISECOND)


def rest(ledger: Ledger, now: datetime) -> int:
    """Return the number of milliseconds that are not accounted for yet."""
    return 0 if ledger.is_closed else age(ledger, now) - sum(ledger.time.values())


def accrue_until(ledger: Ledger, now: datetime) -> Ledger:
    """Return the ledger with the time up to now accounted to the current category."""
    return _charge(ledger, {ledger.running: rest(ledger, now)})


def apply_status(ledger: Ledger, status: FineTuneJobStatus, gpus: int, now: datetime) -> Ledger:
    """Return the ledger after a decision.

    Args:
        ledger: The current ledger.
        status: The status of the decision.
        gpus: GPUs of the running nodes.
        now: The time, with a zone.
    """
    if ledger.is_closed and is_finished(status):
        return ledger
    if ledger.is_closed:  # a user runs the job again
        ledger = accrue_until(replace(ledger, running=Category.OTHER, is_closed=False), now)
    ledger = _count_restart(_up_to_opening(ledger, status, now), status)
    if is_finished(status):
        return replace(_accrue_all(ledger, now), gpus=0, is_reported=False, is_closed=True)
    running, is_reported = current_category(ledger, status)
    if running is not ledger.running or (gpus != ledger.gpus and not ledger.is_reported):
        ledger = _accrue_all(ledger, now)
    lost_at = ledger.lost_at
    if running is Category.RESTARTING:
        lost_at = age(ledger, now) if lost_at is None else lost_at
    elif running is Category.SUSPENDED:
        lost_at = None
    recovers = is_recovering(status)
    ledger = replace(ledger, running=running, is_reported=is_reported, gpus=gpus, lost_at=lost_at)
    return replace(ledger, is_recovering=recovers)


def _up_to_opening(ledger: Ledger, status: FineTuneJobStatus, now: datetime) -> Ledger:
    """Account for the time before an attempt that another operator opened some time ago."""
    opened = attempts.current(status)
    if opened is None or opened.number <= ledger.attempt or opened.start_time is None:
        return ledger
    start = parse_rfc3339(opened.start_time)
    if now - start < _SECOND:  # times in a status are whole seconds
        return ledger
    return replace(
        _accrue_all(ledger, start), running=current_category(ledger, status)[0], is_reported=False
    )


def current_category(ledger: Ledger, status: FineTuneJobStatus) -> tuple[Category, bool]:
    """Return the current category of an unfinished job, and whether rank 0 reported it."""
    seen, heard = category_of(status), ledger.heard
    if attempts.current(status) is None or heard is None or heard.attempt != status.attempt:
        return seen or Category.PRODUCTIVE, False
    if seen in (Category.STARTING, Category.RESTARTING) and not has_failed(status):
        seen = None if is_true(status, ConditionType.RESOURCES_READY) else seen
    if seen is not None:
        return seen, False
    running = _running(heard, ledger.highest_step, is_restart=is_recovering(status))
    return running, heard.spent is not None


def apply_report(
    ledger: Ledger, attempt: int, progress: Progress, gpus: int, now: datetime
) -> Ledger:
    """Return the ledger with a report of rank 0; an old report is ignored.

    Args:
        ledger: The current ledger.
        attempt: Number of the attempt.
        progress: The reported progress.
        gpus: GPUs of the running nodes.
        now: The time, with a zone.
    """
    new, old = Heard.of(attempt, progress, now), ledger.heard
    if ledger.is_closed or (old is not None and (old.attempt, old.time) >= (attempt, new.time)):
        return ledger
    left = rest(ledger, now)
    silent = min(max(0, round((now.timestamp() - new.time) * 1000)), left)
    since = old if old is not None and old.attempt == attempt else None
    step = max(since.step if since is not None else 0, progress.resumed_step or 0)
    is_restart = ledger.is_recovering or new.restarts_in_place > 0
    if since is not None and not _is_of_another_process(since, new):
        delta = _difference(since, new, left)
    else:  # the account of the process does not include the time before its start
        delta, category = dict(new.spent or {}), ledger.running
        if since is not None:
            category = Category.RESTARTING
            ledger = replace(ledger, lost_at=age(ledger, now) - left)
        before = max(0, left - silent - sum(delta.values()))
        ledger, left = _charge(ledger, {category: before}), left - before
    parts = _parts(delta, step, new.step, ledger.highest_step, is_restart=is_restart)
    ledger = _with_milestones(ledger, progress, delta, now, silent)
    highest = max(ledger.highest_step, new.step)
    return replace(
        _charge(replace(ledger, gpus=gpus), _cut(parts, left)),
        heard=new,
        highest_step=highest,
        running=_running(new, highest, is_restart=is_restart),
        is_reported=new.spent is not None,
    )


def _is_of_another_process(old: Heard, new: Heard) -> bool:
    """Whether rank 0 was restarted between two reports of an attempt."""
    if old.restarts_in_place != new.restarts_in_place:
        return True
    return sum((new.spent or {}).values()) < sum((old.spent or {}).values())


def _difference(old: Heard, new: Heard, left: int) -> dict[str, int]:
    """Return the time that a process spent between two reports."""
    if old.spent is None or new.spent is None:
        return {SPENT_AS[old.phase]: left}
    return {word: max(0, spent - old.spent.get(word, 0)) for word, spent in new.spent.items()}


def _parts(
    delta: Mapping[str, int], before: int, after: int, highest: int, *, is_restart: bool
) -> dict[Category, int]:
    """Return the time between two steps by category, the least certain category last."""
    parts: dict[Category, int] = {}
    training = delta.get("training", 0)
    steps, new = after - before, after - max(before, highest)
    share = max(0, new) / steps if steps > 0 else float(before >= highest)
    parts[Category.PRODUCTIVE] = round(training * share)
    parts[Category.RECOMPUTED] = training - parts[Category.PRODUCTIVE]
    for word, category in _CATEGORY_OF.items():
        parts[category] = delta.get(word, 0)
    parts[_start(is_restart=is_restart)] = delta.get("starting", 0)
    return parts


def _start(*, is_restart: bool) -> Category:
    return Category.RESTARTING if is_restart else Category.STARTING


def _cut(parts: Times, left: int) -> dict[Category, int]:
    """Return the parts, limited to a sum of `left`: the clocks of operator and node differ."""
    limited: dict[Category, int] = {}
    for category, spent in parts.items():
        limited[category] = min(spent, left)
        left -= limited[category]
    return limited


def _with_milestones(
    ledger: Ledger, progress: Progress, delta: Mapping[str, int], now: datetime, silent: int
) -> Ledger:
    """Return the ledger with the time of the job's first step and the duration of a recovery."""
    reported_at = age(ledger, now) - silent
    if ledger.first_step is None and progress.step > 0:
        since = 0.0
        if progress.spent is not None and progress.first_step_seconds is not None:
            lived = sum(seconds for _, seconds in progress.spent)
            since = max(0.0, lived - progress.first_step_seconds)
        ledger = replace(ledger, first_step=max(0, reported_at - round(since * 1000)))
    if ledger.lost_at is not None and SPENT_AS[progress.phase] != "starting":
        trained = sum(spent for word, spent in delta.items() if word != "starting")
        recovery = max(0, reported_at - trained - ledger.lost_at)
        ledger = replace(ledger, lost_at=None, recovery=recovery, recoveries=ledger.recoveries + 1)
    return ledger


def _running(heard: Heard, highest: int, *, is_restart: bool) -> Category:
    """Return the category of the time after a report."""
    word = SPENT_AS[heard.phase]
    if word == "training":
        return Category.RECOMPUTED if heard.step < highest else Category.PRODUCTIVE
    return _start(is_restart=is_restart) if word == "starting" else _CATEGORY_OF[word]


def _accrue_all(ledger: Ledger, now: datetime) -> Ledger:
    """Account for the time up to now; time that rank 0 can no longer report is `other`."""
    category = Category.OTHER if ledger.is_reported else ledger.running
    return _charge(ledger, {category: rest(ledger, now)})


def _charge(ledger: Ledger, parts: Times) -> Ledger:
    time, gpu_time = dict(ledger.time), dict(ledger.gpu_time)
    for category, spent in parts.items():
        if spent:
            time[category] = time.get(category, 0) + spent
        if spent and ledger.gpus:
            gpu_time[category] = gpu_time.get(category, 0) + spent * ledger.gpus
    return replace(ledger, time=time, gpu_time=gpu_time)


def _count_restart(ledger: Ledger, status: FineTuneJobStatus) -> Ledger:
    """Count the failed attempt that a new attempt replaces."""
    opened = attempts.current(status)
    if opened is None or opened.number <= ledger.attempt:
        return ledger
    restarts = dict(ledger.restarts)
    if len(status.attempts) > 1 and not follows_suspension(status):
        failure = status.attempts[-2].failure_class or FailureClass.UNKNOWN.value
        restarts[failure] = restarts.get(failure, 0) + 1
    return replace(ledger, attempt=opened.number, restarts=restarts)
