"""Generate responses to the sample prompts, so that a user sees what training changed.

Called by `rank` before and after training. Only rank 0 generates; the other ranks wait in the next
collective. Decoding is greedy, so the same weights give the same text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from finetune_trainer.config import Phase
from finetune_trainer.control import unless_stopped
from finetune_trainer.failpoints import failpoint
from finetune_trainer.generation import decode, encode, generate
from finetune_trainer.gpu import free_memory
from finetune_trainer.loop import Run
from finetune_trainer.model.quantize import move

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 48
# Share of the GPU's free memory that a copy of the model may take; the rest is for its caches.
_SHARE_OF_FREE_MEMORY = 0.8


def answer_prompts(
    run: Run, tokenizer: "PreTrainedTokenizerBase", *, when: Literal["before", "after"]
) -> None:
    """Let rank 0 answer the sample prompts, before and after training."""
    prompts = run.config.telemetry.sample_prompts
    if not prompts:
        return
    run.telemetry.phase(Phase.ANSWERING)
    failpoint("answering", run.plan.total_steps if when == "after" else 0)
    stops = run.dataset.ordered_stops
    model = run.strategy.whole_model()  # a collective, so not interruptible

    def work() -> None:
        if model is None:
            return
        device = run.world.device
        move(model, place_to_answer(model, device, partial(free_memory, device)))
        for prompt in prompts:
            run.telemetry.answered(prompt, **{when: answer(model, tokenizer, prompt, stops)})

    unless_stopped(run.agreement, run.stop, work)


def place_to_answer(
    model: nn.Module, device: torch.device, free_bytes: Callable[[], int]
) -> torch.device:
    """Return the device for generation: this rank's `device` if a copy of the model fits.

    A sharded model was gathered in host memory, where each token would take seconds.
    """
    home = next(model.parameters()).device
    if home == device:
        return home
    tensors = (*model.parameters(), *model.buffers())
    size = sum(one.numel() * one.element_size() for one in tensors)
    return device if size <= free_bytes() * _SHARE_OF_FREE_MEMORY else home


def answer(
    model: nn.Module, tokenizer: "PreTrainedTokenizerBase", prompt: str, stops: Sequence[int] = ()
) -> str:
    """Return the model's response to a user turn, or its continuation without a chat template.

    It ends at an end token of the base, or at one of `stops`, which ended the learned turns.
    The mode and the state of the model are unchanged afterwards.
    """
    inputs = encode(tokenizer, [{"role": "user", "content": prompt}])
    generated = generate(model, tokenizer, inputs, stops=stops, max_new_tokens=MAX_NEW_TOKENS)
    return decode(tokenizer, generated.tokens)
