"""Distribute one model over the ranks; only one module here imports each engine."""

from collections.abc import Mapping

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.strategies.base import Strategy
from finetune_trainer.world import World


def create(config: TrainConfig, world: World) -> Strategy:
    """Return the strategy that `config` selects; this imports the engine.

    Raises:
        ConfigError: the engine or the device does not support the configuration.
    """
    refuse_unsupported(config)
    if config.strategy.type == "ddp":
        from finetune_trainer.strategies.ddp import DdpStrategy

        return DdpStrategy(config, world)
    if config.strategy.type == "fsdp":
        from finetune_trainer.strategies.fsdp import FsdpStrategy

        return FsdpStrategy(config, world)

    from finetune_trainer.strategies.zero import ZeroStrategy

    return ZeroStrategy(config, world)


def refuse_unsupported(config: TrainConfig) -> None:
    """Refuse settings that the device or the installed packages do not support, except `auto`.

    Raises:
        ConfigError: Names the setting to change.
    """
    undecided = () if config.auto is None else config.auto.settings
    if "precision" not in undecided:
        _refuse_unsupported_bf16(config)
    if "strategy" in undecided or config.strategy.type == "ddp":
        return
    if config.strategy.type == "fsdp":
        from finetune_trainer.strategies import fsdp

        fsdp.refuse_unsupported(config)
    else:
        from finetune_trainer.strategies import zero

        zero.refuse_unsupported(config)


def single_process_warning(config: TrainConfig) -> str | None:
    """Return a warning if a sharded run continues with a single process; otherwise None."""
    if config.strategy.type == "ddp" or config.world.world_size > 1:
        return None
    return (
        f"spec.strategy.type {config.strategy.type} continues with one process, which has the "
        "whole model, its gradients and the optimizer state"
    )


def emulation_warning(config: TrainConfig, features: Mapping[str, bool]) -> str | None:
    """Return a warning for a CPU that emulates bf16, which takes many times as long.

    Args:
        config: Selects precision and device.
        features: Features of the CPU from `torch.cpu.get_capabilities`; empty unless x86.
    """
    if config.training.precision != "bf16" or config.world.device != "cpu":
        return None
    if not features.get("avx2") or features.get("avx512_bf16") or features.get("amx_bf16"):
        return None
    return (
        "spec.training.precision bf16: this CPU has no bf16 arithmetic and is many times slower "
        "with it; fp32, which auto chooses on a CPU, is faster"
    )


def _refuse_unsupported_bf16(config: TrainConfig) -> None:
    if config.training.precision != "bf16" or config.world.device != "cuda":
        return
    import torch

    if torch.cuda.get_device_capability() < (8, 0):
        raise ConfigError(
            f"spec.training.precision bf16: {torch.cuda.get_device_name()} has no bf16 "
            "arithmetic; use fp16"
        )
