"""From rows to tokens with a label mask: what of each row the model learns to say.

Called by `sequences` and the preview. A label is a token that is predicted: in a conversation the
assistant's turns with their stop tokens, in a text all of it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finetune_trainer.config import DataConfig, DataFormat
from finetune_trainer.data.formats import Conversation, read_example
from finetune_trainer.data.source import Row
from finetune_trainer.data.template import ChatTemplate, Rendered
from finetune_trainer.errors import ConfigError

ROWS_PER_BATCH = 512  # the tokenizer works on many texts at once, with threads where it may


@dataclass(frozen=True)
class Encoded:
    """One row: its tokens (L,), and for each whether it is predicted."""

    tokens: list[int]
    is_label: list[bool]


class RowEncoder:
    """Encodes rows of one format with one tokenizer.

    Raises:
        ConfigError: the format is chat and the model has no chat template.
    """

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        has_template = tokenizer.chat_template is not None
        if config.format is DataFormat.CHAT or (
            config.format is DataFormat.INSTRUCTION and has_template
        ):
            self._template = ChatTemplate(tokenizer)
        # A chat template writes its special tokens itself; a plain text has none yet.
        self._begin = [] if self._template else _begin_tokens(tokenizer)

    def encode(self, rows: Iterable[Row]) -> Iterator[Encoded]:
        """Yield every row encoded, in order and at full length.

        Raises:
            DataError: a row does not have the columns or the turns that the format needs.
        """
        remaining = iter(rows)
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            yield from self._encode_batch(batch)

    def _encode_batch(self, rows: list[Row]) -> Iterator[Encoded]:
        drafts = [self._draft(row) for row in rows]
        # One call for all texts of the batch: a call of its own for each costs more than its text.
        texts = {text for draft in drafts if isinstance(draft, Rendered) for text in _cuts(draft)}
        tokens_of = self._tokenize(texts)
        for draft in drafts:
            yield draft if isinstance(draft, Encoded) else self._label(draft, tokens_of)

    def _draft(self, row: Row) -> Encoded | Rendered:
        example = read_example(row, self._config.format, self._config.columns)
        if isinstance(example, str):
            return _ending_in(example, "")
        if self._template is None:
            return _without_template(example)
        if self._template.has_marks and example.is_learned_whole:
            return Encoded(*self._template.marked_tokens(example, row.where))
        return self._template.render(example, row.where)

    def _tokenize(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Return the tokens of each text, without any that the tokenizer would add."""
        unique = list(dict.fromkeys(texts))
        if not unique:
            return {}
        encoding = self._tokenizer(
            unique, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return dict(zip(unique, encoding["input_ids"], strict=True))

    def _label(self, rendered: Rendered, tokens_of: dict[str, list[int]]) -> Encoded:
        """Turn spans of characters into a mask of tokens.

        In front of an answer stand exactly the tokens that the model is given when it is asked:
        where the tokenizer would join the edge of an answer with what comes before, such as two
        line breaks and a word, the parts are tokenised one by one.
        """
        tokens, *edges = (tokens_of[cut] for cut in _cuts(rendered))
        if all(tokens[: len(edge)] == edge for edge in edges):
            is_label = [False] * len(tokens)
            for before, until in zip(edges[::2], edges[1::2], strict=True):
                is_label[len(before) : len(until)] = [True] * (len(until) - len(before))
        else:
            parts = list(_parts(rendered))
            tokens_of = self._tokenize(text for text, _ in parts)
            tokens = [token for text, _ in parts for token in tokens_of[text]]
            is_label = [learned for text, learned in parts for _ in tokens_of[text]]
        begin, end = self._begin, self._end(rendered)
        return Encoded(
            [*begin, *tokens, *end], [*[False] * len(begin), *is_label, *[True] * len(end)]
        )

    def _end(self, rendered: Rendered) -> list[int]:
        """Return the end token where the text has no stop token of its own."""
        if not rendered.needs_stop:
            return []
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"spec.model.source: the tokenizer of {self._tokenizer.name_or_path} has no "
                "end-of-text token, so the model could never learn to stop; use a model whose "
                "tokenizer has one"
            )
        return [self._tokenizer.eos_token_id]


def _begin_tokens(tokenizer: Any) -> list[int]:
    """Return the begin token, if it is one of those that the tokenizer adds to a plain text."""
    added = tokenizer("", add_special_tokens=True)["input_ids"]
    return [token for token in added[:1] if token == tokenizer.bos_token_id]


def _without_template(conversation: Conversation) -> Rendered:
    """Lay out an instruction and its answer as paragraphs, for a model that knows no turns."""
    *asked, answer = (message["content"] for message in conversation.messages)
    return _ending_in(answer, "\n\n".join(asked) + "\n\n")


def _ending_in(answer: str, prompt: str) -> Rendered:
    """Learn the answer and the end after it; nothing where it is empty, not even the end."""
    text = prompt + answer
    if not answer.strip():
        return Rendered(text, (), needs_stop=False)
    return Rendered(text, ((len(prompt), len(text)),), needs_stop=True)


def _cuts(rendered: Rendered) -> Iterator[str]:
    """Yield the text, and the text up to each edge of a span."""
    yield rendered.text
    for span in rendered.spans:
        yield from (rendered.text[:edge] for edge in span)


def _parts(rendered: Rendered) -> Iterator[tuple[str, bool]]:
    """Yield the text in parts, and whether each is learned."""
    done = 0
    for start, end in rendered.spans:
        yield rendered.text[done:start], False
        yield rendered.text[start:end], True
        done = end
    yield rendered.text[done:], False
