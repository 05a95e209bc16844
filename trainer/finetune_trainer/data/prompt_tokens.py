"""How many of a text's tokens are its prompt's, without tokenising the prompt.

Called by `encoding`, for each turn of a conversation: to tokenise each turn's prompt anew costs the
square of the turns.

Why nothing else comes out: a fast tokenizer first cuts a text at its added tokens, and makes tokens
of each piece by itself. So where a text has such a token, what is before it has the same tokens
whatever comes behind it, and a prompt's tokens are those up to its last one and those of the rest,
which are found by tokenising that one and the rest alone. The rest is the few characters that open
an answer, the same in every row.
"""

from functools import lru_cache
from typing import Any

MAX_KNOWN = 4_096  # rests whose tokens are remembered; most data sets have one or two


class PromptTokens:
    """Counts the tokens of prompts for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens_behind = lru_cache(MAX_KNOWN)(self._tokenize_behind)
        added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}
        # One that is only found between certain characters may not be found without them. One that
        # is looked for in normalised text is found in a piece, and cuts none.
        is_known = not any(token.single_word for token in added.values())
        self._cuts = {n: str(t) for n, t in added.items() if is_known and not t.normalized}

    def count(self, text: str, numbers: list[int], encoding: Any, end: int) -> int | None:
        """Return how many tokens of `text` are those of `text[:end]`; -1 where they are others.

        None says that it cannot be told without tokenising the prompt.
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
            return None  # it took white space beside it, or is what a prompt ends within
        rest = self._tokens_behind(cut, numbers[place], text[stop:end])
        if rest is None:
            return None
        count = place + 1 + len(rest)
        return count if numbers[place + 1 : count] == rest else -1

    def _tokenize_behind(self, cut: str, number: int, rest: str) -> list[int] | None:
        """Return the tokens that `rest` has behind an added token."""
        if not rest:
            return []
        made: list[int] = self._tokenizer(
            cut + rest, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return made[1:] if made[:1] == [number] else None
