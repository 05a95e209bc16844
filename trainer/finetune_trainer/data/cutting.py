"""Leave out of a huge text what cannot become one of its first tokens, before it is tokenised.

Called by `encoding` where rows are truncated. Ten megabytes would take gigabytes, for the two
thousand tokens that are kept.

Why no token changes: a pre-tokenizer of a kind that is known here makes a word end wherever a
space follows another character, whatever comes later, and tokens are made word by word. So the
tokens of a text that ends there are the first ones of the whole text. Whether they are enough is
counted afterwards. NFC joins no space with what is before it. Other tokenizers (sentencepiece's
make tokens of a whole text at once) get whole texts.
"""

import json
import re
from typing import Any

# Characters a token that are kept; texts have about 4, and where these are too few all are taken.
CHARACTERS_PER_TOKEN = 16
SPACE_AFTER_ANOTHER = re.compile(r"(?<=\S) ")
# How GPT-4, Llama 3 and Qwen2 split a text. No alternative takes a space after another character.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = {_CONTRACTIONS + numbers + _REST for numbers in (r"\p{N}{1,3}", r"\p{N}")}


class Cutter:
    """Says where a text for one tokenizer may be cut.

    Attributes:
        max_tokens: How many tokens of each text are needed.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._least = max_tokens * CHARACTERS_PER_TOKEN
        self._is_sound = _ends_words_at_spaces(tokenizer)

    def end(self, text: str) -> int | None:
        """Return how much of a text is tokenised; None for all of it."""
        if not self._is_sound or len(text) <= 2 * self._least:
            return None
        space = SPACE_AFTER_ANOTHER.search(text, self._least)
        return space.start() if space else None


def _ends_words_at_spaces(tokenizer: Any) -> bool:
    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    # A token of the vocabulary that holds such a space could be cut in two.
    added = (str(token) for token in tokenizer.added_tokens_decoder.values())
    if any(SPACE_AFTER_ANOTHER.search(one) for one in added):
        return False
    first, before = backend.normalizer, backend.pre_tokenizer
    if before is None or (first is not None and _content(first)["type"] != "NFC"):
        return False
    made = _content(before)
    parts = made["pretokenizers"] if made["type"] == "Sequence" else [made]
    return any(map(_splits_at_spaces, parts)) and all(map(_is_known, parts))


def _content(part: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(part.__getstate__())
    return content


def _splits_at_spaces(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    is_isolated = part.get("behavior") == "Isolated" and not part.get("invert")
    return is_isolated and part.get("pattern", {}).get("Regex") in KNOWN_PATTERNS


def _is_known(part: dict[str, Any]) -> bool:
    """Say whether a part splits as known, or only splits words further."""
    return part["type"] in ("ByteLevel", "Digits") or _splits_at_spaces(part)
