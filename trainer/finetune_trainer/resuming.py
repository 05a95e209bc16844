"""Save a run's state besides tensors in a checkpoint, and resume training from one.

Called by `rank`: the loop adds the notes to every save, and a resumed run restores them before its
first step.
"""

from typing import Any

from finetune_trainer.config import ContractModel, SampleAnswer
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.loop import Run, evaluate, is_evaluation_due
from finetune_trainer.stopping import Patience
from finetune_trainer.telemetry import Telemetry


class _Notes(ContractModel):
    """State in a checkpoint besides tensors; with it a resumed run reports the whole job."""

    eval_loss_before: float | None = None
    samples: tuple[SampleAnswer, ...] = ()
    skipped_steps: int = 0
    best_eval_loss: float | None = None
    evaluations_since_best: int = 0


def notes_of(telemetry: Telemetry, patience: Patience) -> dict[str, Any]:
    """Return the current notes for a checkpoint, as JSON."""
    progress = telemetry.progress
    notes = _Notes(
        eval_loss_before=progress.eval_loss_before,
        samples=progress.samples,
        skipped_steps=progress.skipped_steps,
        best_eval_loss=patience.best,
        evaluations_since_best=patience.misses,
    )
    return notes.model_dump(mode="json", by_alias=True)


def resume(run: Run) -> int:
    """Load the newest committed checkpoint, if there is one; return the first step to run."""
    state = run.strategy.state() | {"trainer": run.notes()}
    run.store.check_space(state)
    with run.telemetry.phases.within(TimedPhase.CHECKPOINT_BLOCKING):
        manifest = run.store.restore(state)
        if manifest is None:
            return 0
        run.strategy.load_state(state)
    notes = _Notes.model_validate(state["trainer"])
    run.patience.best, run.patience.misses = notes.best_eval_loss, notes.evaluations_since_best
    run.telemetry.resumed(
        manifest.step,
        eval_loss_before=notes.eval_loss_before,
        eval_loss=manifest.eval_loss,
        skipped_steps=notes.skipped_steps,
        samples=notes.samples,
    )
    if manifest.eval_loss is None and is_evaluation_due(run, manifest.step):
        run.patience.improves(evaluate(run, manifest.step))  # a stop had interrupted the evaluation
    return manifest.step
