"""Retain the newest committed checkpoints and the one with the lowest held-out loss.

The writer calls it after each commit; no other code deletes a committed checkpoint.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from finetune_trainer.checkpoint.commit import Lineage, delete, ledger
from finetune_trainer.config import CheckpointRef
from finetune_trainer.errors import CheckpointError
from finetune_trainer.failpoints import failpoint


def best(refs: Sequence[CheckpointRef]) -> CheckpointRef | None:
    """Return the newest checkpoint with the lowest held-out loss; None without any."""
    evaluated = [ref for ref in refs if ref.eval_loss is not None]
    return min(evaluated, key=lambda ref: (ref.eval_loss, -ref.step), default=None)


def retire(
    root: Path,
    keep: int,
    lineage: Lineage | None,
    may_delete: Callable[[], object],
    held_out: str | None = None,
) -> None:
    """Delete every checkpoint in `root` that is neither among the newest `keep` nor the best.

    `may_delete` is called before each deletion and raises if this process must exit. Losses of rows
    other than `held_out` are not compared.

    Raises:
        OSError: a folder cannot be deleted.
    """
    refs = ledger(root, lineage, held_out)
    kept = {ref.path for ref in refs[:keep]}
    winner = best(refs)
    if winner is not None:
        kept.add(winner.path)
    for ref in refs:
        if ref.path not in kept:
            may_delete()
            failpoint("retention", refs[0].step)
            with suppress(CheckpointError):  # deleted before, but still in a stale listing
                delete(Path(ref.path))
