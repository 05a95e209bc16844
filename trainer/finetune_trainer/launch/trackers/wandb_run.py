"""A run in Weights & Biases, by the library `wandb`, which sends in a process of its own.

W&B drops points whose step is lower than the last, as after a resume. The step is therefore a
value, `train/global_step`, and W&B's own step only counts the points. Everything that the library
collects besides the curves is turned off: console, packages, code, system metrics.
"""

import os
from collections.abc import Sequence
from typing import Any

from finetune_trainer.config import TrackerConfig
from finetune_trainer.launch.journal_points import Point
from finetune_trainer.launch.trackers.tracker import (
    STEP,
    End,
    NotAvailableError,
    RunFacts,
    credentials_of,
)

_INIT_SECONDS = 60.0


class WandbRun:
    """The run with the id of the job, which a later attempt resumes."""

    def __init__(self, tracker: TrackerConfig, facts: RunFacts) -> None:
        """Open or resume the run.

        Raises:
            NotAvailableError: The library is not installed, or the API key cannot be read.
            Exception: Any error of the library.
        """
        settings: dict[str, Any] = {
            "console": "off",
            "disable_code": True,
            "disable_git": True,
            "init_timeout": _INIT_SECONDS,
            "root_dir": os.environ.get("WANDB_DIR") or str(facts.run_dir),
            "silent": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_save_requirements": False,
        }
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        if tracker.url is not None:
            settings |= {"base_url": tracker.url, "api_key": credentials_of(tracker) or None}
            for name in ("CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
                os.environ[f"WANDB_{name}"] = str(facts.scratch)
        try:
            import wandb
        except ImportError as error:
            raise NotAvailableError(
                f"wandb cannot be imported ({error}); install finetune-operator[trainer,wandb]"
            ) from error
        self._run = wandb.init(
            entity=tracker.entity,
            project=tracker.project,
            id=facts.id,
            name=facts.name,
            resume="allow",
            config=dict(facts.settings),
            settings=wandb.Settings(**settings),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @property
    def url(self) -> str | None:
        """Page of the run; None offline."""
        return None if self._run.offline else self._run.url

    def log(self, points: Sequence[Point]) -> None:
        """Hand the points to the library's process."""
        for point in points:
            self._run.log({**point.values, STEP: point.step, "_timestamp": point.time})

    def finish(self, end: End) -> None:
        """Wait until the library has sent everything."""
        if end is End.STOPPED:
            self._run.mark_preempting()  # W&B then shows the run as preempted, not as crashed
        self._run.finish(exit_code=0 if end is End.DONE else 1)
