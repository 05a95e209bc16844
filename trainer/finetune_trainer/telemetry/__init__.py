"""Reporting during a run: progress, logs, metrics, TensorBoard.

The loop reports to one `Telemetry`, which writes to the other modules. They do not depend on the
loop. `node` runs in a separate process and serves the page of a node. No module here imports torch.
"""

from finetune_trainer.telemetry.checkpoints import CheckpointCosts
from finetune_trainer.telemetry.gpu_device import Gpu, GpuMemory
from finetune_trainer.telemetry.recorder import Telemetry
from finetune_trainer.telemetry.step import Lap, StepReport

__all__ = ["CheckpointCosts", "Gpu", "GpuMemory", "Lap", "StepReport", "Telemetry"]
