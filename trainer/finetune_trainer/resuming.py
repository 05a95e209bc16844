"""Save a run's state besides tensors in a checkpoint, and resume training from one.

Called by `rank`: the loop adds the notes to every save, and a resumed run restores them before its
first step.
"""

from pathlib import Path
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
    if is_other := run.store.has_other_held_out(manifest):
        notes = notes.model_copy(update=dict.fromkeys(("eval_loss_before", "best_eval_loss")))
        notes = notes.model_copy(update={"evaluations_since_best": 0})
        if run.world.is_main:
            run.telemetry.warn(
                f"the held-out rows have changed since the checkpoint of step {manifest.step} "
                f"({_held_out_field(run)}); earlier losses and the best checkpoint so far are not "
                "compared with the new ones"
            )
    run.patience.best, run.patience.misses = notes.best_eval_loss, notes.evaluations_since_best
    run.telemetry.resumed(
        manifest.step,
        eval_loss_before=notes.eval_loss_before,
        eval_loss=None if is_other else manifest.eval_loss,
        skipped_steps=notes.skipped_steps,
        samples=notes.samples,
    )
    if manifest.eval_loss is None and is_evaluation_due(run, manifest.step):
        run.patience.improves(evaluate(run, manifest.step))  # a stop had interrupted the evaluation
    return manifest.step


def _held_out_field(run: Run) -> str:
    has_share = run.config.data.eval_share is not None
    return f"spec.dataset.{'evalShare' if has_share else 'evalSource'}"


def keep_output_dtype(run: Run, first_step: int) -> None:
    """Export float32 from jobs that an earlier version began: that version always did so.

    A file in the run directory marks jobs that began with `output.dtype`. The notes of a checkpoint
    cannot, because earlier versions refuse unknown notes after a rollback.

    Args:
        run: The run, on every rank; only rank 0 exports.
        first_step: Result of `resume`.
    """
    output, marker = run.config.output, Path(run.config.run_dir) / "output-dtype"
    if not run.world.is_main or output.dtype is not None:
        return
    if first_step == 0 or not run.config.checkpoint.is_continued:
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            run.telemetry.warn(
                f"{marker} cannot be written ({error.strerror or error}); later attempts of this "
                "job export float32 unless spec.output.dtype is set"
            )
    elif not marker.exists() and run.config.method.type == "full":
        kept = output.model_copy(update={"dtype": "float32"})
        run.config = run.config.model_copy(update={"output": kept})
