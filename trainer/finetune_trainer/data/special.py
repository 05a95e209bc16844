"""Treat the text of special tokens in rows as plain text; only the template's tokens are special.

Called by `turns` and `encoding`. A row that contains the text of a special token is rendered with
that text broken by a private-use character (`shield`). Special tokens that are still intact in the
rendered text come from the template: `rewrite` replaces each by one private-use character and
restores the broken ones. `OwnTokenizer`, a copy of the model's tokenizer in which only these
characters are special, returns the tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from finetune_trainer.errors import DataError

# Private-use characters at the end of Unicode, which no font is known to use.
SHIELD = "\U0010e000"
FIRST_MARK = 0x10E001
FIRST_SPECIAL = 0x10F000
RESERVED = re.compile("[\U0010e000-\U0010fffd]")
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # tokenizers reject it

Offsets = list[tuple[int, int]]


class ControlTokens:
    """The texts that are special to a tokenizer.

    Attributes:
        names: Text of each special token, in the order of their ids.
    """

    def __init__(
        self, tokenizer: Any, structural: Iterable[str] = (), written: Iterable[str] = ()
    ) -> None:
        """Collect all special tokens, and `structural` tokens without the flag `special`.

        Rows may contain the tokens in `written`; they are not special here.
        """
        added = tokenizer.added_tokens_decoder
        # Not every tokenizer flags the tokens that it declares as end or padding.
        named = {*structural, *tokenizer.all_special_tokens}
        written = set(written)
        self.ids = {
            str(token): number
            for number, token in sorted(added.items())
            if str(token).strip() and str(token) not in written
            if token.special or str(token) in named
        }
        self.names = tuple(self.ids)
        # The longest first, in the order in which the tokenizer matches them.
        ordered = sorted(self.names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._character = {name: chr(FIRST_SPECIAL + at) for at, name in enumerate(self.names)}

    def holds(self, value: Any) -> bool:
        """Whether any text in a value contains a special token."""
        return any(self._pattern.search(text) for text in texts_of(value))

    def count(self, text: str) -> int:
        """Count the special tokens that `text` writes out."""
        return sum(1 for _ in self._pattern.finditer(text))

    def shield(self, value: Any) -> Any:
        """Break every special token in the texts of a value.

        Raises:
            DataError: a special token is a single character, which cannot be broken.
        """
        return map_texts(value, self._shield)

    def _shield(self, text: str) -> str:
        while match := self._pattern.search(text):
            if len(match[0]) == 1:
                raise DataError(f"the special token {match[0]!r} of the model is one character")
            text = self._pattern.sub(lambda found: found[0][0] + SHIELD + found[0][1:], text)
        return text

    def rewrite(self, text: str) -> str:
        """Replace every special token by its private-use character, and restore the broken ones."""
        own = self._pattern.sub(lambda found: self._character[found[0]], text)
        return own.replace(SHIELD, "")

    def character(self, name: str) -> str:
        """Return the private-use character that stands for a special token."""
        return self._character[name]


class OwnTokenizer:
    """A copy of a fast tokenizer in which special tokens are the characters of `ControlTokens`.

    Raises:
        ValueError: the tokenizer cannot be copied in this way.
    """

    def __init__(self, tokenizer: Any, control: ControlTokens) -> None:
        from tokenizers import Tokenizer

        if not tokenizer.is_fast:
            raise ValueError("it has no fast implementation")
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # The post-processor would add special tokens, and excludes white space from the offsets.
        backend |= {"post_processor": None, "truncation": None, "padding": None}
        number_of = {}
        for token in backend["added_tokens"]:
            if token["content"] in control.ids:
                token["content"] = control.character(token["content"])
            number_of[token["content"]] = token["id"]
        self._whole = Tokenizer.from_str(json.dumps(backend))
        self._number = {self._whole.token_to_id(text): number for text, number in number_of.items()}
        known = set(self._whole.get_vocab(with_added_tokens=False).values())
        if known & {self._whole.token_to_id(control.character(name)) for name in control.names}:
            raise ValueError("its vocabulary has gaps")
        unknown = tokenizer.unk_token_id
        self._forged = {number for number in control.ids.values() if number != unknown} & known

    @cached_property
    def _bare(self) -> Any:
        """A second copy, which does not add a space before a text; few data sets need it."""
        from tokenizers import Tokenizer

        backend = json.loads(self._whole.to_str())
        for part in ("normalizer", "pre_tokenizer"):
            backend[part] = _without_prefix(backend[part])
        return Tokenizer.from_str(json.dumps(backend))

    def encode(self, text: str) -> tuple[list[int], Offsets]:
        """Return the tokens of a rewritten text, and the offsets of each.

        Raises:
            ValueError: the tokenizer turns plain text into a special token.
        """
        encoding = self._whole.encode(text, add_special_tokens=False)
        return self._mapped(encoding.ids), encoding.offsets

    def encode_bare(self, text: str) -> list[int]:
        """Return the tokens of a continuation within a text, without a space before it."""
        return self._mapped(self._bare.encode(text, add_special_tokens=False).ids)

    def _mapped(self, numbers: list[int]) -> list[int]:
        if not self._forged.isdisjoint(numbers):
            raise ValueError("it turns plain text into a special token")
        return [self._number.get(number, number) for number in numbers]


def refuse_reserved(value: Any, where: str) -> None:
    """Refuse a row whose texts contain a character reserved here, or half of a character.

    Raises:
        DataError: the texts contain one.
    """
    texts = list(texts_of(value))
    if held := _first(HALF_A_CHARACTER, texts):
        raise DataError(
            f"{where} holds U+{ord(held[0]):X}, half of a character whose other half is missing; "
            "correct or delete the row"
        )
    if held := _first(RESERVED, texts):
        raise DataError(
            f"{where} holds the private-use character U+{ord(held[0]):X}, which marks places for "
            "the trainer; delete it"
        )


def _first(pattern: re.Pattern[str], texts: list[str]) -> re.Match[str] | None:
    return next((match for text in texts if (match := pattern.search(text))), None)


def texts_of(value: Any) -> Iterable[str]:
    """Yield every text within lists and mappings, including their keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_of(key)
            yield from texts_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value with `change` applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_texts(item, change) for item in value)
    return value


def common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(first), len(second))
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer without the parts that add a space before a text."""
    if not isinstance(part, dict):
        return part
    if part["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if part["type"] == "Metaspace":
        return part | {"prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return part | {"add_prefix_space": False}
    inner = {
        key: [_without_prefix(one) for one in part[key]]
        for key in ("normalizers", "pretokenizers")
        if key in part
    }
    return part | inner
