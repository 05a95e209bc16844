"""From rows to tokens with a label mask: what of each row the model learns to say.

Called by `sequences` and the preview. A label is a token that is predicted: in a conversation the
assistant's turns with their stop tokens, in a text all of it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from finetune_trainer.config import DataConfig, DataFormat
from finetune_trainer.data.formats import Conversation, PlainText, read_example
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
        texts = {
            text: None for draft in drafts if isinstance(draft, Rendered) for text in _cuts(draft)
        }
        tokens = dict(zip(texts, self._tokenize(list(texts)), strict=True))
        for draft in drafts:
            yield draft if isinstance(draft, Encoded) else self._label(draft, tokens)

    def _draft(self, row: Row) -> Encoded | Rendered:
        example = read_example(row, self._config.format, self._config.columns)
        if isinstance(example, PlainText):
            return Rendered(example.text, ((0, len(example.text)),), needs_stop=True)
        if self._template is None:
            return _without_template(example)
        prompt = example.messages[: example.first_trained]
        if self._template.has_marks and all(turn["role"] != "assistant" for turn in prompt):
            return Encoded(*self._template.marked_tokens(example, row.where))
        return self._template.render(example, row.where)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # A chat template writes its special tokens itself; a plain text has none yet.
        encoding = self._tokenizer(
            texts,
            add_special_tokens=self._template is None,
            return_attention_mask=False,
            verbose=False,
        )
        tokens: list[list[int]] = encoding["input_ids"]
        return tokens

    def _label(self, rendered: Rendered, tokens_of: dict[str, list[int]]) -> Encoded:
        """Turn spans of characters into a mask of tokens.

        The labels begin at the first token that differs from what the tokenizer makes of the text
        in front of the span alone: that is what the model is given when it has to answer.
        """
        text = rendered.text
        tokens = list(tokens_of[text])
        is_label = [False] * len(tokens)
        for start, end in rendered.spans:
            first = _common_length(tokens, tokens_of[text[:start]])
            last = _common_length(tokens, tokens_of[text[:end]])
            is_label[first:last] = [True] * (last - first)
        stop = self._tokenizer.eos_token_id
        if rendered.needs_stop and tokens[-1:] != [stop]:
            if stop is None:
                raise ConfigError(
                    f"spec.model.source: the tokenizer of {self._tokenizer.name_or_path} has no "
                    "end-of-text token, so the model could never learn to stop; use a model whose "
                    "tokenizer has one"
                )
            tokens.append(stop)
            is_label.append(True)
        return Encoded(tokens, is_label)


def _without_template(conversation: Conversation) -> Rendered:
    """Lay out an instruction and its answer as paragraphs, for a model that knows no turns."""
    *asked, answer = (message["content"] for message in conversation.messages)
    prompt = "\n\n".join(asked) + "\n\n"
    text = prompt + answer
    return Rendered(text, ((len(prompt), len(text)),), needs_stop=True)


def _cuts(rendered: Rendered) -> Iterator[str]:
    """Yield the text, and the text up to each edge of a span."""
    yield rendered.text
    for span in rendered.spans:
        yield from (rendered.text[:edge] for edge in span)


def _common_length(one: list[int], other: list[int]) -> int:
    """Return how many tokens the two begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
