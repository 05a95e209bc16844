"""What the trainer writes into the tags of its run: each value within what Azure ML takes."""

from pathlib import Path

from finetune_trainer.config import MAX_TAG_LENGTH, CheckpointRef, Progress


def progress_text(progress: Progress, checkpoints: Path) -> str:
    """Return it as JSON without what is null or default; `Progress` reads it back.

    Answers, reports on the data and the address of the metrics are left out, and so are the oldest
    warnings where not all fit. Paths are relative to the folder `checkpoints`: only the operator
    knows the URI of what is mounted there.
    """
    bare = progress.model_copy(
        update={
            "samples": (),
            "train_data": None,
            "eval_data": None,
            "metrics_url": None,
            "warnings": (),
            "checkpoint": _below(progress.checkpoint, checkpoints),
            "best_checkpoint": _below(progress.best_checkpoint, checkpoints),
        }
    )
    if not _fits(bare):  # with paths as long as no run has them
        least = {name: getattr(bare, name) for name in ("attempt", "phase", "time", "step")}
        return _text(Progress(**least))
    for warning in reversed(progress.warnings):
        longer = bare.model_copy(update={"warnings": (warning, *bare.warnings)})
        if _fits(longer):
            bare = longer
    return _text(bare)


def _below(checkpoint: CheckpointRef | None, folder: Path) -> CheckpointRef | None:
    if checkpoint is None or not Path(checkpoint.path).is_relative_to(folder):
        return checkpoint
    relative = Path(checkpoint.path).relative_to(folder)
    return checkpoint.model_copy(update={"path": str(relative)})


def _fits(progress: Progress) -> bool:
    """Whether it is short enough, counted in bytes: nobody says what a character is."""
    return len(_text(progress).encode()) <= MAX_TAG_LENGTH


def _text(progress: Progress) -> str:
    return progress.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
