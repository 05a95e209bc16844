"""Multiply matrices in float8 (torchao), if that leaves the loss unchanged within 1 %.

`prepare` inserts the layers before a strategy shards the model, which needs no weights. `rank`
compares the loss after sharding, so no rank has to hold the whole model for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.evaluation_mode import in_evaluation_mode
from finetune_trainer.model.layers import decoder_layers
from finetune_trainer.model.loss import CausalLoss, base_of

_TOLERANCE = 0.01  # relative to the loss without float8

Evaluate = Callable[[dict[str, Tensor]], Tensor]
"""A forward pass without gradients: `Strategy.evaluate`."""


def use_float8(module: CausalLoss, device: torch.device, *, emulate: bool = False) -> None:
    """Convert the linear layers of the decoder to float8 multiplication; weights keep their dtype.

    With `emulate` numbers are rounded to float8 but multiplied as before, for devices without
    float8.

    Raises:
        ConfigError: the device has no float8, or the layers are not found.
    """
    has_float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not (has_float8 or emulate):
        raise ConfigError("spec.training.float8 needs a GPU of Ada or Hopper; set it to false")
    if find_spec("torchao") is None:
        raise ConfigError("spec.training.float8 needs the package torchao; install it")
    torchao, base = import_module("torchao.float8"), base_of(module.model)
    layers = decoder_layers(base)
    if not layers:
        raise ConfigError(
            f"spec.training.float8 cannot find the decoder layers of {type(base).__name__}; set it "
            "to false"
        )
    for layer in layers:
        torchao.convert_to_float8_training(
            layer, config=torchao.Float8LinearConfig(emulate=emulate)
        )


def check_float8(module: CausalLoss, evaluate: Evaluate, inputs: dict[str, Tensor]) -> None:
    """Compare the loss of a batch with and without float8; a collective.

    Every rank must pass the same batch and gets the same result. The host waits for both losses.

    Raises:
        ConfigError: the losses differ by more than 1 %.
    """
    # Compiling the layers without float8 just for this would take minutes.
    with in_evaluation_mode(module.model), torch.compiler.set_stance("force_eager"):
        after = evaluate(inputs)
        with without_float8(module):
            before = evaluate(inputs)
    off = ((after - before).abs() / before.abs().clamp(min=1e-6)).item()
    if not off <= _TOLERANCE:
        raise ConfigError(
            f"spec.training.float8 changes the first batch's loss by {off:.1%}, more than "
            f"{_TOLERANCE:.0%}; set it to false"
        )


def undo_float8(model: nn.Module) -> None:
    """Restore the plain linear layers of a model that only generates and is exported."""
    float8 = set(_float8_layers(model))
    for owner in list(model.modules()):
        for name, layer in owner.named_children():
            if layer in float8:
                setattr(owner, name, _plain(layer))


def _plain(layer: nn.Module) -> nn.Linear:
    assert isinstance(layer, nn.Linear), "Float8Linear is a subclass"
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


@contextmanager
def without_float8(module: nn.Module) -> Iterator[None]:
    """Multiply without float8 in this block."""
    layers = _float8_layers(module)
    for layer in layers:
        layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _float8_layers(module: nn.Module) -> list[nn.Linear]:
    linear = import_module("torchao.float8.float8_linear").Float8Linear
    return [part for part in module.modules() if isinstance(part, linear)]
