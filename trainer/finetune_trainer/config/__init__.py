"""The contract the operator and the trainer share: configuration in, progress and last words out.

The operator writes `TrainConfig` as one JSON file and reads back `Progress` and `Termination`;
nothing else crosses. This package imports pydantic alone, so the operator never imports torch.
Keys are camelCase in JSON and snake_case in Python; unknown keys are refused.
"""

from finetune_trainer.config.base import (
    ContractModel,
    JobRef,
)
from finetune_trainer.config.inputs import (
    ColumnMap,
    DataConfig,
    DataFormat,
    DatasetSource,
    LongRows,
    ModelConfig,
)
from finetune_trainer.config.report import (
    CheckpointRef,
    DataReport,
    ExitCode,
    FailureClass,
    Phase,
    Progress,
    SampleAnswer,
    Termination,
)
from finetune_trainer.config.train import (
    ENV_NODE_RANK,
    ENV_RDZV_ENDPOINT,
    ENV_TERMINATION_PATH,
    CheckpointConfig,
    ControlConfig,
    EarlyStopping,
    LoraSettings,
    MethodConfig,
    OutputConfig,
    StrategyConfig,
    TelemetryConfig,
    TrainConfig,
    TrainingConfig,
    WorldConfig,
)

__all__ = [
    "ENV_NODE_RANK",
    "ENV_RDZV_ENDPOINT",
    "ENV_TERMINATION_PATH",
    "CheckpointConfig",
    "CheckpointRef",
    "ColumnMap",
    "ContractModel",
    "ControlConfig",
    "DataConfig",
    "DataFormat",
    "DataReport",
    "DatasetSource",
    "EarlyStopping",
    "ExitCode",
    "FailureClass",
    "JobRef",
    "LongRows",
    "LoraSettings",
    "MethodConfig",
    "ModelConfig",
    "OutputConfig",
    "Phase",
    "Progress",
    "SampleAnswer",
    "StrategyConfig",
    "TelemetryConfig",
    "Termination",
    "TrainConfig",
    "TrainingConfig",
    "WorldConfig",
]
