"""Finish a run after its last step: last commit, best weights, export.

Called by `rank` on every rank, in this order.
"""

from typing import TYPE_CHECKING

from finetune_trainer.config import Phase
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import unless_stopped
from finetune_trainer.errors import CheckpointError
from finetune_trainer.export import export
from finetune_trainer.failpoints import failpoint
from finetune_trainer.loop import Run, report_commit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def finish_saving(run: Run) -> None:
    """Wait for the last checkpoint; if it failed, the trained model is still exported."""
    try:
        with run.telemetry.phases.within(TimedPhase.CHECKPOINT_BLOCKING):
            committed = run.store.wait()
    except CheckpointError:  # reported by the store
        run.telemetry.warn("the last checkpoint failed; the trained model is exported from memory")
        return
    report_commit(run, committed)


def choose_weights(run: Run, last_step: int) -> str:
    """Return to the best weights if early stopping is on; return a description of the result."""
    if run.config.training.early_stopping is None:
        return f"finished after {last_step} steps"
    telemetry, state = run.telemetry, run.strategy.state()
    telemetry.plan(last_step)
    with run.telemetry.phases.within(TimedPhase.CHECKPOINT_BLOCKING):
        best = run.store.load_best(state)
    is_early = last_step < run.plan.total_steps
    result = (
        f"stopped early at step {last_step}" if is_early else f"finished after {last_step} steps"
    )
    if best is None:
        return result
    run.strategy.load_state(state)
    if best.step != last_step:
        telemetry.went_back(best)
    return f"{result}, best step {best.step}"


def export_model(run: Run, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Export the trained model from rank 0 and return the written paths."""
    telemetry = run.telemetry
    telemetry.phase(Phase.EXPORTING)
    # An adapter is exported without the base. A collective, so not interruptible.
    model = run.strategy.whole_model(trained_only=run.config.output.format == "adapter")

    def work() -> tuple[str, ...]:
        if model is None or run.fence is None:
            return ()
        failpoint("exporting", run.plan.total_steps)
        artifacts = export(
            model,
            tokenizer,
            run.config,
            fence=run.fence,
            progress=telemetry.progress,
            warn=telemetry.warn,
            stops=run.dataset.ordered_stops,
        )
        telemetry.artifacts(artifacts)
        return artifacts

    return unless_stopped(run.agreement, run.stop, work)
