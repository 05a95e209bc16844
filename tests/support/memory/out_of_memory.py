"""A rank's work in which the memory of a GPU is exhausted at step 2."""

import time
from unittest import mock

import torch

from finetune_trainer.checkpoint.start import recorded
from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.control import StopSignal
from finetune_trainer.rank import run
from finetune_trainer.telemetry import StepReport, Telemetry
from finetune_trainer.world import World


def at_step_2(
    config: TrainConfig, world: World, stop: StopSignal, telemetry: Telemetry, fence: Fence | None
) -> Termination:
    """Train until rank 0 raises the error of torch's allocator, once step 1 is saved."""
    report_step = telemetry.step

    def step(report: StepReport) -> None:
        report_step(report)
        if world.is_main and report.step == 2:
            while recorded(config.checkpoint, config.job) is None:  # saved in another thread
                time.sleep(0.01)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with mock.patch.object(telemetry, "step", step):
        return run(config, world, stop, telemetry, fence)
