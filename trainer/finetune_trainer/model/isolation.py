"""Measure which tokens a prediction depends on, with the model as it will be trained.

Called by `rank` on every rank once a strategy has wrapped the model: two passes without gradients
over a few dozen tokens. Only the result is measured, so every cause of leaks between documents is
detected, such as a mask built without positions, a state, or a cache that a wrapper enabled. The
passes run uncompiled and without float8, whose rounding alone exceeds the limits.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from finetune_trainer.config import TrainConfig
from finetune_trainer.data.batch import NO_TARGET, MicroBatch
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import NUM_EXPERTS
from finetune_trainer.model.evaluation_mode import in_evaluation_mode
from finetune_trainer.model.families import without_packing
from finetune_trainer.model.float8 import without_float8
from finetune_trainer.model.loss import CausalLoss, base_of, loss_inputs

LIMIT = 0.02  # the weakest known leak gives 0.057
# A pass of another shape rounds differently: in bf16 that gives 0.023 after 30 layers.
NARROW_LIMIT = 0.1
# Products of experts round differently with the number of their tokens, and later layers amplify
# that: differences of one ulp in bf16 give 0.009 after 24 layers and 0.018 after 94.
_EXPERT_LIMIT, _MOST = 0.005, 0.05  # times the square root of the number of layers

Evaluate = Callable[[dict[str, Tensor]], Tensor]
"""A forward pass without gradients: `Strategy.evaluate`."""

Row = tuple[list[int], ...]
"""Documents of a row, each a list of positions in a list of tokens; the last document is measured.
"""

_NEIGHBOURS, _OTHERS, _LAST = ([0, 1, 2], [3, 4]), ([1, 2, 3, 4], [5]), [5, 6, 7, 8]
_OTHER_START, _OTHER_END = [_LAST[0] + 1, *_LAST[1:]], [*_LAST[:-1], _LAST[-1] + 1]


@dataclass(frozen=True)
class Influence:
    """Changes of a document's hidden states, relative to the effect of its own first token.

    Attributes:
        neighbours: Effect of other preceding documents with other bounds; 0 without packing.
        alone: Effect of removing the preceding documents and letting the model number the tokens,
            as in inference.
        later_tokens: Effect of the last token on the tokens before it.
    """

    neighbours: float
    alone: float
    later_tokens: float

    def is_isolated(self, limits: "Limits") -> bool:
        """Whether the document is the same as alone, except for rounding."""
        return self.neighbours <= limits.other_rows and self.alone <= limits.alone


@dataclass(frozen=True)
class Limits:
    """Largest influences that rounding explains.

    Attributes:
        other_rows: Limit of `neighbours` and `later_tokens`, which compare passes of one shape.
        alone: Limit of `alone`.
    """

    other_rows: float
    alone: float

    @classmethod
    def of(cls, settings: Any, precision: str) -> "Limits":
        """Return the limits for the configuration of a decoder."""
        if precision not in ("bf16", "fp16"):
            return cls(LIMIT, LIMIT)
        if not any(getattr(settings, name, None) for name in NUM_EXPERTS):
            return cls(LIMIT, NARROW_LIMIT)
        grown = _EXPERT_LIMIT * math.sqrt(settings.num_hidden_layers)
        return cls(min(max(LIMIT, grown), _MOST), NARROW_LIMIT)


def check_isolation(
    config: TrainConfig,
    module: CausalLoss,
    evaluate: Evaluate,
    *,
    device: torch.device,
    any_rank: Callable[[bool], bool],
    warn: Callable[[str], None],
) -> TrainConfig:
    """Return the configuration, without packing if documents are not isolated.

    `any_rank` returns whether the argument is true on any rank, so all ranks decide alike.

    Raises:
        ConfigError: attention is not causal, packing is requested and documents are not isolated,
            or the model's forward does not work on token ids.
    """
    name = type(base_of(module.model)).__name__
    try:
        found = measure(module, evaluate, config, device)
    except (
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(
            f"spec.model.source {config.model.path}: {name} cannot be trained on token ids alone "
            f"({type(error).__name__}: {error}); use another family"
        ) from error
    settings = base_of(module.model).config.get_text_config()
    limits = Limits.of(settings, config.training.precision)
    if any_rank(not found.later_tokens <= limits.other_rows):
        raise ConfigError(
            f"spec.model.source {config.model.path}: the attention of {name} is not causal (later "
            f"tokens have {found.later_tokens:.0%} of the effect of the first token); use a "
            "decoder-only model"
        )
    if not any_rank(not found.is_isolated(limits)):
        return config
    module.gives_positions = False  # the model's own positions differ
    if not config.data.packing:
        return config
    fault = (
        f"in {name} documents of a pack affect each other (by "
        f"{max(found.neighbours, found.alone):.0%} of the effect of a document's own first token)"
    )
    return without_packing(config, fault, warn)


def measure(
    module: CausalLoss, evaluate: Evaluate, config: TrainConfig, device: torch.device
) -> Influence:
    """Run the passes and return the influence; model and random state are unchanged.

    If hidden states are not finite, all shares are 0, and the first step will report the reason.
    """
    rows: list[Row] = [(_LAST,), (_OTHER_START,), (_OTHER_END,)]
    if config.data.packing:
        rows = [(*_NEIGHBOURS, *row) for row in rows]
        rows.append((*_OTHERS, _LAST))
    generators = [device] if device.type == "cuda" else []

    vocabulary = base_of(module.model).config.get_text_config().vocab_size

    def states_of(*rows: Row) -> Tensor:
        return _last_documents(module, evaluate, _collate(rows, vocabulary), device)

    with (
        torch.random.fork_rng(generators),
        in_evaluation_mode(module),
        torch.compiler.set_stance("force_eager"),
        without_float8(module) if config.training.float8 else nullcontext(),
    ):
        states = states_of(*rows)
        gives_positions, module.gives_positions = module.gives_positions, False
        try:  # as in inference
            states = torch.cat([states, states_of((_LAST,))])
        finally:
            module.gives_positions = gives_positions
    own, other_start, other_end = states[:3]
    first = (other_start - own).norm()
    if not first.isfinite():
        return Influence(0.0, 0.0, 0.0)
    least = torch.finfo(first.dtype).tiny
    changes = [*(states[3:] - own).flatten(1).norm(dim=1), (other_end - own)[:-1].norm()]
    shares = torch.stack(changes) / first.clamp(min=least)
    *neighbours, alone, later_tokens = shares.tolist()  # synchronises with the device
    return Influence(max(neighbours, default=0.0), alone, later_tokens)


def _last_documents(
    module: CausalLoss, evaluate: Evaluate, batch: MicroBatch, device: torch.device
) -> Tensor:
    """Return the head's input for the last document of each row: (rows, tokens, D), fp32."""
    with module.capture_head_inputs() as seen:
        evaluate(loss_inputs(batch, device))
    if len(seen) != 1:
        raise TypeError("its head does not get hidden states exactly once per pass")
    (states,) = seen
    return states[0].float().view(-1, len(_LAST), states.shape[-1])


def _collate(rows: Sequence[Row], vocabulary: int) -> MicroBatch:
    """Return a batch, one row each, in which every token of a row's last document has a target.

    Token ids are from the middle of the vocabulary, because special tokens are at its ends.
    """
    width = max(sum(map(len, row)) for row in rows)
    ids, positions, targets = [], [], []
    for documents in rows:
        places = [place for document in documents for place in document]
        tokens = [vocabulary // 4 + 11 * place % (vocabulary // 2) for place in places]
        last, padding = len(documents[-1]), width - len(tokens)
        ids.append(functional.pad(torch.tensor(tokens, dtype=torch.long), (0, padding)))
        starts = [torch.arange(len(document)) for document in documents]
        positions.append(torch.cat([*starts, torch.arange(padding) % len(_LAST)]))
        wanted = torch.full((width,), NO_TARGET)
        wanted[len(tokens) - last : len(tokens)] = ids[-1][len(tokens) - last : len(tokens)]
        targets.append(wanted)
    count = sum(len(document) for documents in rows for document in documents)
    return MicroBatch.of(
        torch.stack(ids), torch.stack(positions), torch.stack(targets), tokens=count
    )
