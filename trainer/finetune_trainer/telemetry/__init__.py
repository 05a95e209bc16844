"""What a run reports while it trains: progress, logs, numbers, TensorBoard.

The loop talks to one `Telemetry`; the modules beside it are its outlets and know nothing of the
loop. `node` is a process of its own, the page of a node. No module here imports torch.
"""

from finetune_trainer.telemetry.checkpoints import CheckpointCosts
from finetune_trainer.telemetry.gpu_device import Gpu, GpuMemory
from finetune_trainer.telemetry.recorder import Telemetry
from finetune_trainer.telemetry.step import Lap, StepReport

__all__ = ["CheckpointCosts", "Gpu", "GpuMemory", "Lap", "StepReport", "Telemetry"]
