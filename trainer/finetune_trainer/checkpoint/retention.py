"""Which committed checkpoints stay: the newest ones, and the one with the lowest held-out loss.

The store calls it after each commit; nothing else deletes a checkpoint.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from finetune_trainer.checkpoint.commit import ledger, tmp_folder
from finetune_trainer.config import CheckpointRef
from finetune_trainer.failpoints import reach


def best(refs: Sequence[CheckpointRef]) -> CheckpointRef | None:
    """Return the one with the lowest held-out loss, the newest among equals; None without any."""
    evaluated = [ref for ref in refs if ref.eval_loss is not None]
    return min(evaluated, key=lambda ref: (ref.eval_loss, -ref.step), default=None)


def retire(root: Path, keep: int) -> None:
    """Delete every checkpoint in `root` that is neither among the newest `keep` nor the best.

    Each is renamed to a leftover first, so a crash on the way leaves no half of a checkpoint.

    Raises:
        OSError: a folder cannot be deleted.
    """
    refs = ledger(root)
    kept = {ref.step for ref in refs[:keep]}
    winner = best(refs)
    if winner is not None:
        kept.add(winner.step)
    for ref in refs:
        if ref.step not in kept:
            doomed = Path(ref.path).rename(tmp_folder(root, ref.step))
            reach("retention", refs[0].step)
            shutil.rmtree(doomed)
