"""Plugins that `ftctl run` and `ftctl dev` may use: what they run is the stand-in trainer."""

from dataclasses import replace
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
        super().__init__(replace(context, cluster=None), command=STAND_IN, cores=2)


class ServiceBackend(ElsewhereBackend):
    """Backend `service`: as if its processes did not run on this machine."""

    name: ClassVar[str] = "service"
    runs_on_this_machine: ClassVar[bool] = False


def install(folder: Path) -> str:
    """Install them for processes with the PYTHONPATH that is returned."""
    info = folder / "site" / "elsewhere-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    points = [f"[{registry.GROUP}]"]
    points += [
        f"{one.name} = {__name__}:{one.__name__}" for one in (ElsewhereBackend, ServiceBackend)
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    return f"{info.parent}:{Path(__file__).parent}"
