"""Choose by memory the settings that a run leaves open, and check that the run fits.

`rank` calls it on every rank before the model is loaded; the result is the same on all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune_trainer.config import PlanReport, TrainConfig
from finetune_trainer.gpu import has_nvlink
from finetune_trainer.memory.check import check_memory
from finetune_trainer.memory.check_host import HostMemory, check_host_memory
from finetune_trainer.memory.host import free_host_memory
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.memory.unsharded import choose_unsharded
from finetune_trainer.model.families import can_be_sharded, needs_single_rows
from finetune_trainer.model.load import load_settings
from finetune_trainer.model.stored_quantization import stored_kind
from finetune_trainer.refusals import Refusals
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.choose import Choice, Hardware, choose
from finetune_trainer.sizing.fit import Gpu, Sizing
from finetune_trainer.sizing.reserve import measured_reserve
from finetune_trainer.world import World

_GIB = 2**30


@dataclass(frozen=True)
class Resolved:
    """A configuration whose settings are all chosen.

    Attributes:
        config: Configuration without `auto`.
        report: What `auto` chose; None without `auto`.
    """

    config: TrainConfig
    report: PlanReport | None


def resolve_by_memory(
    config: TrainConfig,
    world: World,
    base: BaseShape | None,
    *,
    row_tokens: int,
    refusals: Refusals,
    warn: Callable[[str], None],
    host: Callable[[], HostMemory] = HostMemory.of_node,
) -> Resolved:
    """Choose the settings in `config.auto`, and refuse what does not fit; a collective.

    Args:
        config: Configuration whose model, quantisation and packing are resolved.
        world: The ranks.
        base: Shape of the model; None unless `needs_base`.
        row_tokens: Tokens of the longest row, including padding.
        refusals: Refuses a new run, and only warns if the run has a checkpoint.
        warn: Warns the user.
        host: Measures the memory of this node.

    Raises:
        ConfigError: The step does not fit, or the model cannot be loaded.
    """
    is_gpu = world.device.type == "cuda"
    free, total = _memory(config, world)
    smallest_free = world.smallest(free)
    card = torch.cuda.get_device_capability(world.device) if is_gpu else (9, 0)
    capability = divmod(world.smallest(100 * card[0] + card[1]), 100)
    report = None
    if config.auto is not None:
        assert base is not None, "needs_base"
        usable = world.smallest(config.auto.usable_bytes or total)
        hardware = Hardware(
            Gpu(usable, capability),
            free=smallest_free + measured_reserve(config) if is_gpu else None,
            has_nvlink=is_gpu and bool(world.smallest(int(has_nvlink(world.device)))),
        )
        settings = load_settings(config.model)
        choice = choose(
            config,
            Sizing(base, row_tokens),
            hardware,
            needs_single_rows=needs_single_rows(config, settings),
            can_shard=can_be_sharded(settings) and stored_kind(settings) not in ("nf4", "int8"),
        )
        _warn_of_less(choice, hardware, warn)
        config, report = choice.config, _report(choice, usable)
    if is_gpu and config.training.check_memory:
        check_memory(
            config,
            free,
            row_tokens=row_tokens,
            base=base,
            capability=card,
            refusals=refusals,
        )
        if world.is_main:
            assert base is not None, "needs_base"
            gpu = Gpu(free + measured_reserve(config), card)
            settings = load_settings(config.model)
            check_host_memory(
                config,
                host(),
                Sizing(base, row_tokens),
                gpu,
                settings=settings,
                refusals=refusals,
            )
    resolved = choose_unsharded(config, smallest_free, base=base, capability=capability)
    return Resolved(resolved, report)


def read_base_if_needed(config: TrainConfig, world: World) -> BaseShape | None:
    """Return the shape of the model if `resolve_by_memory` needs it, else None."""
    checks = world.device.type == "cuda" and config.training.check_memory
    return read_base_of(config) if checks or config.auto is not None else None


def _memory(config: TrainConfig, world: World) -> tuple[int, int]:
    """Return the free and all bytes of this rank's device; of the host an equal share."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)
    share = free_host_memory() // config.world.nproc_per_node
    return share, share


def _report(choice: Choice, usable: int) -> PlanReport:
    strategy, training = choice.config.strategy, choice.config.training
    return PlanReport(
        strategy=strategy.type,
        replicas=strategy.replicas,
        activation_checkpointing=strategy.activation_checkpointing,
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=choice.config.gradient_accumulation_steps,
        precision=training.precision,
        peak_bytes=choice.peak_bytes,
        usable_bytes=usable,
        lower_peak_bytes=choice.lower_peak_bytes,
    )


def _warn_of_less(choice: Choice, hardware: Hardware, warn: Callable[[str], None]) -> None:
    if choice.passed_over is None or hardware.free is None:
        return
    usual, chosen = _words(choice.passed_over), _words(choice.config)
    warn(
        f"spec.strategy: auto chose {chosen}, because only {hardware.free / _GIB:.1f} of "
        f"{hardware.gpu.usable / _GIB:.1f} GiB of a GPU are free; with all of it, it would be "
        f"{usual}; end the other processes on that GPU"
    )


def _words(config: TrainConfig) -> str:
    strategy = config.strategy
    return (
        f"{strategy.type}, recomputation {strategy.activation_checkpointing}, micro-batch "
        f"{config.training.micro_batch_size}"
    )
