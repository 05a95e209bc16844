"""Refuse a model that does not fit before its weights are loaded, and suggest a change that fits.

Called by `rank`, on GPUs. The capacity is a parameter, so this module runs without a GPU. A
configuration is refused only if the formula shows that it is too large. ZeRO, whose engine has its
own buffers, and models with layers of an unknown kind are not checked.
"""

from collections.abc import Iterator
from typing import Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.model_shape import ModelShape
from finetune_trainer.sizing.peak import Peak, step_peak

_GIB = 2**30


def refuse_what_does_not_fit(
    config: TrainConfig, free: int, *, row_tokens: int, base: BaseShape | None = None
) -> Peak | None:
    """Compare the peak of a step with the free memory, and return the peak if it fits.

    Args:
        config: Configuration without any `auto`.
        free: Bytes that this rank may take of its device.
        row_tokens: Tokens of the longest row, including padding.
        base: Shape of the model; read from its `config.json` by default.

    Returns:
        The peak; None if it is unknown.

    Raises:
        ConfigError: the step does not fit; the message states the peak, its largest component and
            the cheapest change that fits.
    """
    if config.strategy.type.startswith("zero"):
        return None
    shapes = _Shapes(base or read_base_of(config))
    if not shapes.of(config).order:
        return None
    peak = shapes.peak(config, row_tokens)
    if peak.nbytes <= free:
        return peak
    raise ConfigError(_refusal(config, peak, free, shapes, row_tokens))


def read_shape_of(config: TrainConfig) -> ModelShape:
    """Read the shape of the model that a configuration trains, without its weights."""
    return with_method(read_base_of(config), config)


class _Shapes:
    """Shapes of one model with several methods."""

    def __init__(self, base: BaseShape) -> None:
        self._base = base
        self._known: dict[tuple[Any, ...], ModelShape] = {}

    def of(self, config: TrainConfig) -> ModelShape:
        training = config.training
        key = (config.method.model_dump_json(), training.optimizer, training.precision)
        if key not in self._known:
            self._known[key] = with_method(self._base, config)
        return self._known[key]

    def peak(self, config: TrainConfig, row_tokens: int) -> Peak:
        tokens = config.training.micro_batch_size * row_tokens
        return step_peak(self.of(config), config, tokens=tokens)


def changes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield changes that save memory: first of speed, then of numerics, then of the method."""
    strategy, training = config.strategy, config.training
    if not training.fused_head:
        yield "spec.training.fusedHead true", _with(config, "training", fused_head=True)
    if strategy.reduce_each_micro_batch is False:
        yield (
            "spec.strategy.reduceEachMicroBatch true",
            _with(config, "strategy", reduce_each_micro_batch=True),
        )
    thrifty = config
    if strategy.activation_checkpointing == "none":
        yield (
            "spec.strategy.activationCheckpointing selective",
            _with(config, "strategy", activation_checkpointing="selective"),
        )
    size = training.micro_batch_size
    while size > 1:
        size = max(n for n in range(1, size) if training.micro_batch_size % n == 0)
        yield (
            f"spec.training.microBatchSize {size}",
            _with(config, "training", micro_batch_size=size),
        )
    also = ""
    if strategy.activation_checkpointing != "full":
        thrifty = _with(config, "strategy", activation_checkpointing="full")
        yield "spec.strategy.activationCheckpointing full", thrifty
        also = " with spec.strategy.activationCheckpointing full"
    if strategy.type == "ddp" and config.world.world_size > 1 and config.method.type != "qlora":
        yield f"spec.strategy.type fsdp{also}", _with(thrifty, "strategy", type="fsdp")
    if config.method.type == "full":
        if training.optimizer == "adamw" and training.precision == "bf16":
            name = f"spec.training.optimizer adamw8bit{also}"
            yield name, _with(thrifty, "training", optimizer="adamw8bit")
        yield f"spec.method.type lora{also}", _adapted(thrifty, "lora")
    if config.method.type != "qlora":
        yield f"spec.method.type qlora{also}", _adapted(thrifty, "qlora")


def _refusal(config: TrainConfig, peak: Peak, free: int, shapes: _Shapes, row_tokens: int) -> str:
    problem = (
        f"spec.training: a step of this model takes {_gib(peak.nbytes)} of a GPU's memory at its "
        f"peak ({peak.moment}), of which {peak.largest} take {_gib(peak.parts[peak.largest])}, and "
        f"{_gib(free)} are free"
    )
    for change, cheaper in changes(config):
        least = shapes.peak(cheaper, row_tokens).nbytes
        if least <= free:
            advice = f"the cheapest change that fits is {change} ({_gib(least)})"
            break
    else:
        advice = "no single setting makes it fit: use more or larger GPUs, or a smaller model"
    return f"{problem}; {advice}; spec.training.checkMemory false starts anyway"


def _adapted(config: TrainConfig, kind: str) -> TrainConfig:
    """Return the configuration with a frozen base and its adapters, or adapters of default size."""
    from finetune_trainer.config import LoraSettings, MethodConfig

    method = MethodConfig.model_validate(
        {
            "type": kind,
            "lora": config.method.lora or LoraSettings(),
            "quantization": "nf4" if kind == "qlora" else "none",
        }
    )
    training = config.training.model_copy(update={"optimizer": "adamw"})
    return config.model_copy(update={"method": method, "training": training})


def _with(config: TrainConfig, part: str, **values: Any) -> TrainConfig:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=values)})


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
