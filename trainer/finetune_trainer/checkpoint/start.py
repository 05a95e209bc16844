"""Where training starts from: which checkpoint `resumeFrom` means, and a folder made ready for it.

The store calls it on rank 0 before the first step; nothing is written into the folder earlier.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from finetune_trainer.checkpoint import commit
from finetune_trainer.checkpoint.commit import Manifest
from finetune_trainer.checkpoint.retention import best
from finetune_trainer.config import CheckpointConfig, CheckpointRef
from finetune_trainer.errors import ConfigError


class Start(NamedTuple):
    """What to start from, and what the ledger of the folder says."""

    source: tuple[Path, Manifest] | None
    last: CheckpointRef | None
    best: CheckpointRef | None


def prepare_start(
    root: Path, config: CheckpointConfig, fingerprint: str, warn: Callable[[str], None]
) -> Start:
    """Choose the checkpoint to start from and clear the way for those that will follow it.

    Leftovers of a killed process are deleted, checkpoints beyond the chosen step set aside.

    Raises:
        ConfigError: the checkpoint belongs to another run, or there is no such folder.
        CheckpointError: the folder that was named is damaged.
    """
    root.mkdir(parents=True, exist_ok=True)
    commit.remove_leftovers(root)
    source = _choose(root, config, warn)
    if source is not None and source[1].fingerprint != fingerprint:
        raise ConfigError(
            f"spec.checkpoint.uri {source[0]} was written with another model, method or data set; "
            "use another folder, or set spec.checkpoint.resumeFrom to none"
        )
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
    root: Path, config: CheckpointConfig, warn: Callable[[str], None]
) -> tuple[Path, Manifest] | None:
    """Return the named checkpoint, or the newest of the job's own where that is further on.

    A later attempt must not fall back to where the job once began: neither to the folder that
    `resumeFrom` names, nor, with `none`, to step 0.
    """
    own = named = None
    if config.resume_from == "auto" or config.is_continued:
        own = commit.newest_verified(root, warn)
    if config.resume_from not in ("auto", "none"):
        folder = Path(config.resume_from).absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"spec.checkpoint.resumeFrom {config.resume_from} is not a folder; name the "
                "folder of one checkpoint (.../step-N), auto or none"
            )
        named = folder, commit.verify(folder)
    if own is None or named is None:
        return own or named
    return own if own[1].step > named[1].step else named
