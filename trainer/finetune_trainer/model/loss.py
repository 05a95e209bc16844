"""Compute the loss, the summed cross-entropy of label tokens, within the wrapped forward.

Strategies wrap `CausalLoss` instead of the model, so every parameter, including the head's, is used
within the forward that the engine hooks. The sum is returned instead of the mean: the loop divides
by the label tokens of the whole optimizer step, which gives the same result for every number of
ranks and accumulation steps (transformers #34191 shows the bug that this avoids).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune_trainer.errors import ConfigError
from finetune_trainer.model.attention import as_mask, is_isolating
from finetune_trainer.model.families import takes_positions
from finetune_trainer.model.fused_head import FusedHead, fuse_head

if TYPE_CHECKING:
    from finetune_trainer.data.batch import MicroBatch


class CausalLoss(nn.Module):
    """Wrap a causal language model so that calling it returns the sum of its token losses.

    Attributes:
        gives_positions: Whether the model gets positions, which mark the start of documents. If
            not, it numbers the tokens of each row as in inference, and a row must hold a single
            document.
    """

    def __init__(self, model: nn.Module, *, fuse: bool = True) -> None:
        """Wrap the model, and fuse head and loss if possible and `fuse` is true."""
        super().__init__()
        self.model = model
        self._kept: Tensor | None = None
        self._seen: list[Tensor] | None = None
        base = base_of(model)
        self.gives_positions = takes_positions(type(base))
        if fuse:
            fuse_head(base)
        head = base.get_output_embeddings()
        if head is None:
            raise ConfigError(
                f"spec.model.source: {type(base).__name__} has no head that predicts the next "
                "token; use a causal language model"
            )
        head.register_forward_pre_hook(self._select)

    @property
    def is_fused(self) -> bool:
        """Whether the head computes the loss, so not all logits exist at the same time."""
        return isinstance(base_of(self.model).get_output_embeddings(), FusedHead)

    def forward(
        self,
        input_ids: Tensor,  # (B, T) int64
        position_ids: Tensor,  # (B, T) int64, restarting at 0 with each document
        kept: Tensor,  # (K,) int64, positions of the flattened batch that hold a target
        targets: Tensor,  # (K,) int64, the token to predict at each of them
        bounds: Tensor,  # (L, N + 1) int32, `cu_seq_lens` repeated; L is the longest document
    ) -> Tensor:
        """Return the summed loss, a scalar in at least fp32.

        The head is applied only at the K kept positions. Without labels the loss is a zero that
        still depends on every parameter, which collectives of the backward pass require.
        """
        base = base_of(self.model)
        call = {"input_ids": input_ids}
        if self.gives_positions:
            call["position_ids"] = position_ids
            if is_isolating(base):
                call["attention_mask"] = as_mask(base, bounds, position_ids)
        head = base.get_output_embeddings()
        if isinstance(head, FusedHead):
            with self._head_of(kept), head.summing(targets):
                loss: Tensor = self.model(**call, use_cache=False).logits
            return loss.sum()
        with self._head_of(kept):
            logits = self.model(**call, use_cache=False).logits[0]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(logits.to(wide), targets, reduction="sum")

    @contextmanager
    def _head_of(self, kept: Tensor) -> Iterator[None]:
        """Within the block reduce the head's input (B, T, D) to the kept positions (1, K, D)."""
        self._kept = kept
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def capture_head_inputs(self) -> Iterator[list[Tensor]]:
        """Within the block collect the inputs of the head, (1, K, D) per pass."""
        self._seen = []
        try:
            yield self._seen
        finally:
            self._seen = None

    def _select(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._kept is None:
            return None
        selected = args[0].flatten(0, 1)[self._kept][None]
        if self._seen is not None:
            self._seen.append(selected.detach())
        return (selected,)


def base_of(model: nn.Module) -> Any:
    """Return the transformers model inside a peft model, or the model itself."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def loss_inputs(batch: "MicroBatch", device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of `CausalLoss.forward`, without a host-device synchronisation."""
    tensors = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "kept": batch.label_positions,
        "targets": batch.targets.flatten()[batch.label_positions],
        "cu_seq_lens": batch.cu_seq_lens,
    }
    if device.type == "cuda":
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    # The length of the longest document is passed as a size, which is read without synchronising.
    moved["bounds"] = moved.pop("cu_seq_lens").expand(batch.max_length, -1)
    return moved


def scale_factor(label_tokens: int, world_size: int) -> float:
    """Return the factor that turns the loss sum of a micro-batch into its share of the step's mean.

    Engines average gradients over the W ranks, so with N label tokens in the optimizer step

        1/W * sum over ranks and micro-batches of (W/N * sum_i loss_i)  =  1/N * sum_i loss_i
    """
    return world_size / max(label_tokens, 1)
