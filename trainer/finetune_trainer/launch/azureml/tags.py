"""Encode progress in the tags of a run, within the length that Azure ML accepts."""

from pathlib import Path

from finetune_trainer.config import MAX_TAG_LENGTH, CheckpointRef, Progress


def progress_text(progress: Progress, checkpoints: Path) -> str:
    """Return the progress as JSON without null and default values; `Progress` can read it.

    Samples, data reports and the metrics address are left out, and so are the oldest warnings if
    they do not fit. Paths are relative to the folder `checkpoints`: only the operator knows the URI
    of that mount.
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
    if not _fits(bare):  # only with extremely long paths
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
    """Whether the text fits, counted in bytes because Azure ML does not define its unit."""
    return len(_text(progress).encode()) <= MAX_TAG_LENGTH


def _text(progress: Progress) -> str:
    return progress.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
