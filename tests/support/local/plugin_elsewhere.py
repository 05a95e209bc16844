"""Plugins that `ftctl run` and `ftctl dev` may use: what they run is the stand-in trainer."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from finetune_operator.backends import registry
from finetune_operator.backends.base import AttemptRef, BackendContext, Limits, Observation
from finetune_operator.backends.local.backend import LocalBackend
from finetune_operator.errors import TransientError
from support.local.local_runs import STAND_IN


class ElsewhereBackend(LocalBackend):
    """Backend `elsewhere`."""

    name: ClassVar[str] = "elsewhere"

    def __init__(self, context: BackendContext) -> None:
        super().__init__(replace(context, cluster=None), command=STAND_IN, cores=2)


class ServiceBackend(ElsewhereBackend):
    """Backend `service`: as if its processes did not run on this machine.

    While there is a file `silent` beside the manifest it does not answer, and while there is one
    `deaf` it accepts each cancel and does nothing.
    """

    name: ClassVar[str] = "service"
    runs_on_this_machine: ClassVar[bool] = False
    limits: ClassVar[Limits] = Limits(unconfirmed_cancel=20.0)

    async def observe(self, ref: AttemptRef) -> Observation:
        self._refuse_while_silent()
        return await super().observe(ref)

    async def cancel(self, ref: AttemptRef, until: datetime) -> bool:
        self._refuse_while_silent()
        if (self._context.manifest_dir / "deaf").exists():
            return True
        return await super().cancel(ref, until)

    def _refuse_while_silent(self) -> None:
        if (self._context.manifest_dir / "silent").exists():
            raise TransientError("the service does not answer")


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
    return f"{info.parent}:{Path(__file__).parents[2]}"
