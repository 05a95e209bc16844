"""A plugin that `ftctl run` and `ftctl dev` may use: what it runs is the stand-in trainer."""

from pathlib import Path
from typing import ClassVar

from finetune_operator.backends import registry
from finetune_operator.backends.base import BackendContext
from finetune_operator.backends.local.backend import LocalBackend
from local_runs import STAND_IN


class ElsewhereBackend(LocalBackend):
    """Backend `elsewhere`."""

    name: ClassVar[str] = "elsewhere"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context, command=STAND_IN, cores=2)


def install(folder: Path) -> str:
    """Install it for processes with the PYTHONPATH that is returned."""
    info = folder / "site" / "elsewhere-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    points = f"[{registry.GROUP}]\nelsewhere = {__name__}:{ElsewhereBackend.__name__}\n"
    (info / "entry_points.txt").write_text(points)
    return f"{info.parent}:{Path(__file__).parent}"
