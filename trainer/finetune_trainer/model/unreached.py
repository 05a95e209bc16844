"""Find the weights that a text row does not reach, such as a vision tower.

`rank` calls it before the model is loaded. DDP waits for the gradients of such weights forever,
weight decay shrinks them, and adapters on them have no effect, so they are frozen.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import ModelConfig
from finetune_trainer.errors import TrainerError
from finetune_trainer.model.load import load_settings

if TYPE_CHECKING:
    pass

_MOST_NAMED = 3
# Tokens of a row. Recurrent families compute token by token here, which takes seconds per hundred.
_SHORT, _LONG = 4, 1024


def unreached_modules(
    config: ModelConfig, row_tokens: int, warn: Callable[[str], None] = warnings.warn
) -> list[str]:
    """Return the modules none of whose own weights gets a gradient from a row of text.

    A copy of the model with fake tensors computes a row, which takes neither memory nor arithmetic.
    Whether a weight is reached may depend on the length of a row: a short row shows most models to
    be reached everywhere, and for the others a long row decides. A model whose control flow depends
    on the values of tensors cannot be computed in this way (5 of 148 tested families); none of its
    modules is returned.

    Args:
        config: Names the model.
        row_tokens: Length of the longest row.
        warn: Receives a sentence if the model cannot be computed for another reason.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    found: list[str] = []
    for length in (_SHORT, max(_SHORT, min(row_tokens, _LONG))):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                reached = _reached_weights(config, length)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return []
        except TrainerError:
            raise
        except Exception as error:  # a model is a program and may raise anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            warn(f"whether text reaches all weights of the model is not known ({reason[0]})")
            return []
        by_owner: dict[str, list[bool]] = defaultdict(list)
        for name, is_reached in reached.items():
            by_owner[name.rpartition(".")[0]].append(is_reached)
        found = sorted(owner for owner, weights in by_owner.items() if not any(weights))
        if not found:
            break
    return found


def _reached_weights(config: ModelConfig, row_tokens: int) -> dict[str, bool]:
    """Return whether the loss of a row depends on each weight."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = load_settings(config)
    with no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # computes without a loop over experts
    model.train()
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ids = torch.zeros((1, row_tokens), dtype=torch.int64)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    found = torch.autograd.grad(logits.float().sum(), list(weights.values()), allow_unused=True)
    return {name: one is not None for name, one in zip(weights, found, strict=True)}


def named(modules: list[str], model: Any) -> str:
    """Return the outermost modules whose weights all belong to `modules`, for messages."""
    outer: list[str] = []
    inside = {*modules}
    for name, module in model.named_modules():
        below = (f"{name}.{parameter}" for parameter, _ in module.named_parameters())
        owners = {one.rpartition(".")[0] for one in below}
        is_part = any(name == one or name.startswith(f"{one}.") for one in outer)
        if name and owners and owners <= inside and not is_part:
            outer.append(name)
    more = len(outer) - _MOST_NAMED
    return ", ".join(outer[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
