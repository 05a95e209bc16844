"""The interface of a tracker, and the facts about the run that it gets."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from finetune_trainer.config import TrackerConfig, TrainConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.launch.journal_points import Point

STEP = "train/global_step"
"""Name of the step in trackers whose own step may not decrease."""

PREFIXES = {"wandb": "WANDB_", "mlflow": "MLFLOW_"}
"""Prefix of the variables that each tracker reads."""

Scalar = str | int | float | bool


class End(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


def seconds_for_the_end(word: str) -> float:
    """Return the time for the last points after an attempt that ended so.

    A finished job has time. In all other cases the time of the main process after its ranks is
    short, and a later attempt sends its points to the same run.
    """
    return 20.0 if word == End.DONE else 5.0


class NotAvailableError(TrainerError):
    """The tracker cannot be used by this process; a retry would not help."""


class RefusedPointsError(TrainerError):
    """The tracker refuses some points; a retry would not help."""


class Tracker(Protocol):
    """A run in a tracker; each method may block and raise any exception."""

    @property
    def url(self) -> str | None:
        """Page of the run for people."""

    def log(self, points: Sequence[Point]) -> None:
        """Add points to the curves.

        Raises:
            RefusedPointsError: The points are refused, and others may be accepted.
        """

    def finish(self, end: End) -> None:
        """Send the rest, and mark the run as ended. A later attempt opens it again."""


@dataclass(frozen=True)
class RunFacts:
    """The run as trackers show it.

    Attributes:
        id: Identity that all attempts of the job share; letters, digits, hyphens and underscores.
        name: Name of the job.
        namespace: Namespace of the job.
        settings: Settings of the training by name.
        run_dir: Run directory of the job.
        scratch: Folder that is deleted with the process.
    """

    id: str
    name: str
    namespace: str
    settings: Mapping[str, Scalar]
    run_dir: Path
    scratch: Path

    @classmethod
    def of(cls, config: TrainConfig, scratch: Path) -> "RunFacts":
        """Return the facts about the run that `config` describes."""
        job = config.job
        return cls(
            id=re.sub("[^A-Za-z0-9_-]", "-", job.identity),
            name=job.name,
            namespace=job.namespace,
            settings=dict(_settings(config)),
            run_dir=Path(config.run_dir),
            scratch=scratch,
        )


def credentials_of(tracker: TrackerConfig) -> str:
    """Return the content of the file with the credentials; empty without a file.

    Raises:
        NotAvailableError: The file cannot be read.
    """
    if tracker.credentials_path is None:
        return ""
    try:
        return Path(tracker.credentials_path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotAvailableError(
            "the key that secretRef names cannot be read; create the Secret with that key in the "
            "namespace of the job"
        ) from error


def _settings(config: TrainConfig) -> Iterator[tuple[str, Scalar]]:
    """Yield the settings that distinguish runs; they are the same for all attempts of a job."""
    data, method, training = config.data, config.method, config.training
    yield "model", config.model.base_name or config.model.path
    yield "dataset", data.train.path
    yield "format", data.format.value
    yield "max_seq_len", data.max_seq_len
    yield "method", method.type
    named: dict[str, Any] = {
        "quantization": method.quantization,
        "lora_r": method.lora.r if method.lora else None,
        "lora_alpha": method.lora.alpha if method.lora else None,
        "strategy": config.strategy.type,
        "global_batch_size": training.global_batch_size,
        "epochs": training.epochs,
        "max_steps": training.max_steps,
        "learning_rate": training.learning_rate,
        "schedule": training.schedule,
        "warmup": training.warmup,
        "weight_decay": training.weight_decay,
        "optimizer": training.optimizer,
        "precision": training.precision,
        "seed": training.seed,
    }
    open_ = config.auto.settings if config.auto is not None else ()
    for name, value in named.items():
        if value is not None and name not in open_:  # not chosen yet
            yield name, value
