"""Every error the trainer raises on purpose, and the exit code each one ends the process with.

    TrainerError                      1    something failed; a restart may help
    ├── DataError                    65    the data set cannot be trained on
    ├── ConfigError                  78    the configuration cannot work; never retried
    │   ├── FolderTakenError         78    another job has a folder the run must write into
    │   └── OutputNotWritableError   78    a folder the run must write into is not writable
    ├── Preempted                    75    asked to stop; a checkpoint is committed
    ├── CheckpointError               1    a save or a restore failed
    ├── LostRankError                 1    another rank is gone
    ├── ClaimLostError                1    a folder was moved or emptied under the run
    ├── OvertakenError               93    a later attempt writes here now; never retried
    ├── ExportError                  93    the trained weights cannot be exported; never retried
    ├── WorldSizeError               93    the ranks that came up are not the ranks asked for
    └── NonFiniteLossError           93    the loss is not a number, and would be again

The message says what is wrong, with the value, and what to do. Only `control` turns an error into
an exit code; nothing else calls `sys.exit`.
"""

from typing import ClassVar

from finetune_trainer.config import ExitCode, FailureClass


class TrainerError(Exception):
    """Stop this attempt; the message is the sentence a user reads."""

    exit_code: ClassVar[ExitCode] = ExitCode.ERROR
    failure_class: ClassVar[FailureClass] = FailureClass.ERROR


class DataError(TrainerError):
    """The data set is missing, malformed or has nothing to learn from."""

    exit_code = ExitCode.DATA
    failure_class = FailureClass.DATA_ERROR


class ConfigError(TrainerError):
    """The configuration cannot work here; the same attempt would fail again."""

    exit_code = ExitCode.CONFIG
    failure_class = FailureClass.CONFIG_ERROR


class FolderTakenError(ConfigError):
    """Another job has a folder that the run must write into; the message names that job."""


class OutputNotWritableError(ConfigError):
    """A folder that the run must write into cannot be written; found before training starts."""


class Preempted(TrainerError):  # noqa: N818 - the field's own word, and no fault of the job
    """Asked to stop: every rank left at the same step after a committed checkpoint."""

    exit_code = ExitCode.PREEMPTED
    failure_class = FailureClass.PREEMPTED


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read back."""


class LostRankError(TrainerError, RuntimeError):
    """Another rank, to which this one is not to blame, is gone; like what gloo and NCCL raise."""

    failure_class = FailureClass.WORKER_LOST


class ClaimLostError(TrainerError):
    """A claim is not in its folder any more; a restart claims the folder again, if it may."""


class OvertakenError(TrainerError):
    """A higher claim on one of the run's folders was found; what this run knows is outdated."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.OVERTAKEN


class ExportError(TrainerError):
    """The trained weights, or their merge, cannot be exported, and could not after a restart."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART


class WorldSizeError(TrainerError):
    """The engine built another world than `TrainConfig` states; training would be wrong."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART


class NonFiniteLossError(TrainerError):
    """The loss of a step is not a number; the same data and seed would lead there again."""

    exit_code = ExitCode.DO_NOT_RESTART
    failure_class = FailureClass.DO_NOT_RESTART
