"""The time ledger of a job: each millisecond since its creation in one category. Pure.

`kernel/ledgers.py` calls it with each look at a job. Time is accounted for up to some moment: up to
a change that the operator sees, or as far as rank 0 has reported. What comes after that belongs to
what goes on now. So the sum is the job's age at any moment, and a ledger that was saved and is
taken up later, by another operator, lacks nothing.
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
_OF_WORD = {
    "data": Category.DATA,
    "checkpoint": Category.CHECKPOINT,
    "evaluation": Category.EVALUATION,
    "exporting": Category.EXPORTING,
    "other": Category.OTHER,
}
Times = Mapping[Category, int]
"""Milliseconds; what is left out is 0."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A report of rank 0.

    Attributes:
        attempt: Whose.
        restarts_in_place: After how many of them.
        time: When it was made, by the clock of its node, in seconds since the epoch.
        step: Optimizer steps done.
        spent: Its own account, in milliseconds; None where it has none.
        phase: What it did then; unknown of one that was saved.
    """

    attempt: int
    restarts_in_place: int
    time: float
    step: int
    spent: Mapping[str, int] | None
    phase: Phase = Phase.TRAINING

    @classmethod
    def of(cls, attempt: int, said: Progress, now: datetime) -> "Heard":
        """Return the report in the progress of an attempt; one without a time is of now."""
        spent = None
        if said.spent is not None:
            spent = {word: max(0, round(seconds * 1000)) for word, seconds in said.spent}
        time = said.time or now.timestamp()
        return cls(attempt, said.restarts_in_place, time, said.step, spent, said.phase)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is accounted for, and what goes on.

    Attributes:
        created: When the job was.
        time: Accounted milliseconds.
        gpu_time: The same times the GPUs of nodes that ran.
        running: What goes on since then.
        is_told: Whether rank 0 says so, and accounts for it later.
        gpus: GPUs of the nodes that run.
        is_recovering: Whether a start counts as restarting.
        heard: The report up to which rank 0's account is in it.
        highest_step: That any attempt has made.
        first_step: Milliseconds from creation to the first one; None before it.
        lost_at: Age of the job when what it is recovering from began, in milliseconds.
        recovery: Milliseconds from the newest loss of ranks until they trained again.
        recoveries: How many there were.
        attempt: The newest that was seen open.
        restarts: Attempts that were followed by another, by the class of their failure.
        is_closed: The job is over: nothing is added any more.
    """

    created: datetime
    time: Times = field(default_factory=dict)
    gpu_time: Times = field(default_factory=dict)
    running: Category = Category.QUEUED
    is_told: bool = False
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
    """Return the job's age in milliseconds: what the ledger sums to, unless it is closed."""
    return max(sum(ledger.time.values()), (now - ledger.created) // _MILLISECOND)


def rest(ledger: Ledger, now: datetime) -> int:
    """Return how many milliseconds are not accounted for yet."""
    return 0 if ledger.is_closed else age(ledger, now) - sum(ledger.time.values())


def at(ledger: Ledger, now: datetime) -> Ledger:
    """Return the ledger with all up to now accounted for, as far as it is known now."""
    return _charge(ledger, {ledger.running: rest(ledger, now)})


def turn(ledger: Ledger, status: FineTuneJobStatus, gpus: int, now: datetime) -> Ledger:
    """Return the ledger after a status was decided.

    Args:
        ledger: As it was.
        status: What was decided.
        gpus: GPUs of the nodes that run by now.
        now: The time, with a zone.
    """
    if ledger.is_closed and is_finished(status):
        return ledger
    if ledger.is_closed:  # somebody runs it again
        ledger = at(replace(ledger, running=Category.OTHER, is_closed=False), now)
    ledger = _count_restart(_up_to_opening(ledger, status, now), status)
    if is_finished(status):
        return replace(_settle(ledger, now), gpus=0, is_told=False, is_closed=True)
    running, is_told = goes_on(ledger, status)
    if running is not ledger.running or (gpus != ledger.gpus and not ledger.is_told):
        ledger = _settle(ledger, now)
    lost_at = ledger.lost_at
    if running is Category.RESTARTING:
        lost_at = age(ledger, now) if lost_at is None else lost_at
    elif running is Category.SUSPENDED:
        lost_at = None
    recovers = is_recovering(status)
    ledger = replace(ledger, running=running, is_told=is_told, gpus=gpus, lost_at=lost_at)
    return replace(ledger, is_recovering=recovers)


def _up_to_opening(ledger: Ledger, status: FineTuneJobStatus, now: datetime) -> Ledger:
    """Account for the time before an attempt that somebody else has opened, some time ago."""
    opened = attempts.current(status)
    if opened is None or opened.number <= ledger.attempt or opened.start_time is None:
        return ledger
    start = parse_rfc3339(opened.start_time)
    if now - start < _SECOND:  # times in a status are whole seconds
        return ledger
    return replace(_settle(ledger, start), running=goes_on(ledger, status)[0], is_told=False)


def goes_on(ledger: Ledger, status: FineTuneJobStatus) -> tuple[Category, bool]:
    """Return what an unfinished job does by its status, and whether rank 0 says so."""
    seen, heard = category_of(status), ledger.heard
    if attempts.current(status) is None or heard is None or heard.attempt != status.attempt:
        return seen or Category.PRODUCTIVE, False
    if seen in (Category.STARTING, Category.RESTARTING) and not has_failed(status):
        seen = None if is_true(status, ConditionType.RESOURCES_READY) else seen
    if seen is not None:
        return seen, False
    running = _running(heard, ledger.highest_step, is_restart=is_recovering(status))
    return running, heard.spent is not None


def hear(ledger: Ledger, attempt: int, said: Progress, gpus: int, now: datetime) -> Ledger:
    """Return the ledger with what rank 0 of an attempt has reported; old news change nothing.

    Args:
        ledger: As it was.
        attempt: Whose progress it is.
        said: The progress.
        gpus: GPUs of the nodes that run by now.
        now: The time, with a zone.
    """
    new, old = Heard.of(attempt, said, now), ledger.heard
    if ledger.is_closed or (old is not None and (old.attempt, old.time) >= (attempt, new.time)):
        return ledger
    left = rest(ledger, now)
    silent = min(max(0, round((now.timestamp() - new.time) * 1000)), left)
    since = old if old is not None and old.attempt == attempt else None
    step = max(since.step if since is not None else 0, said.resumed_step or 0)
    is_restart = ledger.is_recovering or new.restarts_in_place > 0
    if since is not None and not _is_of_another_process(since, new):
        delta = _difference(since, new, left)
    else:  # what came before its process is not in its account
        delta, begins = dict(new.spent or {}), ledger.running
        if since is not None:
            begins = Category.RESTARTING
            ledger = replace(ledger, lost_at=age(ledger, now) - left)
        before = max(0, left - silent - sum(delta.values()))
        ledger, left = _charge(ledger, {begins: before}), left - before
    parts = _parts(delta, step, new.step, ledger.highest_step, is_restart=is_restart)
    ledger = _with_milestones(ledger, said, delta, now, silent)
    highest = max(ledger.highest_step, new.step)
    return replace(
        _charge(replace(ledger, gpus=gpus), _cut(parts, left)),
        heard=new,
        highest_step=highest,
        running=_running(new, highest, is_restart=is_restart),
        is_told=new.spent is not None,
    )


def _is_of_another_process(old: Heard, new: Heard) -> bool:
    """Say whether rank 0 was started again between two reports of an attempt."""
    if old.restarts_in_place != new.restarts_in_place:
        return True
    return sum((new.spent or {}).values()) < sum((old.spent or {}).values())


def _difference(old: Heard, new: Heard, left: int) -> dict[str, int]:
    """Return what a process has spent between two reports."""
    if old.spent is None or new.spent is None:
        return {SPENT_AS[old.phase]: left}
    return {word: max(0, spent - old.spent.get(word, 0)) for word, spent in new.spent.items()}


def _parts(
    delta: Mapping[str, int], before: int, after: int, highest: int, *, is_restart: bool
) -> dict[Category, int]:
    """Return the categories of what was spent between two steps, the least certain last."""
    parts: dict[Category, int] = {}
    training = delta.get("training", 0)
    made, new = after - before, after - max(before, highest)
    share = max(0, new) / made if made > 0 else float(before >= highest)
    parts[Category.PRODUCTIVE] = round(training * share)
    parts[Category.RECOMPUTED] = training - parts[Category.PRODUCTIVE]
    for word, category in _OF_WORD.items():
        parts[category] = delta.get(word, 0)
    parts[_start(is_restart=is_restart)] = delta.get("starting", 0)
    return parts


def _start(*, is_restart: bool) -> Category:
    return Category.RESTARTING if is_restart else Category.STARTING


def _cut(parts: Times, left: int) -> dict[Category, int]:
    """Return the parts without what would be more than there is: clocks and looks differ."""
    made: dict[Category, int] = {}
    for category, spent in parts.items():
        made[category] = min(spent, left)
        left -= made[category]
    return made


def _with_milestones(
    ledger: Ledger, said: Progress, delta: Mapping[str, int], now: datetime, silent: int
) -> Ledger:
    """Return the ledger with when the job made its first step, and how long it took to recover."""
    told = age(ledger, now) - silent
    if ledger.first_step is None and said.step > 0:
        since = 0.0
        if said.spent is not None and said.first_step_seconds is not None:
            lived = sum(seconds for _, seconds in said.spent)
            since = max(0.0, lived - said.first_step_seconds)
        ledger = replace(ledger, first_step=max(0, told - round(since * 1000)))
    if ledger.lost_at is not None and SPENT_AS[said.phase] != "starting":
        trained = sum(spent for word, spent in delta.items() if word != "starting")
        recovery = max(0, told - trained - ledger.lost_at)
        ledger = replace(ledger, lost_at=None, recovery=recovery, recoveries=ledger.recoveries + 1)
    return ledger


def _running(heard: Heard, highest: int, *, is_restart: bool) -> Category:
    """Return what goes on after a report."""
    word = SPENT_AS[heard.phase]
    if word == "training":
        return Category.RECOMPUTED if heard.step < highest else Category.PRODUCTIVE
    return _start(is_restart=is_restart) if word == "starting" else _OF_WORD[word]


def _settle(ledger: Ledger, now: datetime) -> Ledger:
    """Account for all up to now; what rank 0 would have told, and never will, is other."""
    category = Category.OTHER if ledger.is_told else ledger.running
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
    """Count the attempt before a new one that was opened because it had failed."""
    opened = attempts.current(status)
    if opened is None or opened.number <= ledger.attempt:
        return ledger
    restarts = dict(ledger.restarts)
    if len(status.attempts) > 1 and not follows_suspension(status):
        failure = status.attempts[-2].failure_class or FailureClass.UNKNOWN.value
        restarts[failure] = restarts.get(failure, 0) + 1
    return replace(ledger, attempt=opened.number, restarts=restarts)
