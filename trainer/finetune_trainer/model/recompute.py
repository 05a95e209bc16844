"""Recompute activations in the backward pass instead of storing them.

Called by `parallelize` before layers are compiled or sharded. The results that `selective` stores
depend on the frozen parameters: the backward pass of a product with a frozen weight needs only that
weight, so only the result of the product has to be stored.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.kept_results import keep_attention, keep_product, two_passes
from finetune_trainer.model.layers import decoder_layers

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.")
_ATTENTIONS = ("attention", "_varlen_attn")


def recompute(base: Any, how: str) -> None:
    """Recompute activations of decoder layers in the backward pass: none, selective or full.

    Selective stores the results of attention and of matrix products, and recomputes cheap
    operations, including products with adapters. Products with a trained weight are stored only in
    compiled layers: only a graph can store a result without the operands that autograd saves.
    Non-reentrant recomputation works with frozen inputs and under the hooks of DDP and FSDP2.

    Raises:
        ConfigError: the model does not support recomputation.
    """
    if how == "none":
        return
    if not base.supports_gradient_checkpointing:
        raise ConfigError(
            f"spec.strategy.activationCheckpointing {how} is not possible with "
            f"{type(base).__name__}; use none"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        layers = decoder_layers(base) or [base]
        parts = [part for layer in layers for part in layer.modules()]
        frozen = [part for part in parts if _is_frozen_product(part)]
        keep_attention(base)
        for part in frozen:
            keep_product(part)
        widest_adapter = _widest_adapter(layers) if frozen else 0
        options["context_fn"] = partial(_passes, widest_adapter)
    # The second is the name in transformers 5.17. The first calls the model's own method, if it has
    # one.
    enable = getattr(base, "activation_checkpointing_enable", None)
    (enable or base.gradient_checkpointing_enable)(options)


def _passes(widest_adapter: int) -> tuple[Any, Any]:
    """Return the contexts of a layer's two passes.

    For a compiled layer a dispatch mode marks the stored results once, when the graph is traced.
    Uncompiled it would run in each pass.
    """
    if not torch.compiler.is_compiling():
        return two_passes()
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    policy = partial(_keep_products, widest_adapter)
    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


def _is_frozen_product(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not any(
        parameter.requires_grad for parameter in module.parameters()
    )


def _widest_adapter(layers: Sequence[nn.Module]) -> int:
    """Return the largest rank of a trained matrix.

    A product with an adapter is cheap, and its result as large as that of the base weight.
    """
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad and p.ndim == 2]
    return max((min(parameter.shape) for parameter in trained), default=0)


def _keep_products(
    widest_adapter: int,
    _: "SelectiveCheckpointContext",
    operator: Any,
    *operands: Any,
    **__: Any,
) -> "CheckpointPolicy":
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operator)
    is_kept = any(part in name for part in _ATTENTIONS)
    if name.startswith(_PRODUCTS):
        weight = next(part for part in reversed(operands) if isinstance(part, torch.Tensor))
        is_kept = min(weight.shape[-2:]) > widest_adapter
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
