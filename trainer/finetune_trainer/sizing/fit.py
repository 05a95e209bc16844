"""Decide whether a training step fits into GPU memory, and which single change would make it fit.

The start check of the trainer uses it. It needs no device: the memory is a parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from finetune_trainer.config import LoraSettings, MethodConfig, TrainConfig
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.kernels import avoids_scores
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.model_shape import ModelShape
from finetune_trainer.sizing.peak import Peak, step_peak
from finetune_trainer.sizing.reserve import reserve_bytes
from finetune_trainer.sizing.zero import stage_of

_MARGIN, _MARGIN_OF_EXPERTS = 0.05, 0.12
"""Relative errors of the formula against traces."""
_MARGIN_OF_SELECTIVE, _MARGIN_OF_ZERO = 0.16, 0.25
"""Relative errors by which the formula may exceed a trace; they only delay a refusal."""


class Verdict(StrEnum):
    """Whether a step fits."""

    FITS = "Fits"
    TIGHT = "Tight"
    """The error of the formula or the reserve decides, the layers are unknown, or it is ZeRO."""
    WOULD_NOT_FIT = "WouldNotFit"


@dataclass(frozen=True)
class Gpu:
    """Memory of one rank.

    Attributes:
        usable: Bytes for everything that the rank allocates, including its CUDA context.
        capability: NVIDIA's compute capability.
    """

    usable: int
    capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True)
class Fit:
    """Verdict about a configuration.

    Attributes:
        peak: Memory of the tensors at the peak of a step.
        change: Name of the cheapest single change that fits, or else of the first that is Tight;
            None if the configuration fits, or if no change helps.
        change_bytes: Peak after the change.
        change_verdict: Verdict after the change.
    """

    verdict: Verdict
    peak: Peak
    change: str | None = None
    change_bytes: int = 0
    change_verdict: Verdict | None = None


class Sizing:
    """A model whose configurations are compared.

    Args:
        base: Shape of the model.
        row_tokens: Tokens of the longest row, including padding.
    """

    def __init__(self, base: BaseShape, row_tokens: int) -> None:
        self._base, self.row_tokens = base, row_tokens
        self._shapes: dict[tuple[Any, ...], ModelShape] = {}

    @property
    def has_layers(self) -> bool:
        """Whether the model has a list of decoder layers."""
        return bool(self._base.order)

    def is_known(self, config: TrainConfig) -> bool:
        """Whether the formula knows all tensors of a step; a verdict can be Fits only then."""
        return self.has_layers and self.shape(config).is_known and not stage_of(config)

    def shape(self, config: TrainConfig) -> ModelShape:
        """Return the shape of the model that a configuration trains."""
        training = config.training
        kind = config.strategy.type.startswith("zero")
        key = (config.method.model_dump_json(), training.optimizer, training.precision, kind)
        if key not in self._shapes:
            self._shapes[key] = with_method(self._base, config)
        return self._shapes[key]

    def peak(self, config: TrainConfig, gpu: Gpu) -> Peak:
        """Return the peak of a step."""
        tokens = config.training.micro_batch_size * self.row_tokens
        keeps_scores = self._keeps_scores(config, gpu)
        return step_peak(self.shape(config), config, tokens=tokens, keeps_scores=keeps_scores)

    def _keeps_scores(self, config: TrainConfig, gpu: Gpu) -> bool:
        """Whether no fused attention kernel supports model, precision and GPU."""
        training = config.training
        return not avoids_scores(
            self._base.fused_attention, training.attention, training.precision, gpu.capability
        )

    def verdict(self, config: TrainConfig, gpu: Gpu) -> Verdict:
        """Return whether a step fits; at best Tight with ZeRO or unknown layers."""
        if not self.has_layers:
            return Verdict.TIGHT
        return self.verdict_of(self.peak(config, gpu), config, gpu)

    def verdict_of(self, peak: Peak, config: TrainConfig, gpu: Gpu) -> Verdict:
        """Return the verdict about a peak that is already computed."""
        shape, reserve = self.shape(config), reserve_bytes(config)
        has_experts = any(kind.experts is not None for kind in shape.kinds)
        margin = _MARGIN_OF_EXPERTS if has_experts else _MARGIN
        above = margin
        if config.strategy.activation_checkpointing == "selective":
            above = _MARGIN_OF_SELECTIVE
        if stage_of(config):
            above = _MARGIN_OF_ZERO
        if peak.nbytes * (1 - above) + reserve / 2 > gpu.usable:
            return Verdict.WOULD_NOT_FIT
        if self.is_known(config) and peak.nbytes * (1 + margin) + reserve <= gpu.usable:
            return Verdict.FITS
        return Verdict.TIGHT

    def fit(self, config: TrainConfig, gpu: Gpu, *, can_shard: bool = True) -> Fit:
        """Return the verdict about a configuration, and the cheapest change if it does not fit.

        The model has a list of decoder layers. Without `can_shard` the change is not fsdp.
        """
        peak = self.peak(config, gpu)
        verdict = self.verdict_of(peak, config, gpu)
        if verdict is Verdict.FITS:
            return Fit(verdict, peak)
        tight: Fit | None = None
        for name, changed in changes(config):
            if changed.strategy.type != config.strategy.type and not can_shard:
                continue
            least = self.peak(changed, gpu)
            after = self.verdict_of(least, changed, gpu)
            if after is Verdict.FITS:
                return Fit(verdict, peak, name, least.nbytes, after)
            if after is Verdict.TIGHT and verdict is Verdict.WOULD_NOT_FIT and tight is None:
                tight = Fit(verdict, peak, name, least.nbytes, after)
        return tight or Fit(verdict, peak)


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
        if training.optimizer == "adamw" and training.precision == "bf16" and not stage_of(config):
            name = f"spec.training.optimizer adamw8bit{also}"
            yield name, _with(thrifty, "training", optimizer="adamw8bit")
        yield f"spec.method.type lora{also}", _adapted(thrifty, "lora")
    if config.method.type != "qlora" and strategy.type != "zero3":
        yield f"spec.method.type qlora{also}", _adapted(thrifty, "qlora")


def _adapted(config: TrainConfig, kind: str) -> TrainConfig:
    """Return the configuration with a frozen base and its adapters, or adapters of default size."""
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
