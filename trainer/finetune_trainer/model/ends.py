"""Find embedding and head of a model, if they do not share weights."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

# Families that read rows of the embedding's weight outside of its forward (the padding row). No
# other tested family of transformers 5.23 does.
_READ_OUTSIDE = frozenset({"gemma4"})


def untied_embedding_and_head(
    base: Any, layers: Sequence[nn.Module]
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and head of a transformers model, which may have adapters inside.

    Either is None if it has no weights, shares a weight with another module (tied embeddings), or
    is part of `layers`.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if base.config.model_type in _READ_OUTSIDE:
        embedding = None
    taken = {part for layer in layers for part in layer.modules()}
    uses = Counter(p for _, p in base.named_parameters(remove_duplicate=False))

    def separate(part: nn.Module | None) -> nn.Module | None:
        own = [] if part is None or part in taken else list(part.parameters())
        return part if own and all(uses[p] == 1 for p in own) else None

    return separate(embedding), separate(head)
