"""Choose the tokens at which the exported model ends a response.

`beside` writes them into the exported files, and sample responses stop at them. The end tokens of
the base, which the learned turns may never contain, are completed by the ends of these turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from finetune_trainer.export.model_card import Kind

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

Ids = int | list[int] | None


@dataclass(frozen=True)
class EndTokens:
    """The end tokens of an export.

    Attributes:
        ids: End tokens of the base and of the learned turns, as `eos_token_id` of generation.
        token: End token of the exported tokenizer.
        is_replaced: Whether `token` differs from the end token of the base's tokenizer.
        is_bound: Whether the chat template writes the tokenizer's own end token, so that it stays
            although no learned turn ends with it.
        learned: Ends of learned turns at which the base does not stop.
    """

    ids: Ids = None
    token: str | None = None
    is_replaced: bool = False
    is_bound: bool = False
    learned: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, model: "nn.Module", tokenizer: "PreTrainedTokenizerBase", stops: Sequence[int]
    ) -> Self:
        """Combine the end tokens of the base with `stops`, the most frequent one first."""
        own = own_end_ids(model)
        known = own if isinstance(own, list) else [own]
        learned = [stop for stop in stops if stop not in known]
        differs = bool(stops) and tokenizer.eos_token_id not in stops
        is_bound = differs and _is_written_by_template(tokenizer)
        is_replaced = differs and not is_bound
        token = tokenizer.convert_ids_to_tokens(stops[0]) if is_replaced else tokenizer.eos_token
        return cls(
            ids=with_stops(own, stops),
            token=token,
            is_replaced=is_replaced,
            is_bound=is_bound,
            learned=tuple(tokenizer.convert_ids_to_tokens(learned)),
        )

    def notes(self, kind: Kind) -> list[str]:
        """Return notes for users of this kind of export, one sentence each."""
        ends = " and ".join(f"`{token}`" for token in self.learned)
        found = []
        if self.learned and kind == "adapter":
            found.append(
                f"responses end with {ends}, at which the base model does not stop; a server that "
                "takes its stop tokens from the base needs it as an additional one"
            )
        if self.is_bound:
            found.append(
                f"the learned turns end with another token than `{self.token}`, which is still the "
                "end token of the tokenizer, because the chat template writes it elsewhere"
            )
        return found


def own_end_ids(model: "nn.Module") -> Ids:
    """Return the end tokens of generation with the base model."""
    from finetune_trainer.model.loss import base_of

    base = base_of(model)
    own: Ids = getattr(base.generation_config, "eos_token_id", None)
    return base.config.get_text_config().eos_token_id if own is None else own


def with_stops(own: Ids, stops: Sequence[int]) -> Ids:
    """Return end tokens that include `stops`; a single one stays an integer."""
    known = own if isinstance(own, list) else [] if own is None else [own]
    ids = list(dict.fromkeys([*known, *stops]))
    if ids == known:
        return own
    return ids[0] if len(ids) == 1 else ids


def _is_written_by_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template reads `eos_token`, so that another one changes its text."""
    from transformers.utils.chat_template_utils import _get_template_variables

    template = tokenizer.chat_template
    texts = [template] if isinstance(template, str) else (template or {}).values()
    return any("eos_token" in _get_template_variables(text) for text in texts)
