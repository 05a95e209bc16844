"""The view of a job in `ftctl run`, from status and observation, and the events between two views.

Pure functions; `live` draws a view on a terminal, `plain` writes it as lines.
"""

from dataclasses import dataclass

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.api.v1alpha1.status import AttemptStatus, JobPhase
from finetune_operator.backends.base import Observation
from finetune_trainer.config import FailureClass, Phase, Progress

# In these phases, the trainer's phase is more precise than the job's.
_TRAINER_WORKS = {JobPhase.STARTING, JobPhase.RUNNING}


@dataclass(frozen=True)
class View:
    """A job at one moment.

    Attributes:
        phase: The trainer's phase while it works, else the job's.
        attempt: Number of the newest attempt; 0 before the first.
        progress: The last report of rank 0; an empty progress before the first report.
        restarts: Counted restarts so far.
        disruptions: Restarts that do not count.
        ended: Finished attempts, oldest first.
    """

    name: str
    phase: str
    attempt: int
    progress: Progress
    restarts: int
    max_restarts: int
    disruptions: int
    ended: tuple[AttemptStatus, ...]


def view_of(job: FineTuneJob, observation: Observation | None, before: View | None = None) -> View:
    """Combine status and observation into one view.

    The progress of `before` is used if there is none now, such as between two attempts.
    """
    status = job.status
    progress = _newest_progress(observation)
    if progress is None:
        progress = before.progress if before else Progress(phase=Phase.STARTING)
        works = False
    else:
        works = status.phase in _TRAINER_WORKS
    return View(
        name=job.metadata.name,
        phase=progress.phase.value if works else status.phase.value,
        attempt=status.attempt,
        progress=progress,
        restarts=status.restarts.counted,
        max_restarts=job.spec.restart_policy.max_restarts,
        disruptions=status.restarts.disruptions,
        ended=tuple(
            sorted(
                (one for one in status.attempts if one.end_time is not None),
                key=lambda one: one.number,
            )
        ),
    )


def _newest_progress(observation: Observation | None) -> Progress | None:
    if observation is None:
        return None
    if observation.termination and observation.termination.progress:
        return observation.termination.progress
    return observation.progress


def news(before: View, after: View) -> list[str]:
    """Return the events between two views, one sentence each."""
    old, new = before.progress, after.progress
    known = {one.number for one in before.ended}
    found = [
        _ending(one)
        for one in after.ended
        if one.number not in known and one.failure_class != FailureClass.COMPLETED
    ]
    if after.attempt > max(1, before.attempt):
        found.append(f"attempt {after.attempt} starts")
    if new.resumed_step is not None and _differs(old, new, "attempt", "resumed_step"):
        found.append(f"resumed from the checkpoint of step {new.resumed_step}")
    if new.eval_loss_before is not None and _differs(old, new, "eval_loss_before"):
        found.append(f"held-out loss {new.eval_loss_before:.3f} before training")
    if new.eval_loss not in (None, new.eval_loss_before) and _differs(old, new, "eval_loss"):
        step = new.step if new.exported_step is None else new.exported_step
        found.append(f"held-out loss {new.eval_loss:.3f} at step {step}")
    if new.checkpoint and (old.checkpoint is None or old.checkpoint.step != new.checkpoint.step):
        found.append(f"checkpoint of step {new.checkpoint.step} committed")
    known_runs = old.trackers or ()
    found += [f"{one.type}: {one.url}" for one in new.trackers or () if one not in known_runs]
    found += [f"warning: {one}" for one in new.warnings if one not in old.warnings]
    return found


def _differs(old: Progress, new: Progress, *fields: str) -> bool:
    return any(getattr(old, field) != getattr(new, field) for field in fields)


def _ending(attempt: AttemptStatus) -> str:
    code = f" (exit code {attempt.exit_code})" if attempt.exit_code is not None else ""
    message = f": {attempt.message}" if attempt.message else ""
    return f"attempt {attempt.number} ended, {attempt.failure_class}{code}{message}"


def duration(seconds: float) -> str:
    """Format seconds: 42s, 3m05s, 2h07m, 3d04h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"
