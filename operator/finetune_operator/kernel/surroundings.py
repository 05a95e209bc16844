"""What the process in which the operator runs decides; `ftctl dev` is one that has a say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finetune_operator.backends.base import Backend


@dataclass(frozen=True)
class Surroundings:
    """Where the operator runs; by default in a process of its own, beside a cluster.

    Attributes:
        folder: What `file://./x` in a manifest is relative to.
        backends: By name, in place of those of installed packages; None for those.
    """

    folder: Path = field(default_factory=Path.cwd)
    backends: Mapping[str, Backend] | None = None
