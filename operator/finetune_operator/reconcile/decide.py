"""Decide the next actions for a job: a pure function of the resource, observation and time.

`decide` has no side effects: the kernel calls it, saves `Decision.status`, then executes the
actions. A crash between the two is harmless: an attempt is opened in the status before it is
submitted, submitting is idempotent, and `Cancel` and `Collect` are decided again until they have
taken effect. The course of a running attempt is decided in `during`.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import RestartAction
from finetune_operator.api.v1alpha1.status import AttemptStatus, FineTuneJobStatus, NodesStatus
from finetune_operator.backends.base import AttemptPhase, Observation
from finetune_operator.planner.plan import Expectation, Plan
from finetune_operator.reconcile import attempts, during, failures, suspects
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    describe,
    is_finished,
    is_true,
    parse_rfc3339,
    planned,
    rfc3339,
    stage_of_start,
    starting,
)
from finetune_operator.reconcile.during import is_suspending
from finetune_trainer.config import FailureClass, Termination

RECHECK_SECONDS = 30.0
"""Interval of checks whether the cause that prevents a start is fixed."""

PATIENCE_SECONDS = 5.0
"""Failures to create an attempt are reported after this time, because they may be temporary."""


@dataclass(frozen=True)
class Submit:
    """Submit or adopt attempt `number`, then store its handle in `status.backendRef`."""

    number: int


@dataclass(frozen=True)
class Find:
    """Find attempt `number` by its name before the job fails, because it may exist unobserved.

    If it does not exist, decide again with a `SubmitFailed` whose `is_absent` is true.
    """

    number: int


@dataclass(frozen=True)
class Cancel:
    """Stop the current attempt; its remaining processes are killed at `until`."""

    until: datetime


@dataclass(frozen=True)
class Collect:
    """Get the exported artifacts and store them in `status.artifacts` before saving the status."""


Action = Submit | Find | Cancel | Collect
SomeAction = TypeVar("SomeAction", Submit, Find, Cancel, Collect)


@dataclass(frozen=True)
class SubmitFailed:
    """The latest try to create the open attempt has failed.

    Attributes:
        message: The cause, in one sentence.
        is_absent: A search has confirmed that the attempt does not exist.
        needs_fix: Retries are useless until a user fixes the cause.
    """

    message: str
    is_absent: bool = False
    needs_fix: bool = False


Seen = Observation | SubmitFailed | None
"""Observation of the open attempt; None without an open attempt, or if its existence is unknown."""


@dataclass(frozen=True)
class Rejection:
    """Why the job in its current form does not allow an attempt; given instead of its plan.

    Attributes:
        reason: A CamelCase word for the condition Accepted.
        message: The problem, starting with the path of the field, and the remedy.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """The next actions for a job.

    Attributes:
        actions: Actions in the order of their execution; may be empty.
        status: The status to save if it differs from the current status.
        requeue_seconds: Delay of the next decision if no event occurs; None to wait for an event.
    """

    actions: tuple[Action, ...]
    status: FineTuneJobStatus
    requeue_seconds: float | None

    def action(self, kind: type[SomeAction]) -> SomeAction | None:
        """Return the action of that kind, if it was decided."""
        return next((action for action in self.actions if isinstance(action, kind)), None)


@dataclass(frozen=True)
class _View:
    """The input that all parts of a decision read; `before` is the status before the decision."""

    spec: FineTuneJobSpec
    generation: int
    before: FineTuneJobStatus
    now: datetime
    plan: Plan | Rejection

    def conclude(
        self,
        status: FineTuneJobStatus,
        situation: Situation,
        *actions: Action,
        requeue: float | None = None,
    ) -> Decision:
        """Return the decision for a situation."""
        return Decision(actions, self.described(status, situation), requeue)

    def described(self, status: FineTuneJobStatus, situation: Situation) -> FineTuneJobStatus:
        has_queue = bool(self.spec.queue)
        return describe(status, situation, self.now, self.generation, has_queue=has_queue)

    def seconds_until(self, moment: datetime) -> float:
        return max(0.0, (moment - self.now).total_seconds())


def decide(job: FineTuneJob, seen: Seen, now: datetime, plan: Plan | Rejection) -> Decision:
    """Return the next actions for `job`; the same input gives the same decision.

    Args:
        job: The resource with its status.
        seen: Observation of its open attempt, or the failure of the last try to create it.
        now: Time with a zone.
        plan: The plan of the job, or why it does not allow an attempt now. Only the opening of an
            attempt depends on it; an open attempt continues as planned.
    """
    view = _View(job.spec, job.metadata.generation, job.status, now, plan)
    status, attempt = job.status, attempts.current(job.status)
    if isinstance(seen, SubmitFailed):
        return _not_created(view, status, attempt, seen)
    if is_finished(status) and attempt is not None:
        return _overruled(view, attempt, seen)
    if is_finished(status):
        observed = status.model_copy(update={"observed_generation": job.metadata.generation})
        return Decision((), observed, None)
    if attempt is None and status.completion_time is not None:
        return _finish_again(view, status)
    if attempt is None or (status.backend_ref is None and seen is not None and seen.all_gone):
        return _between_attempts(view, status)
    if seen is None:
        if during.deadline_before_creation(view.spec, status, now) is not None:
            return Decision((Find(attempt.number),), status, None)
        status = attempts.change_current(status, stop_deadline=None)
        return Decision((Submit(attempt.number),), status, None)
    if seen.phase is not AttemptPhase.UNKNOWN:
        status = attempts.with_facts(status, seen)
    if _is_terminated(seen):
        return _after_attempt(view, status, seen)
    return _during_attempt(view, status, attempt, seen)


def _is_terminated(observation: Observation) -> bool:
    final = (AttemptPhase.SUCCEEDED, AttemptPhase.FAILED, AttemptPhase.UNKNOWN)
    return observation.all_gone and observation.phase in final


def unreconcilable(
    status: FineTuneJobStatus,
    rejection: Rejection,
    now: datetime,
    generation: int,
    until: str = "the spec can be read",
) -> FineTuneJobStatus:
    """Return the status of a job that cannot be read, or whose attempt cannot be observed.

    An open attempt is described by its last observation, unless the job was suspended before.

    Args:
        status: The current status.
        rejection: Why the job cannot be reconciled.
        now: Time with a zone.
        generation: Generation of the job.
        until: End of the sentence: the precondition for reconciling the job.
    """
    attempt = attempts.current(status)
    if is_finished(status):
        return status
    if attempt is None or is_true(status, ConditionType.SUSPENDED):
        situation = Situation(Stage.REFUSED, rejection.reason, rejection.message)
        return describe(status, situation, now, generation)
    text = (
        f"{rejection.message}; attempt {attempt.number} is left alone: it continues if it runs, "
        f"and its outcome is reported once {until}"
    )
    return describe(status, Situation(Stage.HELD, rejection.reason, text), now, generation)


def _between_attempts(view: _View, status: FineTuneJobStatus) -> Decision:
    """Suspend, fail, wait, or open the next attempt of a job without a running attempt.

    An attempt that was opened but never created remains open, because the request to create it may
    still take effect. Its number is needed to find and stop it.
    """
    status = status.model_copy(update={"nodes": _without_nodes(status)})
    if isinstance(view.plan, Rejection):
        refused = view.plan
        if refused.reason == Reason.DOES_NOT_FIT:
            lost = Expectation(False, refused.reason, refused.message)
            status = planned(status, lost, view.now, view.generation)
        situation = Situation(Stage.REFUSED, refused.reason, refused.message)
        if is_true(status, ConditionType.SUSPENDED):
            text = f"resumed, but the job cannot continue yet: {refused.message}"
            text = _why_suspended(view, status) if view.spec.suspend else text
            situation = replace(situation, suspended=text)
        return view.conclude(status, situation, requeue=RECHECK_SECONDS)
    status = attempts.with_plan(status, view.plan)
    status = planned(status, view.plan.expectation, view.now, view.generation)
    if view.spec.suspend:
        text = _why_suspended(view, status)
        return view.conclude(status, Situation(Stage.SUSPENDED, Reason.SUSPENDED_BY_USER, text))
    limit = during.earliest_limit(view.spec.deadlines, status, view.now)
    # A suspended job has no running deadline: opening an attempt starts a new one.
    was_suspended = is_true(view.before, ConditionType.SUSPENDED) or is_suspending(view.before)
    if limit and limit.at <= view.now and not was_suspended:
        return _fail(view, status, limit.reason, limit.message)
    start = attempts.earliest_start(status, view.spec.restart_policy)
    if start is not None and start > view.now and not was_suspended:
        idle = attempts.idle_in_a_row(status)
        why = f"{idle} attempts in a row without progress" if idle > 1 else "the backoff"
        text = f"attempt {status.attempt + 1} starts at {rfc3339(start)}, after {why}"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        wake = min(start, limit.at) if limit else start
        return view.conclude(status, situation, requeue=view.seconds_until(wake))
    status = attempts.open_next(status, view.now)
    return view.conclude(status, starting(status.attempt), Submit(status.attempt))


def _why_suspended(view: _View, status: FineTuneJobStatus) -> str:
    if (last := status.checkpoint.last) is not None:
        return f"suspended at step {last.step} by spec.suspend; set it to false to resume"
    if view.spec.checkpoint.enabled is False:
        return (
            "suspended by spec.suspend without a checkpoint, because spec.checkpoint.enabled is "
            "false; set spec.suspend to false to restart from step 0"
        )
    return "suspended by spec.suspend; set it to false to resume"


def _after_attempt(view: _View, status: FineTuneJobStatus, observation: Observation) -> Decision:
    """Close an attempt without remaining processes, and decide the next step."""
    given_up = attempts.given_up(status.attempts[-1])
    termination = failures.verdict(observation, given_up)
    report = termination.progress or observation.progress
    if report is not None:
        status = attempts.with_progress(status, report, observation.checkpoints, view.now)
    status = attempts.close(status, termination, observation.node, view.now)
    if termination.failure_class is FailureClass.COMPLETED:
        return _complete(view, status, termination)
    if (reason := during.ending_for(view.before)) is not None:
        return _fail(view, status, *reason)
    if view.spec.suspend or is_suspending(view.before):
        # An attempt that ends after a request to stop does not fail the job, unless its failure is
        # permanent.
        if termination.failure_class in failures.PERMANENT_CLASSES:
            return _fail(view, status, termination.failure_class, termination.message)
        return _between_attempts(view, status)
    if given_up is not None and termination.failure_class is FailureClass.PREEMPTED:
        return _between_attempts(view, status)  # it gave way to another job before it trained
    recurs = False
    if termination.is_gpu_memory:
        lower = attempts.lowered(status)
        status, recurs = lower or status, lower is None
    message = termination.message
    if recurs and status.plan is not None and status.plan.digest is not None:
        message += "; auto has no other choice that needs less memory"
    policy, failure = view.spec.restart_policy, termination.failure_class
    action = failures.action_for(policy, failure, termination.exit_code, recurs=recurs)
    if action is RestartAction.FAIL:
        return _fail(view, status, failure, message)
    budget = attempts.spend(status.restarts, action, policy)
    if budget.exceeded is not None:
        text = f"{budget.message}; cause: {message}"
        return _fail(view, status, budget.exceeded, text)
    return _between_attempts(view, status.model_copy(update={"restarts": budget.restarts}))


def _during_attempt(
    view: _View, status: FineTuneJobStatus, attempt: AttemptStatus, observation: Observation
) -> Decision:
    """Stop, await or watch an attempt with remaining processes."""
    course = during.follow(view.spec, status, attempt, observation, view.now)
    if course.situation is None:
        return Decision((), status, course.requeue_seconds)
    status = _with_progress(view, status, course.situation, observation)
    if course.given_up is not None:
        status = attempts.give_up(status, course.given_up)
    if course.grace_seconds is None:
        return view.conclude(status, course.situation, requeue=course.requeue_seconds)
    status, until = attempts.stop(status, course.grace_seconds, view.now)
    return view.conclude(status, course.situation, Cancel(until), requeue=course.requeue_seconds)


def _with_progress(
    view: _View, status: FineTuneJobStatus, situation: Situation, observation: Observation
) -> FineTuneJobStatus:
    """Record progress when the phase changes, otherwise at most once per status interval.

    New suspects are recorded at once.
    """
    report = observation.progress
    if report is None:
        return status
    phase = view.described(status, situation).phase
    due = attempts.progress_due_at(status, view.spec)
    if phase == view.before.phase and due is not None and due > view.now:
        return suspects.with_suspects(status, report)
    status = suspects.with_suspects(status, report, is_due=True)
    return attempts.with_progress(status, report, observation.checkpoints, view.now)


def _not_created(
    view: _View, status: FineTuneJobStatus, attempt: AttemptStatus | None, failed: SubmitFailed
) -> Decision:
    """Fail, explain or retry an open attempt that does not exist yet."""
    unchanged = Decision((), status, None)
    was_suspended = is_true(status, ConditionType.SUSPENDED)
    if attempt is None or is_finished(status) or (view.spec.suspend and was_suspended):
        return unchanged
    if failed.is_absent and (limit := during.deadline_before_creation(view.spec, status, view.now)):
        never_ran = Observation(
            AttemptPhase.PENDING,
            failure_class=FailureClass.NOT_STARTED,
            message=limit.obstacle,
        )
        termination = failures.verdict(never_ran)
        status = attempts.close(status, termination, "", view.now)
        return _fail(view, status, limit.reason, limit.message)
    opened = parse_rfc3339(attempt.start_time) if attempt.start_time else view.now
    is_early = view.now - opened < timedelta(seconds=PATIENCE_SECONDS)
    if is_early and not failed.needs_fix:
        return unchanged
    if was_suspended:
        text = f"resumed, but attempt {attempt.number} cannot start yet: {failed.message}"
        return view.conclude(status, Situation(Stage.RESUMING, Reason.SUSPENDED_BY_USER, text))
    if view.spec.suspend:
        text = f"waiting until no process of attempt {attempt.number} can run: {failed.message}"
        return view.conclude(status, Situation(Stage.SUSPENDING, Reason.SUSPENDING, text))
    stage, requeue = stage_of_start(attempt.number), None
    if failed.needs_fix:
        stage, requeue = Stage.BLOCKED, RECHECK_SECONDS
    situation = Situation(stage, Reason.CREATION_FAILED, failed.message)
    return view.conclude(status, situation, requeue=requeue)


def _overruled(view: _View, attempt: AttemptStatus, observation: Observation | None) -> Decision:
    """Stop the open attempt of a job that another writer has marked as finished.

    The mark is final, because clients that waited for it have continued. All other conditions
    describe the facts.
    """
    kind, status = ConditionType.COMPLETE, view.before
    if not is_true(status, kind):
        kind = ConditionType.FAILED
    cause = f"another writer set {kind} in the status while attempt {attempt.number} was open"
    if observation is not None and not _is_terminated(observation):
        saves = "stops" if view.spec.checkpoint.enabled is False else "saves a checkpoint and stops"
        text = f"{cause}; it {saves}"
        situation = Situation(Stage.OVERRULED, Reason.ENDED_BY_OTHERS, text)
        grace = float(view.spec.deadlines.termination_grace_seconds)
        status, until = attempts.stop(status, grace, view.now)
        return view.conclude(status, situation, Cancel(until), requeue=observation.requeue_seconds)
    absent = Observation(
        AttemptPhase.UNKNOWN,
        failure_class=FailureClass.NOT_STARTED,
        message="it was never created",
    )
    termination = failures.verdict(observation or absent)
    if termination.progress is not None:
        folder = (observation or absent).checkpoints
        status = attempts.with_progress(status, termination.progress, folder, view.now)
    node = observation.node if observation else ""
    status = attempts.close(status, termination, node, view.now)
    if termination.failure_class is FailureClass.COMPLETED and kind is ConditionType.COMPLETE:
        return _complete(view, status, termination)
    text = f"{cause}; it was stopped before it finished"
    return _fail(view, status, Reason.ENDED_BY_OTHERS, text, stage=Stage.ABANDONED)


def _complete(view: _View, status: FineTuneJobStatus, termination: Termination) -> Decision:
    final = {"completion_time": rfc3339(view.now), "nodes": _without_nodes(status), "suspects": []}
    situation = Situation(Stage.COMPLETE, Reason.COMPLETED, termination.message, exists=True)
    return view.conclude(status.model_copy(update=final), situation, Collect())


def _finish_again(view: _View, status: FineTuneJobStatus) -> Decision:
    """Restore Complete or Failed, which another writer removed, such as an older operator.

    A finished job never trains again.
    """
    last = status.attempts[-1] if status.attempts else AttemptStatus(number=status.attempt)
    failure, message = last.failure_class or FailureClass.UNKNOWN.value, last.message
    if failure == FailureClass.COMPLETED:
        return view.conclude(status, Situation(Stage.COMPLETE, Reason.COMPLETED, message))
    return view.conclude(status, Situation(Stage.FAILED, failure, message))


def _without_nodes(status: FineTuneJobStatus) -> NodesStatus:
    return status.nodes.model_copy(update={"ready": 0})


def _fail(
    view: _View, status: FineTuneJobStatus, reason: str, message: str, stage: Stage = Stage.FAILED
) -> Decision:
    final = {"completion_time": rfc3339(view.now), "nodes": _without_nodes(status)}
    return view.conclude(status.model_copy(update=final), Situation(stage, reason, message))
