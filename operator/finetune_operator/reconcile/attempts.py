"""Opens, closes, counts and delays the attempts in a status, and records their reports.

At most one attempt is open. It is the newest, and attempt numbers only grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import RestartAction, RestartPolicy
from finetune_operator.api.v1alpha1.status import (
    MAX_TRANSPORT_LENGTH,
    AttemptStatus,
    BackendRef,
    CheckpointEntry,
    CheckpointLedger,
    Condition,
    FineTuneJobStatus,
    NodesStatus,
    PlanStatus,
    ProgressStatus,
    Restarts,
    TrackerStatus,
)
from finetune_operator.backends.base import Handle, Observation
from finetune_operator.backends.root_cause import NO_EXIT_CODE
from finetune_operator.planner.plan import Plan, reason_of_choice, with_choice
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    parse_rfc3339,
    rfc3339,
    set_condition,
)
from finetune_operator.reconcile.failures import action_for
from finetune_trainer.config import CheckpointRef, FailureClass, PlanReport, Progress, Termination

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 10, 300
"""Waits after the second attempt in a row without progress, and at most."""

KEPT = 10
MOST_LOWERED = 2
"""OutOfMemory failures after which the trainer chooses again."""
_AUTO = "auto"
MESSAGE_LENGTH = 1024
_AGAIN = "then create the job again"


def current(status: FineTuneJobStatus) -> AttemptStatus | None:
    """Return the open attempt, or None between attempts."""
    if status.attempts and status.attempts[-1].end_time is None:
        return status.attempts[-1]
    return None


def open_next(status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Return the status with the next attempt opened; the caller submits it later.

    If an attempt is already open, it was never created. It is reopened: its time counts from now,
    and an earlier deadline for its stop is dropped.
    """
    if current(status) is not None:
        return change_current(status, start_time=rfc3339(now), stop_deadline=None)
    number = status.attempt + 1
    attempts = [*status.attempts, AttemptStatus(number=number, start_time=rfc3339(now))]
    return status.model_copy(
        update={
            "attempt": number,
            "attempts": attempts[-KEPT:],
            "backend_ref": None,
            "suspects": [],
            "start_time": status.start_time or rfc3339(now),
        }
    )


def stop(
    status: FineTuneJobStatus, grace_seconds: float, now: datetime
) -> tuple[FineTuneJobStatus, datetime]:
    """Return the status with the time at which the open attempt is killed, and the time itself.

    The grace period counts from the first request to stop; a later request can only shorten it.
    """
    attempt, until = current(status), now + timedelta(seconds=grace_seconds)
    until = until.replace(microsecond=0)
    if attempt is not None and attempt.stop_deadline is not None:
        until = min(until, parse_rfc3339(attempt.stop_deadline))
    return change_current(status, stop_deadline=rfc3339(until)), until


def with_handle(status: FineTuneJobStatus, handle: Handle) -> FineTuneJobStatus:
    """Return the status with the reference to the open attempt."""
    ref = BackendRef(kind=handle.kind, name=handle.name, uid=handle.uid, url=handle.url)
    if handle.digest:
        status = change_current(status, digest=handle.digest)
    return status.model_copy(update={"backend_ref": ref})


def handle_of(status: FineTuneJobStatus) -> Handle | None:
    """Return the handle of the newest attempt, or None before it was submitted."""
    ref = status.backend_ref
    if ref is None:
        return None
    digest = (status.attempts[-1].digest if status.attempts else None) or ""
    return Handle(kind=ref.kind, name=ref.name, uid=ref.uid, url=ref.url, digest=digest)


def with_plan(status: FineTuneJobStatus, plan: Plan) -> FineTuneJobStatus:
    """Return the status with the plan of the next attempt, which repeats the trainer's choice."""
    stored, digest = status.plan, plan.digest if plan.auto else None
    plan = with_choice(plan, stored)
    planned = PlanStatus(
        strategy=_AUTO if "strategy" in plan.auto else plan.strategy.value,
        precision=_AUTO if "precision" in plan.auto else plan.precision.value,
        micro_batch_size=0 if plan.auto else plan.micro_batch_size,
        gradient_accumulation_steps=0 if plan.auto else plan.gradient_accumulation_steps,
        reasons=list(plan.reasons),
    )
    if digest is not None:
        is_open = "activationCheckpointing" in plan.auto
        recompute = _AUTO if is_open else plan.activation_checkpointing.value
        choice = {"activation_checkpointing": recompute, "digest": digest}
        if stored is not None and stored.digest == digest:
            memory = stored.model_dump(include=_OF_CHOICE, exclude_none=True)
            choice = {**memory, **choice}
        replicas = plan.replicas if plan.replicas > 1 else None
        planned = planned.model_copy(update={**choice, "replicas": replicas})
    nodes = NodesStatus(desired=plan.nodes, ready=status.nodes.ready, world_size=plan.world_size)
    return status.model_copy(update={"plan": planned, "nodes": nodes})


_OF_CHOICE = {"peak_bytes", "usable_bytes", "lower_peak_bytes", "peak_at_most", "lowered"}


def _with_choice_of_trainer(status: FineTuneJobStatus, report: PlanReport) -> FineTuneJobStatus:
    stored = status.plan
    assert stored is not None, "the caller has checked it"
    chosen = stored.model_copy(
        update={
            "strategy": report.strategy,
            "precision": report.precision,
            "micro_batch_size": report.micro_batch_size,
            "gradient_accumulation_steps": report.gradient_accumulation_steps,
            "activation_checkpointing": report.activation_checkpointing,
            "replicas": report.replicas if report.replicas > 1 else None,
            "peak_bytes": report.peak_bytes,
            "usable_bytes": report.usable_bytes,
            "lower_peak_bytes": report.lower_peak_bytes,
            "peak_at_most": None,
        }
    )
    reasons = [reason_of_choice(chosen), *stored.reasons[1:]]
    return status.model_copy(update={"plan": chosen.model_copy(update={"reasons": reasons})})


def lowered(status: FineTuneJobStatus) -> FineTuneJobStatus | None:
    """Return the status after a GPU ran out of memory; None if the next attempt would fail again.

    The trainer then makes a choice with a lower peak, at most twice. It also chooses if the values
    come from an earlier version, and if the attempt ended before the trainer chose.
    """
    plan = status.plan
    if plan is None or plan.digest is None:
        return None
    if not plan.micro_batch_size:
        return status
    count, is_from_trainer = plan.lowered or 0, plan.usable_bytes is not None
    if count >= MOST_LOWERED or (is_from_trainer and plan.lower_peak_bytes is None):
        return None
    update = {
        "micro_batch_size": 0,
        "peak_at_most": plan.lower_peak_bytes,
        "lower_peak_bytes": None,
        "lowered": count + 1,
    }
    return status.model_copy(update={"plan": plan.model_copy(update=update)})


def change_current(status: FineTuneJobStatus, **fields: object) -> FineTuneJobStatus:
    """Return the status with fields of the newest attempt changed."""
    changed = status.attempts[-1].model_copy(update=fields)
    return status.model_copy(update={"attempts": [*status.attempts[:-1], changed]})


def give_up(status: FineTuneJobStatus, termination: Termination) -> FineTuneJobStatus:
    """Return the status with the termination for which the operator ends the open attempt."""
    return change_current(
        status,
        failure_class=termination.failure_class.value,
        message=termination.message[:MESSAGE_LENGTH],
        exit_code=_exit_code(termination),
    )


def _exit_code(termination: Termination) -> int | None:
    return None if termination.exit_code == NO_EXIT_CODE else termination.exit_code


def given_up(attempt: AttemptStatus) -> Termination | None:
    """Return the recorded termination of an attempt that the operator ends; None otherwise."""
    if attempt.end_time is not None or attempt.failure_class is None:
        return None
    code = NO_EXIT_CODE if attempt.exit_code is None else attempt.exit_code
    failure = FailureClass(attempt.failure_class)
    return Termination(failure_class=failure, exit_code=code, message=attempt.message)


def first_without_nodes(status: FineTuneJobStatus) -> datetime | None:
    """Return the start of the first of the newest consecutive attempts that never had all nodes.

    The open attempt always counts. None if the newest attempt had all nodes.
    """
    ready = find(status, ConditionType.RESOURCES_READY)
    lost = ready.last_transition_time if ready is not None and ready.status == "False" else None
    first = None
    for attempt in reversed(status.attempts):
        # Times in this format have the order of their texts.
        had_nodes = lost is None or attempt.start_time is None or attempt.start_time < lost
        never_ran = attempt.exit_code is None or attempt.failure_class == FailureClass.PREEMPTED
        if attempt.end_time is not None and (had_nodes or not never_ran):
            return first
        first = parse_rfc3339(attempt.start_time) if attempt.start_time else first
    is_cut = first is not None and lost is not None and status.attempts[0].number > 1
    return parse_rfc3339(lost) if is_cut and lost is not None else first


def with_facts(status: FineTuneJobStatus, seen: Observation) -> FineTuneJobStatus:
    """Return the status with the open attempt's numbers of running nodes and of disruptions."""
    if seen.nodes_ready != status.nodes.ready:
        ready = status.nodes.model_copy(update={"ready": seen.nodes_ready})
        status = status.model_copy(update={"nodes": ready})
    if seen.disruptions != (status.attempts[-1].disruptions or 0):
        status = change_current(status, disruptions=seen.disruptions)
    return status


def close(
    status: FineTuneJobStatus, termination: Termination, node: str, now: datetime
) -> FineTuneJobStatus:
    """Return the status with the open attempt ended by its termination."""
    ref, attempt, saved = status.backend_ref, status.attempts[-1], termination.checkpoint
    return change_current(
        status,
        url=ref.url or None if ref is not None else None,
        end_time=rfc3339(now),
        failure_class=termination.failure_class.value,
        message=termination.message[:MESSAGE_LENGTH],
        node=node or None,
        rank=termination.rank,
        exit_code=_exit_code(termination),
        last_step=max(attempt.last_step or 0, termination.step) or attempt.last_step,
        saved_step=saved.step if saved is not None else attempt.saved_step,
    )


@dataclass(frozen=True)
class Budget:
    """Outcome of counting a restart against the restart policy.

    Attributes:
        restarts: The counters after this restart.
        exceeded: Reason why no restart is allowed; None if it is allowed.
        message: Message for the reason `exceeded`.
    """

    restarts: Restarts
    exceeded: Reason | None = None
    message: str = ""


def spend(restarts: Restarts, action: RestartAction, policy: RestartPolicy) -> Budget:
    """Count a restart, free or counted, against its own limit."""
    if action is RestartAction.RESTART_FREE:
        limit = policy.max_disruptions
        if limit is not None and restarts.disruptions >= limit:
            message = f"restarted {limit} times after disruptions, as maxDisruptions allows"
            message = f"{message}; remove the cause or raise the limit, {_AGAIN}"
            return Budget(restarts, Reason.DISRUPTION_LIMIT_EXCEEDED, message)
        return Budget(restarts.model_copy(update={"disruptions": restarts.disruptions + 1}))
    if restarts.counted >= policy.max_restarts:
        message = f"restarted {policy.max_restarts} times, as restartPolicy.maxRestarts allows"
        message = f"{message}; fix the cause or raise the limit, {_AGAIN}"
        return Budget(restarts, Reason.RESTART_LIMIT_EXCEEDED, message)
    return Budget(restarts.model_copy(update={"counted": restarts.counted + 1}))


def idle_in_a_row(status: FineTuneJobStatus) -> int:
    """Return how many of the latest attempts in a row had no progress.

    An attempt progresses if it saves a checkpoint of a later step than the one it started from, or
    trains further than the attempts before it. Attempts before the last resumption do not count.
    """
    idle, furthest, resumed = 0, 0, 0
    since = active_since(status)
    for attempt in status.attempts:
        start, last = attempt.resumed_step or 0, attempt.last_step or 0
        if start > resumed:  # an attempt before it has saved, even if no report of that was read
            idle = 0
        progresses = last > max(start, furthest) or (attempt.saved_step or 0) > start
        counts = since is None or parse_rfc3339(attempt.start_time or rfc3339(since)) >= since
        idle = idle + 1 if counts and not progresses else 0
        furthest, resumed = max(furthest, last), max(resumed, start)
    return idle


def earliest_start(status: FineTuneJobStatus, policy: RestartPolicy) -> datetime | None:
    """Return when the next attempt may start; None if it may start now.

    After attempts without progress the next one waits, whatever their class or rule: 0 s after the
    first, 10 s after the second, then twice as long each time, at most 300 s. The backoff of the
    policy applies if it is longer.
    """
    last = status.attempts[-1] if status.attempts else None
    if last is None or last.end_time is None:
        return None
    idle = idle_in_a_row(status)
    wait = min(FIRST_WAIT_SECONDS * 2 ** (idle - 2), LONGEST_WAIT_SECONDS) if idle > 1 else 0
    seconds = max(wait, _backoff_seconds(status, last, policy))
    return parse_rfc3339(last.end_time) + timedelta(seconds=seconds) if seconds else None


def _backoff_seconds(status: FineTuneJobStatus, last: AttemptStatus, policy: RestartPolicy) -> int:
    """Return the wait by `restartPolicy.backoff`.

    Counted restarts, and restarts after a failure of the service, wait: `baseSeconds` before the
    first restart, twice as long before each further restart, at most `maxSeconds`.
    """
    failure = FailureClass(last.failure_class or FailureClass.ERROR)
    code = NO_EXIT_CODE if last.exit_code is None else last.exit_code
    action = action_for(policy, failure, code)
    restarts = status.restarts.counted if action is RestartAction.RESTART else 0
    if action is RestartAction.RESTART_FREE and failure is FailureClass.SERVICE_FAILED:
        restarts = status.restarts.disruptions
    doublings = min(restarts - 1, 32)
    return (
        min(policy.backoff.base_seconds * 2**doublings, policy.backoff.max_seconds)
        if restarts
        else 0
    )


def reopen(status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Return the status of a failed job as resumable, with a new restart budget.

    Called only when a user runs the job again, never by `decide`. The next attempt has the next
    number, and deadlines count from now.
    """
    removed, plan = {ConditionType.FAILED, ConditionType.SUSPENDED}, status.plan
    conditions: Sequence[Condition] = [c for c in status.conditions if c.type not in removed]
    resumed = Condition(
        type=ConditionType.SUSPENDED,
        status="False",
        reason=Reason.RESUMED,
        message="the job was run again after it failed",
    )
    return status.model_copy(
        update={
            "conditions": set_condition(conditions, resumed, now),
            "restarts": Restarts(),
            "plan": plan and plan.model_copy(update={"lowered": None}),
            "completion_time": None,
        }
    )


def active_since(status: FineTuneJobStatus) -> datetime | None:
    """Return when the active time began: the first attempt, or the last resumption if later."""
    if status.start_time is None:
        return None
    started = parse_rfc3339(status.start_time)
    resumed = find(status, ConditionType.SUSPENDED)
    if resumed and resumed.reason == Reason.RESUMED and resumed.last_transition_time:
        return max(started, parse_rfc3339(resumed.last_transition_time))
    return started


def progress_due_at(status: FineTuneJobStatus, spec: FineTuneJobSpec) -> datetime | None:
    """Return when progress may be written again; None if it was never written."""
    if status.progress is None or status.progress.last_update_time is None:
        return None
    interval = timedelta(seconds=spec.observability.status_interval_seconds)
    return parse_rfc3339(status.progress.last_update_time) + interval


def with_progress(
    status: FineTuneJobStatus, report: Progress, checkpoints: str, now: datetime
) -> FineTuneJobStatus:
    """Return the status with a report of rank 0 of the newest attempt.

    The status is unchanged if the report has no new values. The steps of the attempt are recorded
    from a report of that attempt alone.

    Args:
        status: The current status.
        report: The progress that rank 0 reported.
        checkpoints: Folder of the checkpoints, as in an `Observation`.
        now: The time, with a zone.
    """
    new = _progress(report)
    old = status.progress
    if old is None or old.model_copy(update={"last_update_time": None}) != new:
        new = new.model_copy(update={"last_update_time": rfc3339(now)})
        status = status.model_copy(update={"progress": new})
    status = status.model_copy(
        update={"checkpoint": _ledger(status.checkpoint, report, checkpoints)}
    )
    if report.trackers:
        runs = [TrackerStatus(type=one.type, url=one.url) for one in report.trackers]
        status = status.model_copy(update={"trackers": runs})
    if report.attempt != status.attempt:
        return status
    if report.plan is not None and status.plan is not None and status.plan.digest is not None:
        status = _with_choice_of_trainer(status, report.plan)
    own: dict[str, int] = {"last_step": report.step}
    if report.resumed_step is not None:
        own["resumed_step"] = report.resumed_step
    if report.checkpoint is not None:
        own["saved_step"] = report.checkpoint.step
    return change_current(status, **own)


def _progress(report: Progress) -> ProgressStatus:
    """Return the progress rounded to 5 significant digits: `kubectl get` prints all digits."""
    return ProgressStatus(
        step=report.step,
        total_steps=report.total_steps,
        epoch=float(f"{report.epoch:.5g}"),
        loss=_rounded(report.loss),
        eval_loss=_rounded(report.eval_loss),
        tokens_per_second=_rounded(report.tokens_per_second),
        eta_seconds=None if report.eta_seconds is None else float(round(report.eta_seconds)),
        transport=None if report.transport is None else report.transport[:MAX_TRANSPORT_LENGTH],
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _ledger(ledger: CheckpointLedger, report: Progress, folder: str) -> CheckpointLedger:
    """Retain the previous checkpoints if an attempt has not saved yet."""
    last = _entry(report.checkpoint, folder) if report.checkpoint else ledger.last
    best = _entry(report.best_checkpoint, folder) if report.best_checkpoint else ledger.best
    return CheckpointLedger(last=last, best=best)


def _entry(ref: CheckpointRef, folder: str) -> CheckpointEntry:
    uri = f"{folder.rstrip('/')}/{PurePosixPath(ref.path).name}" if folder else f"file://{ref.path}"
    return CheckpointEntry(
        step=ref.step,
        uri=uri,
        time=rfc3339(datetime.fromtimestamp(ref.time, UTC)),
        world_size=ref.world_size,
        eval_loss=ref.eval_loss,
    )
