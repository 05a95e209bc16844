"""Generate text in the same way for the sample prompts of a run and for `ftctl chat`.

The modules of both call it. The same weights, messages and stop tokens give the same greedy text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_trainer.data.formats import Message
from finetune_trainer.export.end_tokens import own_end_ids, with_stops
from finetune_trainer.model.adapters import in_format_of_base
from finetune_trainer.model.evaluation_mode import in_evaluation_mode

if TYPE_CHECKING:
    from transformers import BatchEncoding, Cache, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Generated:
    """The result of a generation.

    Attributes:
        tokens: The new tokens.
        cache: Keys and values of the prompt and of the new tokens except the last.
    """

    tokens: list[int]
    cache: "Cache | None"


def encode(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]) -> "BatchEncoding":
    """Return the prompt for the turn that follows `messages`, as tensors of one row.

    Without a chat template, the prompt is the text of the last message alone.
    """
    if tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"], return_tensors="pt")
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def generate(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    inputs: "BatchEncoding",
    *,
    stops: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    streamer: Any = None,
    cache: "Cache | None" = None,
) -> Generated:
    """Generate the tokens that follow a prompt.

    Generation ends at an end token of the base or a token in `stops`. The mode and the state of the
    model are unchanged afterwards.

    Args:
        model: Model of transformers or peft.
        tokenizer: Tokenizer of the model.
        inputs: Result of `encode`.
        stops: Further end tokens.
        max_new_tokens: Largest number of generated tokens.
        temperature: Temperature of the sampling; 0 takes the most probable token.
        streamer: Receives the prompt, then each token (`BaseStreamer` of transformers).
        cache: Keys and values of the first tokens of the prompt, which are not computed again.
    """
    inputs = inputs.to(next(model.parameters()).device)
    known = {} if cache is None else {"past_key_values": cache}
    sampling: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
    if temperature:
        sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    # Each new token changes the length, for which compiled layers would be compiled again.
    stance = torch.compiler.set_stance("force_eager")
    with stance, torch.no_grad(), in_format_of_base(model), in_evaluation_mode(model):
        output = model.generate(  # type: ignore[operator]
            **inputs,
            **sampling,
            **known,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=with_stops(own_end_ids(model), stops),
            streamer=streamer,
            return_dict_in_generate=True,
        )
    tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Generated(tokens, output.past_key_values)


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> str:
    """Return the text of generated tokens, without special tokens and surrounding white space."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
