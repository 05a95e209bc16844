"""Contract between operator and trainer: configuration in, progress and termination out.

The operator writes `TrainConfig` as one JSON file, or packs it into one environment variable, and
reads `Progress` and `Termination`; on Azure ML both sides also use the tags of the run. `ftctl
chat` writes `ChatConfig`. There is no other exchange. This package imports only pydantic, so the
operator never imports torch. Keys are camelCase in JSON and snake_case in Python; unknown keys are
refused.
"""

from finetune_trainer.config.chat import ChatConfig as ChatConfig
from finetune_trainer.config.contract_model import ContractModel as ContractModel
from finetune_trainer.config.contract_model import JobRef as JobRef
from finetune_trainer.config.contract_model import PathBelow as PathBelow
from finetune_trainer.config.contract_model import is_below as is_below
from finetune_trainer.config.inputs import COMPRESSIONS as COMPRESSIONS
from finetune_trainer.config.inputs import DATA_SUFFIXES as DATA_SUFFIXES
from finetune_trainer.config.inputs import ColumnMap as ColumnMap
from finetune_trainer.config.inputs import DataConfig as DataConfig
from finetune_trainer.config.inputs import DataFormat as DataFormat
from finetune_trainer.config.inputs import DatasetSource as DatasetSource
from finetune_trainer.config.inputs import LongRows as LongRows
from finetune_trainer.config.inputs import ModelConfig as ModelConfig
from finetune_trainer.config.inputs import data_suffix as data_suffix
from finetune_trainer.config.inputs import is_data_file as is_data_file
from finetune_trainer.config.inspection import PERCENT as PERCENT
from finetune_trainer.config.inspection import Inspection as Inspection
from finetune_trainer.config.inspection import InspectionRequest as InspectionRequest
from finetune_trainer.config.inspection import RowLengths as RowLengths
from finetune_trainer.config.packed import ENV_TRAIN_CONFIG as ENV_TRAIN_CONFIG
from finetune_trainer.config.packed import pack as pack
from finetune_trainer.config.packed import unpack as unpack
from finetune_trainer.config.redaction import redact as redact
from finetune_trainer.config.report import MAX_SUSPECTS as MAX_SUSPECTS
from finetune_trainer.config.report import SPENT_AS as SPENT_AS
from finetune_trainer.config.report import SUSPECTS_FILE as SUSPECTS_FILE
from finetune_trainer.config.report import CheckpointRef as CheckpointRef
from finetune_trainer.config.report import DataReport as DataReport
from finetune_trainer.config.report import ExitCode as ExitCode
from finetune_trainer.config.report import FailureClass as FailureClass
from finetune_trainer.config.report import Phase as Phase
from finetune_trainer.config.report import PlanReport as PlanReport
from finetune_trainer.config.report import ProfileReport as ProfileReport
from finetune_trainer.config.report import Progress as Progress
from finetune_trainer.config.report import SampleAnswer as SampleAnswer
from finetune_trainer.config.report import Suspect as Suspect
from finetune_trainer.config.report import SuspectCause as SuspectCause
from finetune_trainer.config.report import Suspects as Suspects
from finetune_trainer.config.report import Termination as Termination
from finetune_trainer.config.report import TimeSpent as TimeSpent
from finetune_trainer.config.report import TrackerRun as TrackerRun
from finetune_trainer.config.report import read_progress as read_progress
from finetune_trainer.config.run_tags import HEARD_TAG as HEARD_TAG
from finetune_trainer.config.run_tags import MAX_TAG_LENGTH as MAX_TAG_LENGTH
from finetune_trainer.config.run_tags import PROGRESS_TAG as PROGRESS_TAG
from finetune_trainer.config.run_tags import STOP_TAG as STOP_TAG
from finetune_trainer.config.run_tags import Heard as Heard
from finetune_trainer.config.run_tags import StopRequest as StopRequest
from finetune_trainer.config.train import ENV_NODE_NAME as ENV_NODE_NAME
from finetune_trainer.config.train import ENV_NODE_RANK as ENV_NODE_RANK
from finetune_trainer.config.train import ENV_RDZV_ENDPOINT as ENV_RDZV_ENDPOINT
from finetune_trainer.config.train import ENV_RDZV_KEY as ENV_RDZV_KEY
from finetune_trainer.config.train import ENV_TERMINATION_PATH as ENV_TERMINATION_PATH
from finetune_trainer.config.train import ENV_VOLUMES as ENV_VOLUMES
from finetune_trainer.config.train import MAX_PROFILED_STEPS as MAX_PROFILED_STEPS
from finetune_trainer.config.train import AutoConfig as AutoConfig
from finetune_trainer.config.train import CheckpointConfig as CheckpointConfig
from finetune_trainer.config.train import ControlConfig as ControlConfig
from finetune_trainer.config.train import OutputConfig as OutputConfig
from finetune_trainer.config.train import ProfileConfig as ProfileConfig
from finetune_trainer.config.train import StrategyConfig as StrategyConfig
from finetune_trainer.config.train import TelemetryConfig as TelemetryConfig
from finetune_trainer.config.train import TrackerConfig as TrackerConfig
from finetune_trainer.config.train import TrainConfig as TrainConfig
from finetune_trainer.config.train import WorldConfig as WorldConfig
from finetune_trainer.config.training import FEW_STEPS as FEW_STEPS
from finetune_trainer.config.training import EarlyStopping as EarlyStopping
from finetune_trainer.config.training import LoraSettings as LoraSettings
from finetune_trainer.config.training import MethodConfig as MethodConfig
from finetune_trainer.config.training import TrainingConfig as TrainingConfig
