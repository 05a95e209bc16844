"""Read the tokens of a model from its own `tokenizer.json`.

transformers rebuilds the tokenizers of some classes from their vocabulary, with another
normalizer or pre-tokenizer than the file has (transformers issue 45488). Servers read the file.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Parts of the file that determine the tokens of a text without special tokens.
_PARTS = ("normalizer", "pre_tokenizer", "model")


def use_own_file(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Replace the backend of a fast tokenizer if it differs from the model's `tokenizer.json`.

    Special tokens, and begin and end tokens, stay as transformers sets them.

    Raises:
        ConfigError: file and configuration number the special tokens differently.
    """
    file = folder / "tokenizer.json"
    if not tokenizer.is_fast or not file.is_file():
        return
    from tokenizers import Tokenizer

    own, rebuilt = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    written, read = json.loads(own.to_str()), json.loads(rebuilt.to_str())
    if all(written[part] == read[part] for part in _PARTS):
        return
    own.post_processor = rebuilt.post_processor
    own.no_truncation()
    own.no_padding()
    numbered = sorted(tokenizer.added_tokens_decoder.items())
    for _, token in numbered:
        add = own.add_special_tokens if token.special else own.add_tokens
        add([token])
    wrong = [(n, str(t)) for n, t in numbered if own.token_to_id(str(t)) != n]
    if wrong:
        number, token = wrong[0]
        raise ConfigError(
            f"spec.model.source: {file} numbers the token {token!r} as {own.token_to_id(token)}, "
            f"and tokenizer_config.json as {number}; save the tokenizer again (save_pretrained)"
        )
    tokenizer._tokenizer = own
