"""A rank's work in which the memory of a GPU is exhausted after a checkpoint."""

from unittest import mock

import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.rank import run
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.world import World


def after_a_checkpoint(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Train until rank 0 raises the error of torch's allocator."""
    report_step = telemetry.step

    def step(report: StepReport) -> None:
        report_step(report)
        if world.is_main and telemetry.progress.checkpoint is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with mock.patch.object(telemetry, "step", step):
        return run(config, world, stop, telemetry, fence)
