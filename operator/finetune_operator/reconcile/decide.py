"""Decide what to do about one job: a pure function of the resource, what is seen, and the time.

Called by whoever drives jobs (`drive` for `ftctl run`, the operator's kernel in a cluster); it does
nothing itself. The caller saves `Decision.status`, then acts. A crash between the two is harmless:
an attempt is opened in the status before it is submitted, or is found again by its name
(`as_opened`), submitting is idempotent, and `Cancel` and `Collect` are decided again until they
have had their effect.
"""

import dataclasses
from dataclasses import dataclass
from datetime import datetime

from finetune_operator.api.paths import show_count
from finetune_operator.api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_operator.api.v1alpha1.lifecycle import RestartAction
from finetune_operator.api.v1alpha1.status import (
    AttemptStatus,
    FineTuneJobStatus,
    NodesStatus,
    PlanStatus,
)
from finetune_operator.backends.base import AttemptPhase, Found, Observation
from finetune_operator.planner.plan import Plan
from finetune_operator.reconcile import attempts, deadlines, failures, progress
from finetune_operator.reconcile.conditions import (
    ConditionType,
    Reason,
    Situation,
    Stage,
    describe,
    find,
    is_finished,
    is_true,
    rfc3339,
)
from finetune_operator.reconcile.stopping import on_its_way, trains
from finetune_trainer.config import ExitCode, FailureClass, Termination

LOST_NODE_GRACE_SECONDS = 10.0
"""What is left of a gang that lost a node gets no longer: it cannot take a checkpoint any more."""

MENDED_SECONDS = 30.0
"""How often to look whether somebody has mended what keeps a job from starting."""


@dataclass(frozen=True)
class Submit:
    """Submit attempt `number`, or adopt it; afterwards put its handle into `status.backendRef`."""

    number: int


@dataclass(frozen=True)
class Cancel:
    """Ask the current attempt to stop; `grace_seconds` later it is killed."""

    grace_seconds: float


@dataclass(frozen=True)
class Collect:
    """Ask what was exported and put it into `status.artifacts`, before the status is saved."""


Action = Submit | Cancel | Collect


@dataclass(frozen=True)
class Refusal:
    """Why no attempt can be made of a job as it is; takes the place of its plan.

    Attributes:
        reason: One CamelCase word for the condition Accepted.
        message: What is wrong, starting with the field's path, and what to do.
    """

    reason: str
    message: str


@dataclass(frozen=True)
class Decision:
    """What to do about a job now.

    Attributes:
        actions: In this order; empty when there is nothing to do.
        status: What to save if it differs from the status that went in.
        requeue_seconds: Decide again after so long though nothing happened; None for never.
    """

    actions: tuple[Action, ...]
    status: FineTuneJobStatus
    requeue_seconds: float | None


@dataclass(frozen=True)
class _View:
    """What every part of a decision looks at; `status` is the one being built."""

    spec: FineTuneJobSpec
    generation: int
    before: FineTuneJobStatus
    now: datetime
    plan: Plan | Refusal

    def conclude(
        self,
        status: FineTuneJobStatus,
        situation: Situation,
        *actions: Action,
        requeue: float | None = None,
    ) -> Decision:
        """Say what the situation is and what follows from it."""
        return Decision(actions, self.described(status, situation), requeue)

    def described(self, status: FineTuneJobStatus, situation: Situation) -> FineTuneJobStatus:
        has_queue = bool(self.spec.queue)
        return describe(status, situation, self.now, self.generation, has_queue=has_queue)

    def seconds_until(self, moment: datetime) -> float:
        return max(0.0, (moment - self.now).total_seconds())


def decide(
    job: FineTuneJob, observation: Observation | None, now: datetime, plan: Plan | Refusal
) -> Decision:
    """Return what to do about `job` now; the same input gives the same answer.

    Args:
        job: The resource with its last saved status.
        observation: Of the attempt that `status.backendRef` names. Where the open attempt has none,
            it says that nothing of it exists, which somebody has made sure of; None where nobody
            has.
        now: Time with a zone.
        plan: What `make_plan` chose for the job, or why nothing can be chosen. It counts only
            where an attempt is to be opened: one that is open goes on as it was planned.
    """
    view = _View(job.spec, job.metadata.generation, job.status, now, plan)
    if is_finished(job.status):
        if (left := attempts.current(job.status)) is not None:
            return _overruled(view, left, observation)
        seen = {"observed_generation": job.metadata.generation}
        return Decision((), job.status.model_copy(update=seen), None)
    status = job.status
    attempt = attempts.current(status)
    if attempt is None:
        return _between_attempts(view, status)
    if status.backend_ref is None and observation is not None:
        return _between_attempts(view, status)
    if observation is None:
        return view.conclude(status, _starting(attempt.number), Submit(attempt.number))
    is_news = observation.nodes_ready != status.nodes.ready
    if is_news and observation.phase is not AttemptPhase.UNKNOWN:
        ready = status.nodes.model_copy(update={"ready": observation.nodes_ready})
        status = status.model_copy(update={"nodes": ready})
    if _is_over(observation):
        return _after_attempt(view, status, observation)
    return _during_attempt(view, status, attempt, observation)


def _is_over(observation: Observation) -> bool:
    ended = (AttemptPhase.SUCCEEDED, AttemptPhase.FAILED, AttemptPhase.UNKNOWN)
    return observation.all_gone and observation.phase in ended


def as_opened(
    job: FineTuneJob, found: Found, now: datetime, plan: Plan | Refusal
) -> FineTuneJobStatus:
    """Return the status of a job whose next attempt was created before anybody wrote that down."""
    since = found.since or now
    status = job.status if isinstance(plan, Refusal) else _note_plan(job.status, plan)
    status = attempts.open_next(status, since)
    # It was made of the first spec, as any later change would have met a status that was written.
    situation, has_queue = _starting(status.attempt), bool(job.spec.queue)
    return describe(status, situation, since, generation=1, has_queue=has_queue)


def refuse(job: FineTuneJob, message: str, now: datetime) -> FineTuneJobStatus:
    """Return the status of a job that cannot be carried out at all; it is Failed, which is final.

    For a spec no plan can satisfy, or an attempt that the backend will never create.
    """
    status = job.status
    if attempts.current(status) is not None:
        words = Termination(
            failure_class=FailureClass.CONFIG_ERROR, exit_code=ExitCode.CONFIG, message=message
        )
        status = attempts.close(status, words, "", now)
    status = status.model_copy(update={"completion_time": rfc3339(now)})
    situation, has_queue = Situation(Stage.FAILED, Reason.REFUSED, message), bool(job.spec.queue)
    return describe(status, situation, now, job.metadata.generation, has_queue=has_queue)


def hold(
    status: FineTuneJobStatus,
    refusal: Refusal,
    now: datetime,
    generation: int,
    until: str = "the spec can be read",
) -> FineTuneJobStatus:
    """Return the status of a job about which nothing can be done, as it cannot be read or seen.

    An open attempt is told as it was seen last, unless its job was suspended before it was created.

    Args:
        status: The status it has.
        refusal: Why.
        now: Time with a zone.
        generation: Of the job.
        until: What must come first, as the end of a sentence.
    """
    attempt = attempts.current(status)
    if is_finished(status):
        return status
    if attempt is None or is_true(status, ConditionType.SUSPENDED):
        situation = Situation(Stage.REFUSED, refusal.reason, refusal.message)
        return describe(status, situation, now, generation)
    text = (
        f"{refusal.message}; attempt {attempt.number} is left alone and runs on if it runs, and "
        f"what becomes of it is told once {until}"
    )
    return describe(status, Situation(Stage.HELD, refusal.reason, text), now, generation)


def _note_plan(status: FineTuneJobStatus, plan: Plan) -> FineTuneJobStatus:
    chosen = PlanStatus(
        strategy=plan.strategy.value,
        precision=plan.precision.value,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        reasons=list(plan.reasons),
    )
    nodes = NodesStatus(desired=plan.nodes, ready=status.nodes.ready, world_size=plan.world_size)
    return status.model_copy(update={"plan": chosen, "nodes": nodes})


def _between_attempts(view: _View, status: FineTuneJobStatus) -> Decision:
    """Nothing of the job lives: suspend, fail, wait, or open the next attempt.

    An attempt that was opened and never created stays open, as its creation may yet be carried out:
    under its number it is found again, and stopped.
    """
    status = status.model_copy(update={"nodes": _without_nodes(status)})
    if isinstance(view.plan, Refusal):
        situation = Situation(Stage.REFUSED, view.plan.reason, view.plan.message)
        return view.conclude(status, situation, requeue=MENDED_SECONDS)
    status = _note_plan(status, view.plan)
    if view.spec.suspend:
        text = "suspended by spec.suspend; set it to false to go on"
        if (last := status.checkpoint.last) is not None:
            text = f"suspended at step {last.step} by spec.suspend; set it to false to go on"
        return view.conclude(status, Situation(Stage.SUSPENDED, Reason.SUSPENDED_BY_USER, text))
    limit = deadlines.active(view.spec.deadlines, status)
    # A suspended job has no running deadline: opening an attempt starts a new one.
    was_suspended = is_true(view.before, ConditionType.SUSPENDED) or _is_suspending(view.before)
    if limit and limit.at <= view.now and not was_suspended:
        return _fail(view, status, limit.reason, limit.message)
    start = attempts.earliest_start(status, view.spec.restart_policy)
    if start is not None and start > view.now:
        text = f"attempt {status.attempt + 1} starts at {rfc3339(start)}, after the back-off"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        return view.conclude(status, situation, requeue=view.seconds_until(start))
    status = attempts.open_next(status, view.now)
    return view.conclude(status, _starting(status.attempt), Submit(status.attempt))


def _starting(number: int) -> Situation:
    stage = Stage.STARTING if number == 1 else Stage.RESTARTING
    return Situation(stage, Reason.PROVISIONING, f"attempt {number} is starting")


def _after_attempt(view: _View, status: FineTuneJobStatus, observation: Observation) -> Decision:
    """Every process of the attempt is gone: close it, and decide what follows."""
    words = failures.verdict(observation)
    said = words.progress or observation.progress
    if said is not None:
        status = progress.take_over(status, view.spec, said, view.now)
    status = attempts.close(status, words, observation.node, view.now)
    if words.failure_class is FailureClass.COMPLETED:
        return _complete(view, status, words)
    if (reason := deadlines.ending(view.before)) is not None:
        return _fail(view, status, *reason)
    if view.spec.suspend or _is_suspending(view.before):
        # What ends because it was told to is not a fault of the job, unless it says that it
        # would meet the same fault again.
        if words.failure_class in failures.PERMANENT:
            return _fail(view, status, words.failure_class, words.message)
        return _between_attempts(view, status)
    policy = view.spec.restart_policy
    action = failures.action_for(policy, words.failure_class, words.exit_code)
    if action is RestartAction.FAIL:
        return _fail(view, status, words.failure_class, words.message)
    budget = attempts.spend(status.restarts, action, policy)
    if budget.exceeded is not None:
        return _fail(view, status, budget.exceeded, f"{budget.message}; {words.message}")
    return _between_attempts(view, status.model_copy(update={"restarts": budget.restarts}))


def _during_attempt(
    view: _View, status: FineTuneJobStatus, attempt: AttemptStatus, observation: Observation
) -> Decision:
    """The attempt lives, or parts of it do: stop it, wait for it, or watch it."""
    limits = [
        limit
        for limit in (
            deadlines.active(view.spec.deadlines, status),
            deadlines.pending(view.spec.deadlines, status, observation, view.now),
        )
        if limit is not None
    ]
    passed = next((limit for limit in limits if limit.at <= view.now), None)
    limits = [limit for limit in limits if limit.at > view.now]
    grace = float(view.spec.deadlines.termination_grace_seconds)
    ending = deadlines.ending(view.before) or (passed and (passed.reason, passed.message))
    waits = [view.seconds_until(limit.at) for limit in limits]
    if observation.look_again_seconds is not None:
        waits.append(observation.look_again_seconds)
    requeue = min(waits, default=None)
    situation: Situation
    actions: tuple[Action, ...] = (Cancel(grace),)
    if ending:
        stops = on_its_way(view.before, attempt, observation, grace)
        situation = Situation(Stage.ENDING, *ending, meanwhile=stops)
    elif view.spec.suspend or _is_suspending(view.before):
        stops = on_its_way(view.before, attempt, observation, grace)
        situation = Situation(Stage.SUSPENDING, Reason.SUSPENDING, stops)
    elif observation.phase is AttemptPhase.FAILED:
        left = observation.message or f"attempt {attempt.number} lost a node"
        text = f"{left}; waiting until all of its processes are gone"
        situation = Situation(Stage.RESTARTING, Reason.RESTARTING, text)
        actions = (Cancel(_grace_of_the_rest(observation, grace)),)
    elif observation.phase is AttemptPhase.UNKNOWN:
        if not observation.reason or not deadlines.is_waiting(status):
            return Decision((), status, requeue)  # nothing is known, so nothing new is said
        stage = Stage.STARTING if attempt.number == 1 else Stage.RESTARTING
        situation, actions = Situation(stage, observation.reason, observation.message), ()
    else:
        situation, actions = _watching(attempt, status, observation), ()
    if observation.warning and not ending:
        text = f"{situation.message}; {observation.warning}"
        situation = dataclasses.replace(situation, message=text)
    status = _with_progress(view, status, situation, observation)
    return view.conclude(status, situation, *actions, requeue=requeue)


def _grace_of_the_rest(observation: Observation, grace: float) -> float:
    """Nodes that stop together after a preemption may still be writing their checkpoint."""
    words = observation.termination
    if words is not None and words.exit_code in (ExitCode.DONE, ExitCode.PREEMPTED):
        return grace
    return min(grace, LOST_NODE_GRACE_SECONDS)


def _watching(
    attempt: AttemptStatus, status: FineTuneJobStatus, observation: Observation
) -> Situation:
    runs = observation.phase in (AttemptPhase.RUNNING, AttemptPhase.SUCCEEDED)
    if runs and trains(status, observation):
        text = f"attempt {attempt.number} trains on {show_count(status.nodes.world_size, 'rank')}"
        return Situation(Stage.RUNNING, Reason.TRAINING, text, exists=True)
    stage = Stage.STARTING if attempt.number == 1 else Stage.RESTARTING
    if runs and not observation.reason:
        text = f"every node of attempt {attempt.number} runs; ranks meet and load model and data"
        return Situation(stage, Reason.STARTING, text, exists=True)
    text = observation.message or f"attempt {attempt.number} waits for its nodes"
    if observation.reason == Reason.CREATION_FAILED:
        stage = Stage.BLOCKED  # it does not pass by waiting
    return Situation(stage, observation.reason or Reason.PROVISIONING, text, exists=True)


def _with_progress(
    view: _View, status: FineTuneJobStatus, situation: Situation, observation: Observation
) -> FineTuneJobStatus:
    """Take over progress when the phase changes, else at most once per status interval."""
    said = observation.progress
    if said is None:
        return status
    phase = view.described(status, situation).phase
    due = progress.due_at(status, view.spec)
    if phase == view.before.phase and due is not None and due > view.now:
        return status
    return progress.take_over(status, view.spec, said, view.now)


def _overruled(view: _View, attempt: AttemptStatus, observation: Observation | None) -> Decision:
    """Somebody else wrote that the job is finished while an attempt is open: end the attempt.

    Final stays final, as whoever waited for it has gone on; all else is said as it is.
    """
    kind, status = ConditionType.COMPLETE, view.before
    if not is_true(status, kind):
        kind = ConditionType.FAILED
    told = f"somebody else wrote {kind} into the status while attempt {attempt.number} was open"
    if observation is not None and not _is_over(observation):
        text = f"{told}; it saves a checkpoint and stops"
        situation = Situation(Stage.OVERRULED, Reason.ENDED_BY_OTHERS, text)
        cancel = Cancel(float(view.spec.deadlines.termination_grace_seconds))
        again = observation.look_again_seconds
        return view.conclude(status, situation, cancel, requeue=again)
    absent = Observation(AttemptPhase.UNKNOWN, message="nothing of it was created")
    words = failures.verdict(observation or absent)
    if words.progress is not None:
        status = progress.take_over(status, view.spec, words.progress, view.now)
    node = observation.node if observation else ""
    status = attempts.close(status, words, node, view.now)
    if words.failure_class is FailureClass.COMPLETED and kind is ConditionType.COMPLETE:
        return _complete(view, status, words)
    text = f"{told}; it was stopped before it was done"
    return _fail(view, status, Reason.ENDED_BY_OTHERS, text, stage=Stage.ABANDONED)


def _complete(view: _View, status: FineTuneJobStatus, words: Termination) -> Decision:
    ended = {"completion_time": rfc3339(view.now), "nodes": _without_nodes(status)}
    situation = Situation(Stage.COMPLETE, Reason.COMPLETED, words.message, exists=True)
    return view.conclude(status.model_copy(update=ended), situation, Collect())


def _without_nodes(status: FineTuneJobStatus) -> NodesStatus:
    return status.nodes.model_copy(update={"ready": 0})


def _fail(
    view: _View, status: FineTuneJobStatus, reason: str, message: str, stage: Stage = Stage.FAILED
) -> Decision:
    ended = {"completion_time": rfc3339(view.now), "nodes": _without_nodes(status)}
    return view.conclude(status.model_copy(update=ended), Situation(stage, reason, message))


def _is_suspending(status: FineTuneJobStatus) -> bool:
    """Say whether the open attempt was told to stop; it stays so until it is gone."""
    found = find(status, ConditionType.SUSPENDED)
    return found is not None and found.reason == Reason.SUSPENDING
