"""Count the parameters of a shape, and of the model that the trainer builds, alike."""

from collections import Counter
from typing import Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.quantize import (
    insert_unquantized_4bit_layers,
    quantization_config,
    stored_as,
)
from finetune_trainer.refusals import SILENT
from finetune_trainer.sizing.model_shape import ModelShape, Weight
from support.memory.memory_trace import meta_model

Parameters = Counter[tuple[int, int, int, bool]]
"""How many parameters have these elements, bytes per element, rows and are trained."""


def of_shape(shape: ModelShape) -> Parameters:
    """Count the parameters of a shape."""
    weights = [weight for kind in shape.order for weight in shape.kinds[kind].weights]
    return Counter(map(_stored, (*weights, *shape.others)))


def _stored(weight: Weight) -> tuple[int, int, int, bool]:
    if weight.bits == 4:  # two elements to a byte, one byte to a row
        return weight.count // 2, 1, weight.count // 2, weight.is_trained
    return weight.count, weight.itemsize, weight.rows, weight.is_trained


def of_model(settings: Any, config: TrainConfig) -> Parameters:
    """Count the parameters of the model that the trainer builds."""
    model = meta_model(settings, config)
    if config.method.quantization == "nf4":
        insert_unquantized_4bit_layers(model, quantization_config(config, model.dtype))
    found: Parameters = Counter()
    for parameter in choose_trained(model, config, SILENT).parameters():
        shape, dtype = stored_as(parameter)
        rows = shape[0] if len(shape) > 0 else 1
        found[shape.numel(), dtype.itemsize, rows, parameter.requires_grad] += 1
    return found
