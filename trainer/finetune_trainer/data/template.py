"""Render conversations with the model's own chat template, and find what of it is learned.

Called by `encoding`. Most templates carry no `{% generation %}` marks, and asked for a mask they
answer all zeros without a word. So the place of each assistant turn is derived from what the
template renders, and checked; a row whose turns cannot be placed is refused by name.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from finetune_trainer.data.formats import Conversation, Message
from finetune_trainer.errors import ConfigError, DataError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# The date that templates which print today's use where they are not told it.
FIXED_DATE = date(2024, 7, 26)

Span = tuple[int, int]
"""Characters `start` to `end` of a text."""


@dataclass(frozen=True)
class Rendered:
    """A text and which characters of it are learned.

    Attributes:
        spans: In order, not overlapping.
        needs_stop: The text ends in a learned turn without a stop token: the tokenizer's own
            end token has to follow, or the model never learns to stop.
    """

    text: str
    spans: tuple[Span, ...]
    needs_stop: bool


class ChatTemplate:
    """The chat template of one tokenizer, made independent of the day it runs on.

    Some templates print today's date. The date is fixed, so that the same rows give the same
    tokens tomorrow: a checkpoint names its data by their hash.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"spec.dataset.format chat needs a chat template, and the model "
                f"{tokenizer.name_or_path} has none; use spec.dataset.format instruction or text, "
                "or a model with a chat template (mostly named Instruct or Chat)"
            )
        self._tokenizer = tokenizer
        self._template = TODAY_CALL.sub(
            lambda call: repr(FIXED_DATE.strftime(call[2])), tokenizer.get_chat_template()
        )
        # Whatever the vocabulary adds may end a turn, but for the white space that some add.
        added = tokenizer.added_tokens_decoder
        self._stop_tokens = {token for token in added if str(added[token]).strip()}
        # Only these end a turn for sure: others, such as the end of a call, stand inside one.
        self._special_tokens = {token for token in added if added[token].special}
        stops = "|".join(re.escape(str(added[token])) for token in self._stop_tokens) or "(?!)"
        self._stop_at_start = re.compile(rf"\s*(?:{stops})")
        self._stop_at_end = re.compile(rf"(?:{stops})(?=\s*\Z)")

    @property
    def has_marks(self) -> bool:
        """Whether the template itself says what the assistant generates."""
        return bool(GENERATION_MARK.search(self._template)) and self._tokenizer.is_fast

    def marked_tokens(self, conversation: Conversation, where: str) -> tuple[list[int], list[bool]]:
        """Return tokens and label mask as the template's own marks give them, stop tokens added.

        Many templates close their mark in front of the stop token; a model trained so never stops.
        """
        encoding = self._apply(
            conversation,
            where,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens: list[int] = encoding["input_ids"]
        is_label = [bool(mark) for mark in encoding["assistant_masks"]]
        for place in range(1, len(tokens)):
            follows_turn = is_label[place - 1] and tokens[place - 1] not in self._special_tokens
            if follows_turn and tokens[place] in self._stop_tokens:
                is_label[place] = True
        return tokens, is_label

    def render(self, conversation: Conversation, where: str) -> Rendered:
        """Render a conversation and place its learned turns, each with its stop token.

        Raises:
            DataError: the template refuses the conversation, or a turn cannot be placed.
        """
        text = self._apply(conversation, where)
        spans = []
        for turn in conversation.learned:
            span = self._place(text, conversation, turn)
            if span is None:
                raise DataError(
                    f"{where}: turn {turn + 1} cannot be found in what the model's chat template "
                    "makes of the conversation, so its tokens cannot be told from the others; "
                    "correct or delete the row"
                )
            spans.append(span)
        ends_in_turn = bool(spans) and not text[spans[-1][1] :].strip()
        return Rendered(text, tuple(spans), ends_in_turn and not self._stop_at_end.search(text))

    def _place(self, text: str, conversation: Conversation, turn: int) -> Span | None:
        """Compare what is rendered up to the turn with and without it; None where it is nowhere."""
        start = None
        said = conversation.messages[turn]
        is_last = turn == len(conversation.messages) - 1
        # Thoughts in front of a call are often left out once an answer follows.
        for messages in (conversation.messages, _without_thoughts(conversation.messages)):
            before = self._try(conversation, messages[:turn], add_generation_prompt=True)
            if before is None or not text.startswith(before):
                continue
            start = len(before)
            after = text if is_last else self._try(conversation, messages[: turn + 1])
            if after is None or not text.startswith(after) or len(after) < start:
                continue
            piece, skipped = after[start:], 0
            if set(said) == {"role", "content"}:
                # What the template puts before the answer (a header that the generation prompt
                # lacks, an empty block of thoughts) is not the assistant's to say.
                answer = said["content"]
                skipped = max(0, piece.find(answer if answer in piece else answer.strip()))
                if not self._stop_at_start.sub("", piece).strip():
                    continue  # nothing of the answer is there: a stop alone would teach silence
            stop = self._stop_at_end.search(piece)
            return start + skipped, start + (stop.end() if stop else len(piece))
        return self._place_by_marker(text, conversation, turn, start)

    def _place_by_marker(
        self, text: str, conversation: Conversation, turn: int, start: int | None
    ) -> Span | None:
        """Render with a marker as the whole answer; what stays the same is around it.

        A turn that a call of a tool opens and ends in another way begins at `start`, after the
        generation prompt, and ends where the next turn begins.
        """
        marker = "answer-" + hashlib.sha256(text.encode()).hexdigest()[:16]
        replaced = list(conversation.messages)
        replaced[turn] = {"role": "assistant", "content": marker}
        marked = self._try(conversation, replaced)
        if marked is None or marked.count(marker) != 1:
            return None
        head, tail = marked.split(marker)
        stop = self._stop_at_start.match(tail)
        following = tail[stop.end() :] if stop else tail
        if text.startswith(head):
            start = len(head)
        end = len(text) - len(following)
        if start is None or end < start or not text.endswith(following):
            return None
        return start, end

    def _refuse_ignored(self, conversation: Conversation, where: str) -> None:
        """Say aloud that the template has no place for the tools or the calls of a row."""
        names = {"tools"} if conversation.tools else set()
        names.update(*conversation.messages)
        for name in sorted(names & {"tools", "tool_calls"}):
            if name not in self._template:
                raise DataError(
                    f"{where} has {name}, which the model's chat template leaves out; use a "
                    "template that shows them (spec.model.chatTemplate), or delete them"
                )

    def _try(
        self, conversation: Conversation, messages: Sequence[Message], **options: Any
    ) -> str | None:
        """Render other messages, which a template may refuse: then None."""
        try:
            part = replace(conversation, messages=tuple(messages))
            return str(self._apply(part, "", **options)) if messages else None
        except DataError:
            return None

    def _apply(self, conversation: Conversation, where: str, **options: Any) -> Any:
        from jinja2 import TemplateError

        self._refuse_ignored(conversation, where)
        options = {"tokenize": False, "chat_template": self._template} | options
        try:
            return self._tokenizer.apply_chat_template(
                list(conversation.messages), tools=list(conversation.tools) or None, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{where}: the model's chat template refuses the conversation: {error}; correct or "
                "delete the row"
            ) from error


def _without_thoughts(messages: Sequence[Message]) -> list[Message]:
    """Leave of the assistant's turns only answers and calls; text beside a call is a thought."""
    made = []
    for said in messages:
        if said.get("tool_calls"):
            said = {"role": "assistant", "content": "", "tool_calls": said["tool_calls"]}
        elif said["role"] == "assistant":
            said = {"role": "assistant", "content": said["content"]}
        made.append(said)
    return made
