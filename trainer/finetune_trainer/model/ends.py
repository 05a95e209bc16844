"""Find the two ends of a model, embedding and head, where each has weights of its own."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

# Families whose model takes rows of the embedding's weight by itself, here that of padding. Of all
# of transformers 5.23 that were tried, no other does.
_READ_OUTSIDE = frozenset({"gemma4"})


def separate_ends(
    base: Any, layers: Sequence[nn.Module]
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return embedding and head of a transformers model, which may have adapters inside.

    Instead of a module is None where it has no weights, has one that is used elsewhere as well
    (tied embeddings), or lies in one of `layers`.
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
