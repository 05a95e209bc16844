"""The loss: summed cross-entropy of label tokens, computed inside the wrapped module's forward.

Strategies wrap `CausalLoss` rather than the model, so that every parameter, the head's included,
is touched inside the forward that the engine hooks. The sum is returned, not the mean: the loop
divides by the label tokens of the whole optimizer step, which makes the result the same for every
number of ranks and of accumulation steps (transformers #34191 tells what happens otherwise).
"""

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from finetune_trainer.data.batch import MicroBatch

IGNORE = -100  # no token is to be predicted here


class CausalLoss(nn.Module):
    """Wrap a causal language model so that calling it returns the sum of its token losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        unwrap = getattr(model, "get_base_model", None)  # only a peft model has it
        base: nn.Module = unwrap() if unwrap is not None else model
        self._keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters

    def forward(
        self,
        input_ids: Tensor,  # (B, T) int64
        position_ids: Tensor,  # (B, T) int64, restarting at 0 with each document
        targets: Tensor,  # (B, T) int64, the token to predict at each position, or IGNORE
        kept: Tensor,  # (K,) int64, positions that hold a target in any row
    ) -> Tensor:
        """Return the summed loss, a scalar in fp32.

        No attention mask and no cache: only then does transformers isolate the documents of a
        pack by their restarting positions. The head is applied at the K kept positions alone.
        """
        extra = {"logits_to_keep": kept} if self._keeps_logits else {}
        output = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra
        )
        logits = output.logits if self._keeps_logits else output.logits[:, kept]  # (B, K, V)
        return functional.cross_entropy(
            logits.float().flatten(0, 1),
            targets[:, kept].flatten(),
            ignore_index=IGNORE,
            reduction="sum",
        )


def loss_inputs(batch: "MicroBatch", device: torch.device) -> dict[str, Tensor]:
    """Return the arguments of `CausalLoss.forward`; what needs a look is found before the move."""
    tensors = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "targets": batch.targets,
        "kept": kept_positions(batch.targets),
    }
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def kept_positions(targets: Tensor) -> Tensor:
    """Return the positions (K,) that hold a target in any row of `targets` (B, T).

    Call it on the CPU, before the batch moves: on a GPU it would wait for the device.
    """
    return (targets != IGNORE).any(dim=0).nonzero().flatten()


def scale_factor(label_tokens: int, world_size: int) -> float:
    """Return the factor that makes a micro-batch's loss sum its share of the step's mean.

    Engines average gradients over the W ranks, so with N label tokens in the optimizer step

        1/W * sum over ranks and micro-batches of (W/N * sum_i loss_i)  =  1/N * sum_i loss_i
    """
    return world_size / max(label_tokens, 1)
