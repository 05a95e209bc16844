"""Check, before training starts, that the disk has room for the checkpoints of a run."""

import math
import shutil
from pathlib import Path

from finetune_trainer.checkpoint import commit
from finetune_trainer.errors import ConfigError

_MIB, _GIB = 2**20, 2**30


def measure(root: Path) -> tuple[int, int]:
    """Return free bytes on the disk of `root`, created if missing, and bytes of its checkpoints."""
    root.mkdir(parents=True, exist_ok=True)
    found = commit.manifests(root)
    held = sum(digest.size for _, manifest in found for digest in manifest.files.values())
    return shutil.disk_usage(root).free, held


def refuse_small_disk(root: Path, *, size: int, keep: int, free: int, held: int) -> None:
    """Refuse a disk that cannot hold `keep` checkpoints of `size` bytes and the one being written.

    Raises:
        ConfigError: the disk is too small; the message states how many more bytes must be free.
            Existing checkpoints in `root` count as room.
    """
    copies = keep + 1
    if free + held < size * copies:
        raise ConfigError(
            f"spec.checkpoint.uri {root} has {_human_size(free)} free, a checkpoint "
            f"takes {_human_size(size)} and spec.checkpoint.keep {keep} needs room "
            f"for {copies} of them; make {_human_size(size * copies - held - free)} more free or "
            "lower spec.checkpoint.keep"
        )


def _human_size(size: int) -> str:
    """Return a number of bytes in MiB or GiB, rounded up."""
    if size >= _GIB:
        return f"{math.ceil(10 * size / _GIB) / 10} GiB"
    return f"{math.ceil(size / _MIB)} MiB"
