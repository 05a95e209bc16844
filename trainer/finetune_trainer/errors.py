"""Errors that the trainer raises on purpose, each with the exit code of the process.

    TrainerError                      1    a failure; a restart may help
    ├── DataError                    65    the data set cannot be trained on
    ├── ConfigError                  78    the configuration cannot work; never retried
    │   ├── FolderTakenError         78    another job owns a folder that the run must write to
    │   └── OutputNotWritableError   78    a folder that the run must write to is not writable
    ├── Preempted                    75    asked to stop; a checkpoint is committed
    ├── CheckpointError               1    a save or a restore failed
    ├── LostRankError                 1    another rank is gone
    ├── ClaimLostError                1    a folder was moved or emptied during the run
    ├── OvertakenError               93    a later attempt writes here now; never retried
    ├── ExportError                  93    the trained weights cannot be exported; never retried
    ├── WorldSizeError               93    the number of ranks differs from the configuration
    └── NonFiniteLossError           93    the loss is not finite; a retry would repeat it

A message gives the problem, the value and the remedy. Only `control` turns an error into an exit
code; no other module calls `sys.exit`.
"""

from typing import ClassVar

from finetune_trainer.config import ExitCode, FailureClass


class TrainerError(Exception):
    """End this attempt; users read the message."""

    exit_code: ClassVar[ExitCode] = ExitCode.ERROR
    failure_class: ClassVar[FailureClass] = FailureClass.ERROR


class DataError(TrainerError):
    """The data set is missing, malformed or has no tokens to learn."""

    exit_code = ExitCode.DATA
    failure_class = FailureClass.DATA_ERROR


class ConfigError(TrainerError):
    """The configuration cannot work here; the same attempt would fail again."""

    exit_code = ExitCode.CONFIG
    failure_class = FailureClass.CONFIG_ERROR


class FolderTakenError(ConfigError):
    """Another job owns a folder that the run must write to; the message names that job."""


class OutputNotWritableError(ConfigError):
    """A folder that the run must write to is not writable; found before training starts."""


class Preempted(TrainerError):  # noqa: N818 - the field's own word, and not an error of the job
    """Asked to stop: every rank left at the same step after a committed checkpoint."""

    exit_code = ExitCode.PREEMPTED
    failure_class = FailureClass.PREEMPTED


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class LostRankError(TrainerError, RuntimeError):
    """Another rank is gone, and this rank is not the cause; as after an error of gloo or NCCL."""

    failure_class = FailureClass.WORKER_LOST


class ClaimLostError(TrainerError):
    """A claim has disappeared from its folder; a restart claims the folder again if it may."""


class OvertakenError(TrainerError):
    """A higher claim on one of the run's folders was found, so a later attempt has taken over."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.OVERTAKEN


class ExportError(TrainerError):
    """The trained weights, or their merge, cannot be exported; a restart would not help."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART


class WorldSizeError(TrainerError):
    """The number of ranks that an engine has connected differs from `TrainConfig`."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART


class NonFiniteLossError(TrainerError):
    """The loss of a step is not finite; a retry with the same data and seed would repeat it."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART
