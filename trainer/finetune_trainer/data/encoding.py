"""Encode rows as tokens with a label mask, which marks the tokens that the model learns.

Called by `sequences` and the preview. A label is a token that the model learns to predict: in a
conversation the assistant's turns with their stop tokens, in a text every token. A label is
preceded by exactly the tokens of its prompt at inference time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import is_not
from typing import Any

from finetune_trainer.config import DataConfig, DataFormat, LongRows
from finetune_trainer.data.cutting import Cutter
from finetune_trainer.data.formats import Conversation, read_example
from finetune_trainer.data.prompt_tokens import PromptTokens
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.data.special import ControlTokens, Offsets, OwnTokenizer, refuse_reserved
from finetune_trainer.data.template import ChatTemplate, Span
from finetune_trainer.data.turns import Rendered, learned_rows
from finetune_trainer.errors import ConfigError, DataError

ROWS_PER_BATCH = 512  # the tokenizer processes many texts per call, with threads if allowed


@dataclass(frozen=True)
class Encoded:
    """Tokens of a text.

    Attributes:
        tokens: (L,) token ids.
        is_label: (L,) whether a token is learned.
        stops: Last learned token of each turn.
    """

    tokens: list[int]
    is_label: list[bool]
    stops: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncodedRow:
    """The encoding of one row of the data set.

    Attributes:
        parts: Usually a single part; several if turns of a conversation need rows of their own.
        has_special_text: Whether the row contains the text of special tokens, which are plain text
            here.
        is_cut: Whether the text was cut before tokenising. The parts are still longer than the
            maximum, but lack the end of the row.
        stops: Special token that ends each learned turn, as far as the row is not cut.
    """

    parts: tuple[Encoded, ...]
    has_special_text: bool = False
    is_cut: bool = False
    stops: tuple[int, ...] = ()


class RowEncoder:
    """Encodes rows of one format with one tokenizer.

    Attributes:
        ends: Special tokens that may end a learned turn.

    Raises:
        ConfigError: the format is chat and the model has no chat template.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, rules: Rules = Rules.CURRENT) -> None:
        self._config = config
        self._rules = rules
        self._is_current = rules is not Rules.RELEASE_0_1_0
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        has_template = tokenizer.chat_template is not None
        if config.format is DataFormat.CHAT or (
            config.format is DataFormat.INSTRUCTION and has_template
        ):
            self._template = ChatTemplate(tokenizer)
        # A chat template writes its special tokens itself; a plain text needs its begin token.
        self._begin = [] if self._template else _begin_tokens(tokenizer)
        structural = self._template.structural_tokens if self._template else ()
        self._control = ControlTokens(tokenizer, structural, config.special_tokens)
        self._text_tokens = None if config.allow_special_tokens else self._control
        # The unknown token is allowed: characters outside of the vocabulary become this token.
        self._special = set(self._control.ids.values()) - {tokenizer.unk_token_id}
        self.ends = self._special | {*tokenizer.convert_tokens_to_ids([*config.special_tokens])}
        self._own: OwnTokenizer | None = None
        self._prompts = PromptTokens(tokenizer)
        is_truncated = config.long_rows is LongRows.TRUNCATE
        self._cutter = Cutter(tokenizer, config.max_seq_len) if is_truncated else None

    def encode(self, rows: Iterable[Row]) -> Iterator[EncodedRow]:
        """Yield the encoding of every row in order, without a limit on its length.

        Raises:
            DataError: a row does not have the columns or the turns that the format needs, or the
                learned part cannot be determined.
        """
        remaining = iter(rows)
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            yield from self._encode_batch(batch)

    def _encode_batch(self, rows: list[Row]) -> Iterator[EncodedRow]:
        whole = [self._draft(row) for row in rows]
        drafts = [[self._cut(one) for one in draft] for draft in whole]
        # One call for all texts of the batch: the overhead of a call exceeds the cost of a text.
        plain = [one for draft in drafts for one in draft if not one.is_shielded]
        tokens_of = self._tokenize(one.text for one in plain)
        tokens_of |= self._tokenize(p for one in plain for p in self._own_prompts(one, tokens_of))
        for row, draft, all_of_it in zip(rows, drafts, whole, strict=True):
            kept = list(map(partial(self._cut_or_whole, tokens_of), draft, all_of_it))
            parts = [part for one in kept for part in self._label(one, tokens_of, row.where)]
            is_cut = any(map(is_not, kept, all_of_it))
            has_special_text = any(one.is_shielded for one in draft)
            ends = [end for part in parts for end in part.stops]
            stops = tuple(end for end in ends if end in self.ends)
            yield EncodedRow(tuple(parts), has_special_text, is_cut, stops)

    def _cut(self, rendered: Rendered) -> Rendered:
        """Cut off the text that is certainly beyond the retained tokens."""
        is_plain = self._cutter is not None and not rendered.is_shielded
        end = self._cutter.end(rendered.text) if self._cutter and is_plain else None
        if end is None:
            return rendered
        spans = tuple((start, min(until, end)) for start, until in rendered.spans if start < end)
        return Rendered(rendered.text[:end], spans, needs_stop=False)

    def _cut_or_whole(
        self, tokens_of: dict[str, "_Tokens"], cut: Rendered, whole: Rendered
    ) -> Rendered:
        """Return `cut`, or the whole text, tokenised, if the cut text may have too few tokens."""
        if cut is whole or self._cutter is None:
            return whole
        is_enough = len(tokens_of[cut.text].numbers) > self._cutter.max_tokens
        if is_enough and self._plain_labels(cut, tokens_of) is not None:
            return cut
        tokens_of |= self._tokenize([whole.text])
        tokens_of |= self._tokenize(self._own_prompts(whole, tokens_of))
        return whole

    def _own_prompts(self, rendered: Rendered, tokens_of: dict[str, "_Tokens"]) -> Iterator[str]:
        """Yield the prompts that must be tokenised separately."""
        for start, _ in rendered.spans:
            if self._count_prompt(rendered.text, start, tokens_of[rendered.text]) is None:
                yield rendered.text[:start]

    def _count_prompt(self, text: str, start: int, whole: "_Tokens") -> int | None:
        """Return the number of tokens of the prompt before `start`; see `PromptTokens.count`."""
        return self._prompts.count(text, whole.numbers, whole.encoding, start)

    def _draft(self, row: Row) -> list[Rendered]:
        example = read_example(row, self._config.format, self._config.columns, self._rules)
        if isinstance(example, Conversation) and self._template is not None:
            return learned_rows(self._template, self._text_tokens, example, row.where, self._rules)
        if isinstance(example, Conversation):
            # Instruction and response as paragraphs, for a model without a chat template.
            *asked, response = (message["content"] for message in example.messages)
            prompt = "\n\n".join(asked) + "\n\n"
            if len(example.learned) > 1:
                raise DataError(
                    f"{row.where}: the responses of its history cannot be learned without a chat "
                    "template; set spec.model.chatTemplate, or delete the column history"
                )
            if not example.learned:
                prompt, response = prompt + response, ""
        else:
            prompt, response = "", example
        return [self._without_template(prompt, response, row.where)]

    def _without_template(self, prompt: str, response: str, where: str) -> Rendered:
        """Learn the response and its end token; an empty response is not learned."""
        is_shielded = self._text_tokens is not None and self._text_tokens.holds([prompt, response])
        refuse_reserved([prompt, response], where)
        is_filled = bool(response.strip())
        if is_shielded:
            prompt, response = self._control.shield([prompt, response])
        text = prompt + response
        spans = ((len(prompt), len(text)),) if is_filled else ()
        needs_stop = is_filled and not self._has_end(text)
        return Rendered(text, spans, needs_stop=needs_stop, is_shielded=is_shielded)

    def _has_end(self, text: str) -> bool:
        """Whether a text of a row ends with the end token; plain text of it was shielded."""
        end = self._tokenizer.eos_token
        return self._is_current and end is not None and text.rstrip().endswith(end)

    def _begin_of(self, text: str) -> list[int]:
        """Return the begin token to put before a text, unless the text begins with one."""
        has_one = self._is_current and text.lstrip().startswith(self._tokenizer.bos_token or "\0")
        return [] if has_one else self._begin

    def _tokenize(self, texts: Iterable[str]) -> dict[str, "_Tokens"]:
        """Return the tokens of each text, without added begin or end tokens."""
        unique = list(dict.fromkeys(texts))
        if not unique:
            return {}
        batch = self._tokenizer(
            unique, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        encodings = batch.encodings or [None] * len(unique)
        return {
            text: _Tokens(numbers, encoding)
            for text, numbers, encoding in zip(unique, batch["input_ids"], encodings, strict=True)
        }

    def _label(
        self, rendered: Rendered, tokens_of: dict[str, "_Tokens"], where: str
    ) -> Iterator[Encoded]:
        """Yield the row's parts, with learned characters mapped to a mask of tokens."""
        begin, end = self._begin_of(rendered.text), self._end(rendered)
        if not rendered.is_shielded:
            labels = self._plain_labels(rendered, tokens_of)
            if labels is not None:
                self._refuse_forged(rendered.text, tokens_of[rendered.text].numbers, where)
                yield _whole(begin, tokens_of[rendered.text].numbers, labels, end)
                return
        for tokens, labels, is_last in self._careful(rendered, where):
            yield _whole(begin, tokens, labels, end if is_last else [])

    def _plain_labels(
        self, rendered: Rendered, tokens_of: dict[str, "_Tokens"]
    ) -> list[Span] | None:
        """Return the learned tokens; None if a turn does not follow its own prompt's tokens."""
        whole = tokens_of[rendered.text]
        labels = []
        for start, end in rendered.spans:
            begin = self._count_prompt(rendered.text, start, whole)
            if begin is None:
                prompt = tokens_of[rendered.text[:start]].numbers
                begin = len(prompt) if whole.numbers[: len(prompt)] == prompt else -1
            if begin < 0:
                return None
            until = whole.count_until(end) if end < len(rendered.text) else len(whole.numbers)
            if until is None:
                cut = self._tokenize([rendered.text[:end]])[rendered.text[:end]].numbers
                if whole.numbers[: len(cut)] != cut:
                    return None
                until = len(cut)
            labels.append((begin, until))
        return labels

    def _careful(
        self, rendered: Rendered, where: str
    ) -> Iterator[tuple[list[int], list[Span], bool]]:
        """Yield tokens, the learned spans, and whether the end of the text is included.

        If the tokenizer merges the end of a prompt with the beginning of its turn, such as two line
        breaks, the prompt keeps its own tokens and the rest of the merged token is tokenised
        separately. Such a turn gets its own row, because later turns see the merged token.
        """
        try:
            own = self._own_tokenizer()
            rewritten = _Rewritten.of(rendered, self._control, own)
            if not rendered.is_shielded:
                [plain] = self._tokenize([rendered.text]).values()
                if plain.numbers != rewritten.tokens:
                    raise ValueError("a copy of it returns other tokens")
            kept = []
            rows = []
            for start, end in rewritten.spans:
                prompt, _ = own.encode(rewritten.text[:start])
                until = rewritten.first_from(end)
                if rewritten.tokens[: len(prompt)] == prompt:
                    kept.append((len(prompt), until))
                    continue
                edge, place = rewritten.after_edge(start)
                rest = own.encode_bare(rewritten.text[start:edge])
                is_last = end == rewritten.spans[-1][1]
                tail = rewritten.tokens[place:] if is_last else rewritten.tokens[place:until]
                learned = (len(prompt), len(prompt) + len(rest) + until - place)
                rows.append(([*prompt, *rest, *tail], [learned], is_last))
        except ValueError as error:
            raise DataError(
                f"{where}: inference-time tokens cannot be reproduced: the model's tokenizer "
                "cannot distinguish special tokens from text, or a turn from its prompt "
                f"({error}); set spec.dataset.allowSpecialTokens, or correct or delete the row"
            ) from error
        is_whole = len(rows) == 0 or not rows[-1][2]
        if kept or not rows:
            tokens = rewritten.tokens if is_whole else rewritten.tokens[: kept[-1][1]]
            rows.insert(0, (tokens, kept, is_whole))
        yield from rows

    def _own_tokenizer(self) -> OwnTokenizer:
        if self._own is None:
            self._own = OwnTokenizer(self._tokenizer, self._control)
        return self._own

    def _refuse_forged(self, text: str, tokens: list[int], where: str) -> None:
        """Refuse a text that yields more special tokens than it contains."""
        if self._text_tokens is None:
            return
        if sum(map(self._special.__contains__, tokens)) > self._control.count(text):
            raise DataError(
                f"{where}: the model's tokenizer turns plain text into a special token; set "
                "spec.dataset.allowSpecialTokens, or correct or delete the row"
            )

    def _end(self, rendered: Rendered) -> list[int]:
        """Return the end token if the text has no stop token of its own, else no token."""
        if not rendered.needs_stop:
            return []
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"spec.model.source: the tokenizer of {self._tokenizer.name_or_path} has no "
                "end-of-text token, so the model could never learn to stop; use a model whose "
                "tokenizer has one"
            )
        return [self._tokenizer.eos_token_id]


@dataclass(frozen=True)
class _Tokens:
    """Tokens of one text, with the offsets that a fast tokenizer records."""

    numbers: list[int]
    encoding: Any

    def count_until(self, end: int) -> int | None:
        """Return the number of tokens up to a stop token that ends at character `end`."""
        place = self.encoding.char_to_token(end - 1) if self.encoding is not None else None
        return None if place is None else int(place) + 1


@dataclass(frozen=True)
class _Rewritten:
    """A text whose special tokens are private-use characters, with its tokens and offsets."""

    text: str
    spans: tuple[Span, ...]
    tokens: list[int]
    offsets: Offsets

    @classmethod
    def of(cls, rendered: Rendered, control: ControlTokens, own: OwnTokenizer) -> "_Rewritten":
        text = control.rewrite(rendered.text)
        spans = tuple(
            (len(control.rewrite(rendered.text[:start])), len(control.rewrite(rendered.text[:end])))
            for start, end in rendered.spans
        )
        return cls(text, spans, *own.encode(text))

    def first_from(self, character: int) -> int:
        """Return the index of the first token that begins at `character` or later."""
        begins = (at for at, (begin, _) in enumerate(self.offsets) if begin >= character)
        return next(begins, len(self.tokens))

    def after_edge(self, edge: int) -> tuple[int, int]:
        """Return the character and the token index at which the tokens across `edge` end."""
        end = edge
        while across := [stop for begin, stop in self.offsets if begin < end < stop]:
            end = max(across)
        return end, self.first_from(end)


def _begin_tokens(tokenizer: Any) -> list[int]:
    """Return the begin token if the tokenizer adds it to a plain text, else no token."""
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    return [token for token in added[:1] if token == tokenizer.bos_token_id]


def _whole(begin: list[int], tokens: list[int], labels: list[Span], end: list[int]) -> Encoded:
    """Add begin and end tokens, and build the label mask."""
    is_label = [False] * len(tokens)
    for start, until in labels:
        is_label[start:until] = [True] * (until - start)
    stops = end or [tokens[until - 1] for _, until in labels if until]
    return Encoded(
        [*begin, *tokens, *end],
        [*[False] * len(begin), *is_label, *[True] * len(end)],
        tuple(stops),
    )
