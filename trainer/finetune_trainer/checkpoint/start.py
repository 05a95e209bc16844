"""Where training starts from: which checkpoint `resumeFrom` means, and a folder made ready for it.

The store calls it on rank 0 before the first step; nothing is written into the folder earlier.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.commit import Manifest
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.config import CheckpointRef
from finetune_trainer.errors import ConfigError


class Start(NamedTuple):
    """What to start from, and what the ledger of the folder says."""

    source: tuple[Path, Manifest] | None
    last: CheckpointRef | None
    best: CheckpointRef | None


def prepare_start(
    root: Path, resume_from: str, fingerprint: str, warn: Callable[[str], None]
) -> Start:
    """Choose the checkpoint to start from and clear the way for those that will follow it.

    Leftovers of a killed process are deleted, checkpoints beyond the chosen step set aside.

    Raises:
        ConfigError: the checkpoint belongs to another run, or there is no such folder.
        CheckpointError: the folder that was named is damaged.
    """
    root.mkdir(parents=True, exist_ok=True)
    commit.remove_leftovers(root)
    source = _choose(root, resume_from, fingerprint, warn)
    step = source[1].step if source else 0
    moved = commit.set_aside_newer(root, step)
    if moved:
        warn(
            f"training starts from step {step}, so what lay beyond it in {root} was renamed: "
            f"{', '.join(path.name for path in moved)}; delete it when it is not needed"
        )
    refs = commit.ledger(root)
    return Start(source, next((ref for ref in refs if ref.step == step), None), best(refs))


def _choose(
    root: Path, resume_from: str, fingerprint: str, warn: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    if resume_from == "none":
        return None
    if resume_from == "auto":
        source = commit.newest_verified(root, warn)
    else:
        folder = Path(resume_from).absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"spec.checkpoint.resumeFrom {resume_from} is not a folder; name the folder of "
                "one checkpoint (.../step-N), auto or none"
            )
        source = folder, commit.verify(folder)
    if source is not None and source[1].fingerprint != fingerprint:
        raise ConfigError(
            f"spec.checkpoint.uri {source[0]} was written with another model, method or data set; "
            "use another folder, or set spec.checkpoint.resumeFrom to none"
        )
    return source
