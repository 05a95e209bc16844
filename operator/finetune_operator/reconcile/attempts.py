"""The attempts in a status: open, close, count, back off, open again, and what each has reported.

At most one attempt is open, it is the newest, and its number only grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath

from finetune_operator.api.v1alpha1.job import FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import RestartAction, RestartPolicy
from finetune_operator.api.v1alpha1.status import (
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
)
from finetune_operator.backends.base import Handle, Observation
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    find,
    parse_rfc3339,
    rfc3339,
    set_condition,
)
from finetune_operator.reconcile.failures import action_for
from finetune_trainer.config import CheckpointRef, FailureClass, Progress, Termination

KEPT = 10
MESSAGE_LENGTH = 1024


def current(status: FineTuneJobStatus) -> AttemptStatus | None:
    """Return the open attempt, or None between attempts."""
    if status.attempts and status.attempts[-1].end_time is None:
        return status.attempts[-1]
    return None


def open_next(status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Return the status with the next attempt opened; nothing is submitted yet.

    One that is open already, as it was never created, is opened anew: its time counts from now, and
    what it was told before does not hold any more.
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
    """Return the status with when the open attempt is killed, and that time.

    A grace counts from when the attempt was first asked to stop; a later one only shortens it.
    """
    attempt, until = current(status), now + timedelta(seconds=grace_seconds)
    until = until.replace(microsecond=0)
    if attempt is not None and attempt.stop_deadline is not None:
        until = min(until, parse_rfc3339(attempt.stop_deadline))
    return change_current(status, stop_deadline=rfc3339(until)), until


def with_handle(status: FineTuneJobStatus, handle: Handle) -> FineTuneJobStatus:
    """Return the status with what names the open attempt."""
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
    """Return the status with what was planned for the next attempt."""
    chosen = PlanStatus(
        strategy=plan.strategy.value,
        precision=plan.precision.value,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        reasons=list(plan.reasons),
    )
    nodes = NodesStatus(desired=plan.nodes, ready=status.nodes.ready, world_size=plan.world_size)
    return status.model_copy(update={"plan": chosen, "nodes": nodes})


def change_current(status: FineTuneJobStatus, **fields: object) -> FineTuneJobStatus:
    """Return the status with fields of the newest attempt changed."""
    changed = status.attempts[-1].model_copy(update=fields)
    return status.model_copy(update={"attempts": [*status.attempts[:-1], changed]})


def with_facts(status: FineTuneJobStatus, seen: Observation) -> FineTuneJobStatus:
    """Return the status with how many nodes of the open attempt run, and how often it was moved."""
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
    ref = status.backend_ref
    return change_current(
        status,
        url=ref.url or None if ref is not None else None,
        end_time=rfc3339(now),
        failure_class=termination.failure_class.value,
        message=termination.message[:MESSAGE_LENGTH],
        node=node or None,
        exit_code=termination.exit_code,
    )


@dataclass(frozen=True)
class Budget:
    """What the restart policy leaves.

    Attributes:
        restarts: The counters after this restart.
        exceeded: Why no restart is left; None when there is one.
        message: The sentence that goes with `exceeded`.
    """

    restarts: Restarts
    exceeded: Reason | None = None
    message: str = ""


def spend(restarts: Restarts, action: RestartAction, policy: RestartPolicy) -> Budget:
    """Count one restart, free or not, against its own limit."""
    if action is RestartAction.RESTART_FREE:
        limit = policy.max_disruptions
        if limit is not None and restarts.disruptions >= limit:
            message = f"restarted {limit} times after a preemption, as maxDisruptions allows"
            return Budget(restarts, Reason.DISRUPTION_LIMIT_EXCEEDED, message)
        return Budget(restarts.model_copy(update={"disruptions": restarts.disruptions + 1}))
    if restarts.counted >= policy.max_restarts:
        message = f"restarted {policy.max_restarts} times, as restartPolicy.maxRestarts allows"
        return Budget(restarts, Reason.RESTART_LIMIT_EXCEEDED, message)
    return Budget(restarts.model_copy(update={"counted": restarts.counted + 1}))


def earliest_start(status: FineTuneJobStatus, policy: RestartPolicy) -> datetime | None:
    """Return when the next attempt may start; None when there is nothing to wait for.

    A counted restart waits, and one after a failure of the service: base seconds after the first,
    doubled with each, at most max.
    """
    last = status.attempts[-1] if status.attempts else None
    if last is None or last.end_time is None:
        return None
    failure = FailureClass(last.failure_class or FailureClass.ERROR)
    action = action_for(policy, failure, last.exit_code if last.exit_code is not None else 1)
    restarts = status.restarts.counted if action is RestartAction.RESTART else 0
    if action is RestartAction.RESTART_FREE and failure is FailureClass.SERVICE_FAILED:
        restarts = status.restarts.disruptions
    if not restarts or not policy.backoff.base_seconds:
        return None
    doublings = min(restarts - 1, 32)
    seconds = min(policy.backoff.base_seconds * 2**doublings, policy.backoff.max_seconds)
    return parse_rfc3339(last.end_time) + timedelta(seconds=seconds)


def reopen(status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Return the status of a failed job as one that may go on, with its restart budget renewed.

    Only a person asks for this, by running the job again; `decide` never does. The next attempt
    has the next number, and a deadline counts from now.
    """
    ends = {ConditionType.FAILED, ConditionType.SUSPENDED}
    conditions: Sequence[Condition] = [c for c in status.conditions if c.type not in ends]
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
            "completion_time": None,
        }
    )


def active_since(status: FineTuneJobStatus) -> datetime | None:
    """Return when the job's life began: its first attempt, or its last resumption if later."""
    if status.start_time is None:
        return None
    started = parse_rfc3339(status.start_time)
    resumed = find(status, ConditionType.SUSPENDED)
    if resumed and resumed.reason == Reason.RESUMED and resumed.last_transition_time:
        return max(started, parse_rfc3339(resumed.last_transition_time))
    return started


def progress_due_at(status: FineTuneJobStatus, spec: FineTuneJobSpec) -> datetime | None:
    """Return when progress may be written again; None when it was never written."""
    if status.progress is None or status.progress.last_update_time is None:
        return None
    interval = timedelta(seconds=spec.observability.status_interval_seconds)
    return parse_rfc3339(status.progress.last_update_time) + interval


def with_progress(
    status: FineTuneJobStatus, said: Progress, checkpoints: str, now: datetime
) -> FineTuneJobStatus:
    """Return the status with what rank 0 of the newest attempt said; unchanged if it is no news.

    Args:
        status: As it was.
        said: What it said.
        checkpoints: As in an `Observation`.
        now: The time, with a zone.
    """
    news = _progress(said)
    old = status.progress
    if old is None or old.model_copy(update={"last_update_time": None}) != news:
        news = news.model_copy(update={"last_update_time": rfc3339(now)})
        status = status.model_copy(update={"progress": news})
    status = status.model_copy(update={"checkpoint": _ledger(status.checkpoint, said, checkpoints)})
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


def _ledger(ledger: CheckpointLedger, said: Progress, folder: str) -> CheckpointLedger:
    """Retain the previous checkpoints if an attempt has not saved yet."""
    last = _entry(said.checkpoint, folder) if said.checkpoint else ledger.last
    best = _entry(said.best_checkpoint, folder) if said.best_checkpoint else ledger.best
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
