"""Recompute activations in the backward pass rather than keep them.

Called by `parallelize` before layers are compiled or sharded.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext


def recompute(base: Any, how: str) -> None:
    """Recompute activations of decoder layers in the backward pass: none, selective or full.

    Selective keeps the results of matrix products and attention, and recomputes what is cheap.
    Non-reentrant recomputation works with frozen inputs and under the hooks of DDP and FSDP2.
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
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    base.activation_checkpointing_enable(options)


def _keep_products(
    _: "SelectiveCheckpointContext", operator: Any, *__: Any, **___: Any
) -> "CheckpointPolicy":
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operator)
    is_kept = name.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.")) or "attention" in name
    is_kept = is_kept or "_varlen_attn" in name
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
