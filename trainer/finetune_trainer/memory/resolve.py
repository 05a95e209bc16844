"""Choose by memory the settings that a run leaves open, and check that the run fits.

`rank` calls it on every rank before the model is loaded; the result is the same on all ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from finetune_trainer.config import PlanReport, TrainConfig
from finetune_trainer.gpu import has_nvlink
from finetune_trainer.memory.check import check_memory
from finetune_trainer.memory.check_host import (
    HostMemory,
    can_load,
    check_host_memory,
)
from finetune_trainer.memory.host import free_host_memory
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.memory.unsharded import choose_unsharded
from finetune_trainer.model.families import can_be_sharded, needs_single_rows
from finetune_trainer.model.load import load_settings
from finetune_trainer.model.stored_quantization import stored_kind
from finetune_trainer.refusals import Refusals
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.choose import Choice, Hardware, choose, with_precision
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
        base: Result of `read_base_if_needed`.
        row_tokens: Tokens of the longest row, including padding.
        refusals: Refuses a new run, and only warns if the run has a checkpoint.
        warn: Warns the user.
        host: Measures the memory of this node.

    Raises:
        ConfigError: The step does not fit, or the model cannot be loaded.
    """
    is_gpu = world.device.type == "cuda"
    node = host() if is_gpu and config.training.check_memory else None
    ranks = _measure(config, world, node)
    report, is_loadable = None, True
    if config.auto is not None:
        assert base is not None, "read_base_if_needed has read it"
        is_loadable = _is_loadable(config, base, ranks)
        sizing = Sizing(base, row_tokens)
        choice = _choose(config, sizing, ranks, is_gpu=is_gpu, is_loadable=is_loadable)
        _warn_of_less(choice, ranks, warn)
        config, report = choice.config, _report(choice, ranks.usable)
    if node is not None:
        check_memory(
            config,
            ranks.own_free,
            row_tokens=row_tokens,
            base=base,
            capability=ranks.own_capability,
            can_shard=is_loadable,
            refusals=refusals,
        )
    if node is not None and world.is_main:
        assert base is not None, "read_base_if_needed has read it"
        gpu = Gpu(ranks.own_free + measured_reserve(config), ranks.own_capability)
        settings = load_settings(config.model)
        sizing = Sizing(base, row_tokens)
        check_host_memory(config, node, sizing, gpu, settings=settings, refusals=refusals)
    return Resolved(
        choose_unsharded(config, ranks.free, base=base, capability=ranks.capability), report
    )


@dataclass(frozen=True)
class _Ranks:
    """Memory of this rank, and the least of all ranks.

    Attributes:
        own_free: Free bytes of this rank's device.
        own_capability: Compute capability of this rank's device.
        free: Free bytes of the device that has the least.
        usable: Bytes of the smallest device, or the least `usable_bytes` of `config.auto`.
        capability: Lowest compute capability of the devices.
        has_nvlink: Whether NVLink connects the GPUs of every node.
        host: Bytes of the node of rank 0; all that 63 bits hold if memory is not checked.
    """

    own_free: int
    own_capability: tuple[int, int]
    free: int
    usable: int
    capability: tuple[int, int]
    has_nvlink: bool
    host: int


def _measure(config: TrainConfig, world: World, node: HostMemory | None) -> _Ranks:
    """Measure the memory of all ranks, in one collective.

    `node` is the memory of this rank's node; None without the check of memory.
    """
    is_gpu = world.device.type == "cuda"
    own_free, total = _memory(config, world)
    usable = (config.auto.usable_bytes if config.auto is not None else None) or total
    own = torch.cuda.get_device_capability(world.device) if is_gpu else (9, 0)
    links = is_gpu and config.auto is not None and has_nvlink(world.device)
    host = node.total if node is not None and world.is_main else sys.maxsize
    values = [own_free, usable, 100 * own[0] + own[1], int(links), host]
    free, usable, capability, nvlink, host = world.smallest(values)
    return _Ranks(own_free, own, free, usable, divmod(capability, 100), bool(nvlink), host)


def _is_loadable(config: TrainConfig, base: BaseShape, ranks: _Ranks) -> bool:
    """Return whether the node of rank 0 may have the memory to load a model that is sharded."""
    precise = with_precision(config, Gpu(ranks.usable, ranks.capability))
    return can_load(precise, ranks.host, base, load_settings(config.model))


def _choose(
    config: TrainConfig, sizing: Sizing, ranks: _Ranks, *, is_gpu: bool, is_loadable: bool
) -> Choice:
    settings = load_settings(config.model)
    is_stored = stored_kind(settings) in ("nf4", "int8")
    return choose(
        config,
        sizing,
        Hardware(
            Gpu(ranks.usable, ranks.capability),
            free=ranks.free + measured_reserve(config) if is_gpu else None,
            has_nvlink=ranks.has_nvlink,
        ),
        needs_single_rows=needs_single_rows(config, settings),
        can_shard=is_loadable and can_be_sharded(settings) and not is_stored,
    )


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


def _warn_of_less(choice: Choice, ranks: _Ranks, warn: Callable[[str], None]) -> None:
    if choice.passed_over is None:
        return
    usual, chosen = _words(choice.passed_over), _words(choice.config)
    free = ranks.free + measured_reserve(choice.config)
    warn(
        f"spec.strategy: auto chose {chosen}, because only {free / _GIB:.1f} of "
        f"{ranks.usable / _GIB:.1f} GiB of a GPU are free; with all of it, it would be "
        f"{usual}; end the other processes on that GPU"
    )


def _words(config: TrainConfig) -> str:
    strategy = config.strategy
    return (
        f"{strategy.type}, recomputation {strategy.activation_checkpointing}, micro-batch "
        f"{config.training.micro_batch_size}"
    )
