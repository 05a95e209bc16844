"""Check that rows are not longer than a model's table of positions.

Called by `rank` once the model is loaded. Rotary and relative positions have no end. Beyond the end
of a table a CPU raises an IndexError without context, and a GPU aborts the process.
"""

from typing import Any

from torch import nn

from finetune_trainer.errors import ConfigError

MOST_OFFSET = 8  # additional rows of a table: 2 in OPT, the padding row in RoBERTa


def refuse_long_rows(base: Any, longest: int) -> str | None:
    """Return a warning if rows are longer than the model was trained for; None otherwise.

    `longest` is the number of tokens of the longest row, training or held-out.

    Raises:
        ConfigError: the model reads its positions from a table that ends before the longest row.
    """
    known = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if known is None or longest <= known:
        return None
    fault = f"the longest row has {longest} tokens, but the model is configured for {known}"
    remedy = (
        f"lower spec.training.maxSeqLength to {known}, or set spec.dataset.longRows to split as "
        "well"
    )
    if _has_table(base, known):
        raise ConfigError(
            f"{fault}, the end of {type(base).__name__}'s table of positions; {remedy}"
        )
    return f"{fault}; {remedy}"


def _has_table(base: Any, known: int) -> bool:
    """Whether a module of the model has a row per position, learned or precomputed.

    Recognised by size, because the names differ by family. Correct for all causal families of
    transformers 5.23 except XGLM, whose table would grow.
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
