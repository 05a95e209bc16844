"""How long a row a model can number: rotary and relative positions go on, a table ends.

Called by `rank` once the model is loaded. Beyond a table's end a CPU raises an IndexError that
names nothing, and a GPU ends the process.
"""

from typing import Any

from torch import nn

from finetune_trainer.errors import ConfigError

MOST_OFFSET = 8  # rows that a table has beside those of the positions: OPT 2, RoBERTa its padding


def refuse_long_rows(base: Any, longest: int) -> str | None:
    """Return a warning where rows are longer than the model has seen; None where they are not.

    `longest` is the number of tokens of the longest row, training and held-out ones together.

    Raises:
        ConfigError: the model reads its positions from a table that ends before the longest row.
    """
    known = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if known is None or longest <= known:
        return None
    said = f"the longest row has {longest} tokens, and the model was made for {known}"
    remedy = (
        f"lower spec.training.maxSeqLength to {known}, or set spec.dataset.longRows to split as "
        "well"
    )
    if _has_table(base, known):
        raise ConfigError(
            f"{said}, the end of {type(base).__name__}'s table of positions; {remedy}"
        )
    return f"{said}; {remedy}"


def _has_table(base: Any, known: int) -> bool:
    """Say whether a part of the model holds a row for each position: learned, or computed once.

    By size, as every family has a name of its own for it. Right for all causal families of
    transformers 5.23 but XGLM, whose table would grow.
    """
    sizes = range(known, known + MOST_OFFSET + 1)
    words = (base.get_input_embeddings(), base.get_output_embeddings())
    for module in base.modules():
        if module in words:
            continue
        if isinstance(module, nn.Embedding) and module.num_embeddings in sizes:
            return True
        buffers = module.named_buffers(recurse=False)
        if any(buffer.ndim >= 2 and set(buffer.shape) & set(sizes) for _, buffer in buffers):
            return True
    return False
