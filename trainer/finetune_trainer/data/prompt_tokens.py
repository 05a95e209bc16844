"""Count the tokens of a text that belong to its prompt, without tokenising the prompt.

`encoding` calls it for each turn of a conversation, because tokenising the prompt of each turn
takes time quadratic in the number of turns.

The count is exact, because a fast tokenizer first splits a text at its added tokens and tokenises
each piece separately. The tokens before an added token do not depend on the text after it. The
tokens of a prompt are the tokens up to its last added token and the tokens of the rest, which are
found by tokenising only that token and the rest. The rest is the few characters that open a turn,
the same in every row.
"""

from functools import lru_cache
from typing import Any

MAX_KNOWN = 4_096  # rests whose tokens are cached; most data sets have one or two


class PromptTokens:
    """Counts the tokens of prompts for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens_behind = lru_cache(MAX_KNOWN)(self._tokenize_behind)
        added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}
        # A `single_word` token depends on the characters beside it. A token that is matched in
        # normalised text is found within a piece and does not split the text.
        is_known = not any(token.single_word for token in added.values())
        self._cuts = {n: str(t) for n, t in added.items() if is_known and not t.normalized}

    def count(self, text: str, numbers: list[int], encoding: Any, end: int) -> int | None:
        """Return the number of tokens of `text` that belong to the prompt `text[:end]`.

        Returns:
            The count; -1 if the tokens of the prompt are not a prefix of the tokens of the text;
            None if the prompt must be tokenised to find out.
        """
        place = encoding.char_to_token(end - 1) if encoding is not None and end else None
        if place is None or not self._cuts:
            return None
        while place >= 0 and numbers[place] not in self._cuts:
            place -= 1
        if place < 0:
            return None
        cut = self._cuts[numbers[place]]
        begin, stop = encoding.token_to_chars(place)
        if stop > end or text[begin:stop] != cut:
            return None  # the token absorbed white space, or the prompt ends within it
        rest = self._tokens_behind(cut, numbers[place], text[stop:end])
        if rest is None:
            return None
        count = place + 1 + len(rest)
        return count if numbers[place + 1 : count] == rest else -1

    def _tokenize_behind(self, cut: str, number: int, rest: str) -> list[int] | None:
        """Return the tokens of `rest` after an added token; None if they cannot be separated."""
        if not rest:
            return []
        tokens: list[int] = self._tokenizer(
            cut + rest, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return tokens[1:] if tokens[:1] == [number] else None
