"""Check that the model has an embedding row for each token of the data.

If tokens were added to a tokenizer but not to the model, or the tokenizer belongs to another model,
token ids exceed the last row: an IndexError on a CPU, and on a GPU a kernel assertion without
context.
"""

from typing import TYPE_CHECKING

from finetune_trainer.config import ModelConfig
from finetune_trainer.data.sequences import TokenDataset
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.load import load_settings, new_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def padding_id(config: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the token id of padding: the tokenizer's own, or 0 if the model has no row for it.

    No position attends to padding and no label is padding, so the id changes no loss.
    """
    own, size = tokenizer.pad_token_id, _vocab_size(config)
    known = own is not None and (size is None or own < size or own in new_token_ids(config))
    return int(own) if known else 0


def refuse_unknown_tokens(
    config: ModelConfig,
    tokenizer: "PreTrainedTokenizerBase",
    train: TokenDataset,
    held_out: TokenDataset | None,
) -> None:
    """Refuse data with a token that is neither in the model nor in `addTokens`.

    The data is read only if the tokenizer has such a token; in many tokenizers no text yields it.

    Raises:
        ConfigError: a row has such a token.
    """
    size = _vocab_size(config)
    if size is None:
        return
    added = new_token_ids(config)
    beyond = {number for number in tokenizer.get_vocab().values() if number >= size} - {*added}
    if not beyond:
        return
    for dataset in (train, held_out):
        found = dataset.find(beyond) if dataset is not None else None
        if dataset is not None and found is not None:
            index, token = found
            raise ConfigError(
                f"spec.model.source {config.path}: {dataset.origin(index)} has the token "
                f"{tokenizer.convert_ids_to_tokens(token)!r} with number {token}, but tokens "
                f"of the model end at {size - 1}; use the tokenizer of the model and name new "
                "tokens in spec.model.addTokens, or save the model with embeddings for them "
                "(resize_token_embeddings)"
            )


def _vocab_size(config: ModelConfig) -> int | None:
    size = getattr(load_settings(config).get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None
