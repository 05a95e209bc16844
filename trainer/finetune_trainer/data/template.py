"""Render conversations with the model's own chat template, as inference does.

Called by `turns`, which finds the learned spans in the rendered text. Rendering equals
`apply_chat_template` of transformers, except for the date: a template that prints the current date
gets a fixed one, because checkpoints identify data by hash and rows must not change with the day.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property, partial
from typing import Any

from finetune_trainer.data.formats import Message
from finetune_trainer.errors import ConfigError, DataError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# The date for templates that print the current date.
FIXED_DATE = date(2024, 7, 26)
# Arguments that the trainer itself passes to every template.
OWN_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")

Span = tuple[int, int]
"""Characters `start` to `end` of a text."""


class ChatTemplate:
    """The chat template of a tokenizer.

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
        self._dated: dict[str, str] = {}
        added = tokenizer.added_tokens_decoder.values()
        special = {str(one) for one in added if one.special} | set(tokenizer.all_special_tokens)
        plain = {str(one) for one in added} - special
        surely, perhaps = _one_of(special), _one_of(plain)
        # An added token that is not special may close a block within a turn.
        self._stop_at_start = re.compile(rf"\s*(?:(?:(?:{perhaps})\s*)*(?:{surely})|(?:{perhaps}))")
        self._stop_at_end = re.compile(rf"(?:{surely}|{perhaps})(?=\s*\Z)")
        self._special_at_end = re.compile(rf"(?:{surely})(?=\s*\Z)")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        where: str,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, or of the prompt for the turn that follows it.

        Raises:
            DataError: the template refuses the conversation.
        """
        text, _ = self._render(messages, tools, where, add_generation_prompt=add_generation_prompt)
        return text

    def generation_marks(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], where: str
    ) -> list[Span] | None:
        """Return the spans within `{% generation %}` marks; None if the template has no marks.

        Raises:
            DataError: the template refuses the conversation.
        """
        if not GENERATION_MARK.search(self._source(bool(tools))):
            return None
        _, marks = self._render(messages, tools, where, return_assistant_tokens_mask=True)
        return marks

    def stop_after(self, tail: str) -> int | None:
        """Return the end of the stop token at the start of `tail`, after optional white space."""
        stop = self._stop_at_start.match(tail)
        return stop.end() if stop else None

    def stop_before_end(self, text: str, start: int, *, is_special: bool = False) -> int | None:
        """Return the end of the stop token at the end of `text`, before optional white space."""
        stop = (self._special_at_end if is_special else self._stop_at_end).search(text, start)
        return stop.end() if stop else None

    @property
    def name(self) -> str:
        """Name of the tokenizer, for messages."""
        return str(self._tokenizer.name_or_path)

    @cached_property
    def _own_ends(self) -> tuple[str, str]:
        """Return the token that the template writes before a conversation, and after a turn."""
        turns = [{"role": role, "content": role[0]} for role in ("user", "assistant")]
        try:
            text = self.render(turns, (), "")
        except DataError:
            return "", ""
        begin, tail = self._tokenizer.bos_token or "", text.rpartition("a")[2]
        stop = self.stop_after(tail)
        return begin if text.startswith(begin) else "", tail[:stop].strip() if stop else ""

    def without_own_ends(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Remove the begin and stop tokens of rows that the template itself writes again.

        Only for rows whose special tokens are special.
        """
        begin, stop = self._own_ends
        changed = []
        for message in messages:
            content = message["content"]
            while begin and content.lstrip().startswith(begin):
                content = content.lstrip().removeprefix(begin)
            while stop and content.rstrip().endswith(stop):
                content = content.rstrip().removesuffix(stop)
            changed.append({**message, "content": content})
        return tuple(changed)

    @cached_property
    def structural_tokens(self) -> frozenset[str]:
        """Added tokens that the template writes around turns, special or not."""
        turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
        try:
            text = self.render(turns, (), "")
        except DataError:
            text = ""
        added = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        return frozenset(token for token in added if token.strip() and token in text)

    @cached_property
    def _special_tokens(self) -> dict[str, Any]:
        return dict(self._tokenizer.special_tokens_map)

    def _source(self, has_tools: bool) -> str:
        """Return the template for a conversation; some models have a separate one for tools."""
        source = str(self._tokenizer.get_chat_template(tools=[{}] if has_tools else None))
        if source not in self._dated:
            self._dated[source] = TODAY_CALL.sub(
                lambda call: repr(FIXED_DATE.strftime(call[2])), source
            )
        return self._dated[source]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        where: str,
        **options: bool,
    ) -> tuple[str, list[Span]]:
        from jinja2 import UndefinedError
        from transformers.utils.chat_template_utils import render_jinja_template

        # `apply_chat_template` is not used because it does not render an empty conversation.
        render = partial(
            render_jinja_template,
            tools=list(tools) or None,
            chat_template=self._source(bool(tools)),
            **self._special_tokens,
            **options,
        )
        try:
            try:
                [text], marks = render(conversations=[list(messages)])
            except (TypeError, UndefinedError):
                as_text = [_with_arguments_as_text(message) for message in messages]
                if as_text == list(messages):
                    raise
                [text], marks = render(conversations=[as_text])
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"{where}: the model's chat template refuses the conversation: {error}; correct or "
                "delete the row"
            ) from error
        return str(text), [(int(start), int(end)) for start, end in (marks or [[]])[0]]


def _with_arguments_as_text(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text.

    Some templates join them as text (DeepSeek), which fails for a mapping.
    """
    if not message.get("tool_calls"):
        return message

    def changed(call: Any) -> Any:
        inner = call.get("function", call)
        arguments = inner.get("arguments") or {} if isinstance(inner, dict) else None
        if not isinstance(arguments, dict):
            return call
        text = json.dumps(arguments, ensure_ascii=False)
        inner = {**inner, "arguments": text}
        return {**call, "function": inner} if "function" in call else inner

    return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}


def with_arguments(template: str, arguments: Mapping[str, Any], given: Iterable[str]) -> str:
    """Return a template in which `arguments` are the defaults of its variables.

    Training, the preview, sample prompts and servers of the exported model therefore use the same
    values. `given` are the names to which the tokenizer itself assigns a value.

    Raises:
        ConfigError: the template does not read a name, or the trainer passes it itself.
    """
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,
        _get_template_variables,
    )

    functions = _compile_jinja_template(template).environment.globals
    free = set(_get_template_variables(template)) - {*OWN_ARGUMENTS, *functions, *given}
    begin = ""
    for name, value in arguments.items():
        if name not in free:
            instead = f"use one of {', '.join(sorted(free))}" if free else "it reads none"
            raise ConfigError(
                f"spec.model.chatTemplateArguments.{name} has no effect: the model's chat template "
                f"reads no argument of that name; remove it ({instead})"
            )
        begin += f"{{% set {name} = {name} if {name} is defined else {value!r} %}}"
    return begin + "\n" + template if begin else template  # Jinja drops a line break after `%}`


def _one_of(texts: set[str]) -> str:
    ordered = sorted((text for text in texts if text.strip()), key=len, reverse=True)
    return "|".join(map(re.escape, ordered)) or "(?!)"
