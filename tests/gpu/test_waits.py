"""On a GPU the host waits in no phase of a step: CUDA itself says where it does.

What a CPU can show of it is in tests/unit/telemetry/test_17_no_sync.py.
"""

from pathlib import Path

import pytest
import torch

from finetune_trainer.claims.fence import Fence
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.config.metrics import TimedPhase
from finetune_trainer.control import StopSignal
from finetune_trainer.rank import run
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.world import World
from support.launch.device_runs import Device, device_config, needs_cuda, train

pytestmark = pytest.mark.gpu
_COMPUTING = {
    TimedPhase.H2D,
    TimedPhase.FORWARD,
    TimedPhase.BACKWARD,
    TimedPhase.OPTIMIZER,
    TimedPhase.COMM_EXPOSED,
}
_FIRST_STEPS = 3  # in which kernels are chosen and the optimizer's state is made


def without_waits(
    config: TrainConfig, world: World, telemetry: Telemetry, fence: Fence
) -> Termination:
    """Train, with an error at each wait in the phases that compute, after the first steps."""
    enter, steps = telemetry.phases.enter, 0

    def watched(phase: TimedPhase) -> TimedPhase:
        nonlocal steps
        steps += phase is TimedPhase.LOGGING
        is_strict = phase in _COMPUTING and steps >= _FIRST_STEPS
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        return enter(phase)

    telemetry.phases.enter = watched  # type: ignore[method-assign]
    try:
        return run(config, world, StopSignal(), telemetry, fence)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_no_phase_of_a_step_waits_for_the_gpu(
    method: str, precision: str, inputs: Path, device: Device, tmp_path: Path
) -> None:
    needs_cuda(device, "only CUDA tells of its waits")
    config = device_config(
        inputs,
        tmp_path / "job",
        device,
        method={"type": method, **({"lora": {"r": 8}} if method == "lora" else {})},
        data={"eval": {"path": str(inputs / "eval.jsonl")}},
        training={
            "precision": precision,
            "micro_batch_size": 2,  # of 4, so that gradients are accumulated
            "max_grad_norm": 1.0,
            "eval_every_steps": 4,
        },
    )
    made = train(config, without_waits)
    assert len(made.losses) == 10


def test_a_planted_wait_is_seen(device: Device) -> None:
    needs_cuda(device, "only CUDA tells of its waits")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(3, device=device).sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
