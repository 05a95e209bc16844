"""Find the learned spans of a rendered conversation by rendering, never by text search.

Called by `encoding`. A turn begins at the end of its prompt: the rendering of the previous messages
with a generation prompt. It ends with the stop token after its text. A private-use character
that is rendered after the text marks the end of the text. Definition and reasons:
docs/decisions/0050-what-is-learned.md.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finetune_trainer.data.formats import Conversation, Message
from finetune_trainer.data.marking import (
    THOUGHTS,
    legible,
    mark_messages,
    mark_turn,
    without_marks,
    without_numbers,
)
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.special import (
    FIRST_MARK,
    SHIELD,
    ControlTokens,
    common_length,
    map_texts,
    refuse_reserved,
)
from finetune_trainer.data.template import ChatTemplate, Span
from finetune_trainer.errors import DataError

SHOWN = 40  # characters of a text that a message quotes


@dataclass(frozen=True)
class Rendered:
    """A text and its learned characters.

    Attributes:
        spans: Learned spans, in order and disjoint.
        needs_stop: Whether the text ends in a learned turn without a stop token. The tokenizer's
            own end token must follow, or the model never learns to stop.
        is_shielded: Whether the row writes out special tokens, which are broken in the text
            (`special.ControlTokens.shield`).
    """

    text: str
    spans: tuple[Span, ...]
    needs_stop: bool
    is_shielded: bool = False


@dataclass(frozen=True)
class _Turn:
    """A learned turn: the text of the conversation up to its end, and its span in that text."""

    text: str
    start: int
    end: int
    needs_stop: bool


def learned_rows(
    template: ChatTemplate,
    control: ControlTokens | None,
    conversation: Conversation,
    where: str,
    rules: Rules = Rules.CURRENT,
) -> list[Rendered]:
    """Render a conversation as the rows that it is learned from.

    Turns share a row if the template renders the turn and the text before it in the row exactly as
    in the conversation up to that turn. Otherwise each turn ends a separate row. `control` are the
    special tokens whose text in a row is plain text; with None they are special.

    Raises:
        DataError: the template refuses the conversation, does not begin a turn with its prompt,
            drops a message, or drops or changes the text of a learned turn.
    """
    finder = _Finder(template, control, conversation, where, rules)
    rows: list[Rendered] = []
    for found in reversed([finder.find(turn) for turn in conversation.learned]):
        prefix = found.text[: found.end]
        shared = (
            at
            for at, row in reversed(list(enumerate(rows)))
            if row.text.startswith(prefix) and found.end <= row.spans[0][0]
        )
        place, span = next(shared, None), (found.start, found.end)
        if place is None or found.needs_stop:
            rows.append(Rendered(found.text, (span,), found.needs_stop, finder.is_shielded))
        else:
            rows[place] = replace(rows[place], spans=(span, *rows[place].spans))
    if not rows:
        rows.append(Rendered(finder.render(conversation.messages), (), False, finder.is_shielded))
    return rows[::-1]


class _Finder:
    """Renders parts of a conversation and finds turns in them."""

    def __init__(
        self,
        template: ChatTemplate,
        control: ControlTokens | None,
        conversation: Conversation,
        where: str,
        rules: Rules,
    ) -> None:
        self._template = template
        self._where = where
        self._rules = rules
        self._messages, self._tools = conversation.messages, conversation.tools
        if control is None and rules is not Rules.RELEASE_0_1_0:
            self._messages = template.without_own_ends(self._messages)
        texts = [[text for key, text in one.items() if key != "role"] for one in self._messages]
        refuse_reserved([texts, self._tools], where)
        self.is_shielded = control is not None and control.holds([texts, self._tools])
        if control is not None and self.is_shielded:
            try:
                self._messages = tuple(
                    {
                        key: text if key == "role" else control.shield(text)
                        for key, text in one.items()
                    }
                    for one in self._messages
                )
                self._tools = control.shield(self._tools)
            except DataError as error:
                raise DataError(
                    f"{where}: {error}, so it cannot be distinguished from text; "
                    "set spec.dataset.allowSpecialTokens, or delete the row"
                ) from error
        if self._tools:
            self._refuse_unseen_tools()

    def render(self, messages: tuple[Message, ...], *, add_generation_prompt: bool = False) -> str:
        """Render messages, and check that broken special tokens do not affect the template."""

        def rendered(messages: Any, tools: Any) -> str:
            return self._template.render(
                messages, tools, self._where, add_generation_prompt=add_generation_prompt
            )

        text = rendered(messages, self._tools)
        if self.is_shielded and text.replace(SHIELD, "") != rendered(
            _restored(messages), _restored(self._tools)
        ):
            raise DataError(
                f"{self._where} writes out special tokens of the model, and its chat template "
                "acts on them, so that they cannot be distinguished from text; "
                "set spec.dataset.allowSpecialTokens, or delete the row"
            )
        return text

    def find(self, turn: int) -> _Turn:
        """Find a learned turn."""
        where = f"{self._where}: turn {turn + 1}"
        before = self._messages[:turn]
        text = self.render(self._messages[: turn + 1])
        try:
            prompt = self.render(before, add_generation_prompt=True)
        except DataError as error:
            if before:
                raise
            raise DataError(
                f"{where} is the first turn and the assistant's, and the model's chat template has "
                'no generation prompt without a message; write "train": false in the turn, or '
                "delete it"
            ) from error
        start = self._start(before, prompt, text, where)
        content_end = self._end_of_content(turn, text, where)
        stop = self._end(turn, text, content_end, start)
        end = len(text) if stop is None else stop
        if end <= start:
            raise DataError(_changed(where, "content", self._messages[turn]["content"]))
        self._compare_with_marks(turn, text, (start, end), content_end, where)
        shift = len(prompt) - start
        return _Turn(prompt + text[start:], len(prompt), end + shift, needs_stop=stop is None)

    def _refuse_unseen_tools(self) -> None:
        with_tools = self.render(self._messages)
        if with_tools == self._template.render(self._messages, (), self._where):
            raise DataError(_left_out(self._where, "tools"))

    def _start(self, before: tuple[Message, ...], prompt: str, text: str, where: str) -> int:
        """Return the end of the prompt in the text of the turn.

        A turn may remove the thoughts of the calls before it (gpt-oss), which its prompt still
        contains. The text must then begin with the prompt from which these thoughts
        were removed.

        Raises:
            DataError: the turn does not begin with its prompt.
        """
        if text.startswith(prompt):
            return len(prompt)
        earlier = _without_thoughts(before)
        if earlier != before:
            bare = self.render(earlier, add_generation_prompt=True)
            opening = prompt.removeprefix(self.render(before))
            is_prompt = opening == bare.removeprefix(self.render(earlier))
            if is_prompt and text.startswith(bare) and self._lacks_thoughts(earlier, text):
                return len(bare)
        same = common_length(prompt, text)
        raise DataError(
            f"{where} does not begin with its generation prompt: the prompt of the chat template "
            f"continues with {_quoted(prompt[same:])}, the turn with {_quoted(text[same:])}; add "
            "what the turn lacks (mostly reasoning_content), give the template other arguments "
            "(spec.model.chatTemplateArguments), or use another template (spec.model.chatTemplate)"
        )

    def _lacks_thoughts(self, earlier: tuple[Message, ...], text: str) -> bool:
        """Whether the removed thoughts are nowhere in the text; Gemma 4 moves them."""
        if self._rules is Rules.RELEASE_0_1_0:
            return True
        return self.render((*earlier, self._messages[len(earlier)])) == text

    def _end_of_content(self, turn: int, text: str, where: str) -> int | None:
        """Return the end of the turn's own text; None if the turn consists of calls alone.

        Raises:
            DataError: the template leaves out or changes a text of the turn.
        """
        message = self._messages[turn]
        marked, mark_of, marks_of_calls = mark_turn(message)
        every = [*mark_of.values(), *marks_of_calls]
        shown = None
        if self._rules is not Rules.RELEASE_0_1_0:
            shown = self._with_all_marks(turn, marked, every, text)
        if shown is None:
            shown = legible(
                self._template.render((*self._messages[:turn], marked), self._tools, where), every
            )
        if any(mark not in shown for mark in marks_of_calls) or (
            self._rules is not Rules.RELEASE_0_1_0 and self._lacks_arguments(turn, text)
        ):
            raise DataError(_left_out(self._where, "tool_calls"))
        for name, mark in mark_of.items():
            if mark not in shown and name != "content":
                raise DataError(_left_out(self._where, name))
            begun = without_marks(shown.split(mark)[0], every)
            if shown.count(mark) != 1 or not begun.endswith(message[name].strip()):
                raise DataError(_changed(where, name, message[name]))
        if without_marks(shown, every) != text:
            raise DataError(_changed(where, "content", message["content"]))
        ends = [len(without_marks(shown.split(mark)[0], every)) for mark in mark_of.values()]
        return max(ends) if ends and not message.get("tool_calls") else None

    def _lacks_arguments(self, turn: int, text: str) -> bool:
        """Whether the template leaves out all numbers of the calls, which have no marks."""
        message = self._messages[turn]
        calls = message.get("tool_calls") or []
        changed = [without_numbers(call) for call in calls]
        if changed == calls:
            return False
        without = (*self._messages[:turn], {**message, "tool_calls": changed})
        try:
            return self._template.render(without, self._tools, self._where) == text
        except DataError:
            return False  # the template reads the numbers

    def _with_all_marks(
        self, turn: int, marked: Message, every: list[str], text: str
    ) -> str | None:
        """Render a turn and all messages before it with marks, without the marks of the latter.

        Returns:
            None if the template renders other text because of the marks.

        Raises:
            DataError: the template leaves out a message.
        """
        before, marks_of = (part[:turn] for part in self._marked_messages)
        of_messages = [mark for marks in marks_of for mark in marks]
        try:
            shown = self._template.render((*before, marked), self._tools, self._where)
        except DataError:
            return None  # the template reads a text that now has a mark
        shown = legible(shown, [*every, *of_messages])
        for number, marks in enumerate(marks_of):
            if any(mark not in shown for mark in marks):
                raise DataError(self._message_left_out(number))
        shown = without_marks(shown, of_messages)
        return shown if without_marks(shown, every) == text else None

    @cached_property
    def _marked_messages(self) -> tuple[list[Message], list[list[str]]]:
        return mark_messages(self._messages)

    def _message_left_out(self, number: int) -> str:
        role = self._messages[number]["role"]
        return (
            f"{self._where}: turn {number + 1} ({role}) is left out by the chat template of "
            f"{self._template.name}, so later turns would be learned without it; use a template "
            "that shows it (spec.model.chatTemplate), or delete the turn"
        )

    def _end(self, turn: int, text: str, content_end: int | None, start: int) -> int | None:
        """Return the end of the turn's stop token; None if it has no stop token."""
        if content_end is None:
            end = self._end_of_calls(turn, text, start)
            if end is not None:
                return end
            # A token that is not special closes the call, not the turn (`</tool_call>` of GLM-4.5).
            is_special = self._rules is not Rules.RELEASE_0_1_0
            return self._template.stop_before_end(text, start, is_special=is_special)
        stop = self._template.stop_after(text[content_end:])
        if stop is not None:
            return content_end + stop
        return self._template.stop_before_end(text, content_end)

    def _end_of_calls(self, turn: int, text: str, start: int) -> int | None:
        """Return the end of a turn of calls, if it ends like a turn of text."""
        mark = chr(FIRST_MARK)
        words = {"role": "assistant", "content": mark}
        try:
            shown = self._template.render((*self._messages[:turn], words), self._tools, "")
        except DataError:
            return None
        _, is_there, tail = shown.partition(mark)
        stop = self._template.stop_after(tail) if is_there else None
        if stop is None:
            return None
        if text.endswith(tail):
            return len(text) - len(tail) + stop
        # Some templates write the header of the next turn after each conversation (Command A).
        header = tail[stop:]
        if self._rules is Rules.RELEASE_0_1_0 or not (header.strip() and text.endswith(header)):
            return None
        call = text.removesuffix(header)
        return self._template.stop_before_end(call, start, is_special=True)

    def _compare_with_marks(
        self, turn: int, text: str, learned: Span, content_end: int | None, where: str
    ) -> None:
        """Compare the template's own generation marks with the learned span of a turn.

        Text of the span outside of the marks (a space, an empty block of thoughts, the stop token)
        is still learned, because inference has to produce it.
        """
        messages = self._messages[: turn + 1]
        marks = self._template.generation_marks(messages, self._tools, self._where)
        if marks is None:
            return
        start, end = learned
        own = [(first, last) for first, last in marks if last > start]
        content_start = None
        if content_end is not None:
            content_start = content_end - len(self._messages[turn]["content"].strip())
        if not own or (
            content_start is not None
            and content_end is not None
            and not (own[0][0] <= max(content_start, start) and own[-1][1] >= content_end)
        ):
            raise DataError(
                f"{where} is learned, but the chat template's {{% generation %}} marks do not "
                "enclose it; correct the marks or remove them (spec.model.chatTemplate), or write "
                '"train": false in the turn'
            )
        beside = text[own[0][0] : start] + text[end : own[-1][1]]
        if beside.strip():
            raise DataError(
                f"{where}: the chat template's {{% generation %}} marks enclose "
                f"{_quoted(beside)}, which the model does not generate; correct the marks or "
                "remove them (spec.model.chatTemplate)"
            )


def _without_thoughts(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Remove thoughts from the messages; text beside a call is a thought."""
    bare = []
    for message in messages:
        rest = {key: text for key, text in message.items() if key not in THOUGHTS}
        bare.append(rest | {"content": ""} if message.get("tool_calls") else rest)
    return tuple(bare)


def _restored(value: Any) -> Any:
    return map_texts(value, lambda text: text.replace(SHIELD, ""))


def _left_out(where: str, name: str) -> str:
    return (
        f"{where} has {name}, which the model's chat template leaves out; use a "
        "template that shows them (spec.model.chatTemplate), or delete them"
    )


def _changed(where: str, name: str, text: str) -> str:
    return (
        f"{where}: the model's chat template leaves out or changes its {name} "
        f"{_quoted(text.replace(SHIELD, ''))}, so other words would be learned; write thoughts in "
        "reasoning_content, or use a template that shows all of it (spec.model.chatTemplate), or "
        "correct the row"
    )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
