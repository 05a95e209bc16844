"""Whether the disk has room for the checkpoints that a run will keep; asked before it trains."""

import math
import shutil
from pathlib import Path

from finetune_trainer.checkpoint import commit
from finetune_trainer.errors import ConfigError

_MIB, _GIB = 2**20, 2**30


def measure(root: Path) -> tuple[int, int]:
    """Return the bytes that are free where `root` is, made if it is missing, and those it holds."""
    root.mkdir(parents=True, exist_ok=True)
    found = commit.manifests(root)
    held = sum(digest.size for _, manifest in found for digest in manifest.files.values())
    return shutil.disk_usage(root).free, held


def refuse_small_disk(root: Path, *, size: int, keep: int, free: int, held: int) -> None:
    """Refuse a disk that cannot hold `keep` checkpoints of `size` bytes and the one being written.

    Raises:
        ConfigError: says how much more must be free; what `root` holds already counts as room.
    """
    copies = keep + 1
    if free + held < size * copies:
        raise ConfigError(
            f"spec.checkpoint.uri {root} has {_in_words(free)} free, a checkpoint "
            f"takes {_in_words(size)} and spec.checkpoint.keep {keep} needs room "
            f"for {copies} of them; make {_in_words(size * copies - held - free)} more free or "
            "lower spec.checkpoint.keep"
        )


def _in_words(size: int) -> str:
    """Return a number of bytes in MiB or GiB, rounded up."""
    if size >= _GIB:
        return f"{math.ceil(10 * size / _GIB) / 10} GiB"
    return f"{math.ceil(size / _MIB)} MiB"
