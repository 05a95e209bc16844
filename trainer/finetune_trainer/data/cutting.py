"""Cut a huge text before tokenising, without changing its first tokens.

Called by `encoding` if rows are truncated. Tokenising ten megabytes would take gigabytes of memory
for the two thousand tokens that are retained.

The first tokens do not change, because the known pre-tokenizers end a word at each space after
another character, whatever the rest of the text, and the tokenizers encode word by word. The tokens
of a text that is cut at such a space are therefore the first tokens of the whole text. The caller
checks that there are enough. NFC never composes a space with the character before it. Other
tokenizers (sentencepiece processes a whole text at once) get whole texts.
"""

import json
import re
from typing import Any

# Characters retained per token; texts have about 4. If they are too few, the whole text is used.
CHARACTERS_PER_TOKEN = 16
SPACE_AFTER_ANOTHER = re.compile(r"(?<=\S) ")
# The patterns of GPT-4, Llama 3 and Qwen2. In none does a space follow another character in a word.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = {_CONTRACTIONS + numbers + _REST for numbers in (r"\p{N}{1,3}", r"\p{N}")}


class Cutter:
    """Finds where a text for a tokenizer may be cut.

    Attributes:
        max_tokens: Number of tokens needed of each text.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._least = max_tokens * CHARACTERS_PER_TOKEN
        self._is_sound = _ends_words_at_spaces(tokenizer)

    def end(self, text: str) -> int | None:
        """Return the number of characters to tokenise; None for the whole text."""
        if not self._is_sound or len(text) <= 2 * self._least:
            return None
        space = SPACE_AFTER_ANOTHER.search(text, self._least)
        return space.start() if space else None


def _ends_words_at_spaces(tokenizer: Any) -> bool:
    if not tokenizer.is_fast:
        return False
    backend = tokenizer.backend_tokenizer
    # An added token that contains such a space could be split by the cut.
    added = (str(token) for token in tokenizer.added_tokens_decoder.values())
    if any(SPACE_AFTER_ANOTHER.search(one) for one in added):
        return False
    first, before = backend.normalizer, backend.pre_tokenizer
    if before is None or (first is not None and _content(first)["type"] != "NFC"):
        return False
    splitting = _content(before)
    parts = splitting["pretokenizers"] if splitting["type"] == "Sequence" else [splitting]
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
    """Whether a part splits as a known pattern does, or only splits words further."""
    return part["type"] in ("ByteLevel", "Digits") or _splits_at_spaces(part)
