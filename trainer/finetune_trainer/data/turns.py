"""Find what of a rendered conversation is learned: nothing is searched for an answer.

Called by `encoding`. A turn begins where its prompt ends: what the template makes of the messages
before it when it is asked for an answer. It ends with the stop token after its text, and where
that text ends a character of private use shows, rendered with it. The definition and its reasons:
docs/decisions/0050-what-is-learned.md.
"""

from dataclasses import dataclass, replace
from typing import Any

from finetune_trainer.data.formats import Conversation, Message
from finetune_trainer.data.marking import THOUGHTS, legible, mark_turn, without_marks
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

SHOWN = 40  # characters of a text that a sentence quotes


@dataclass(frozen=True)
class Rendered:
    """A text and which characters of it are learned.

    Attributes:
        spans: In order, not overlapping.
        needs_stop: The text ends in a learned turn without a stop token: the tokenizer's own
            end token has to follow, or the model never learns to stop.
        is_shielded: The row writes out special tokens, which stand broken in the text
            (`special.ControlTokens.shield`).
    """

    text: str
    spans: tuple[Span, ...]
    needs_stop: bool
    is_shielded: bool = False


@dataclass(frozen=True)
class _Turn:
    """A learned turn: the text of its conversation up to it, and where in that it stands."""

    text: str
    start: int
    end: int
    needs_stop: bool


def learned_rows(
    template: ChatTemplate, control: ControlTokens | None, conversation: Conversation, where: str
) -> list[Rendered]:
    """Render a conversation as the rows that it is learned from.

    Turns share a row where the template writes what is before a turn, and the turn, in the row as
    in the turn's own conversation; else each is the end of a row of its own. `control` are the
    special tokens that are text where the row writes them out; None lets them be special.

    Raises:
        DataError: the template refuses the conversation, does not begin a turn with its prompt,
            or drops or changes what a turn says.
    """
    finder = _Finder(template, control, conversation, where)
    rows: list[Rendered] = []
    for found in reversed([finder.find(turn) for turn in conversation.learned]):
        said = found.text[: found.end]
        shared = (
            at
            for at, row in reversed(list(enumerate(rows)))
            if row.text.startswith(said) and found.end <= row.spans[0][0]
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
    """Renders parts of one conversation and finds turns in them."""

    def __init__(
        self,
        template: ChatTemplate,
        control: ControlTokens | None,
        conversation: Conversation,
        where: str,
    ) -> None:
        self._template = template
        self._where = where
        self._messages, self._tools = conversation.messages, conversation.tools
        said = [[text for key, text in one.items() if key != "role"] for one in self._messages]
        refuse_reserved([said, self._tools], where)
        self.is_shielded = control is not None and control.holds([said, self._tools])
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
        """Render messages; broken special tokens must not have changed what the template does."""

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
        """Place one learned turn."""
        where = f"{self._where}: turn {turn + 1}"
        before = self._messages[:turn]
        text = self.render(self._messages[: turn + 1])
        try:
            prompt = self.render(before, add_generation_prompt=True)
        except DataError as error:
            if before:
                raise
            raise DataError(
                f"{where} is the assistant's and the first, and the model's chat template asks for "
                'no answer to nothing; write "train": false in the turn, or delete it'
            ) from error
        start = self._start(before, prompt, text, where)
        said_end = self._end_of_what_is_said(turn, text, where)
        stop = self._end(turn, text, said_end, start)
        end = len(text) if stop is None else stop
        if end <= start:
            raise DataError(_changed(where, "content", self._messages[turn]["content"]))
        self._compare_with_marks(turn, text, (start, end), said_end, where)
        shift = len(prompt) - start
        return _Turn(prompt + text[start:], len(prompt), end + shift, needs_stop=stop is None)

    def _refuse_unseen_tools(self) -> None:
        with_tools = self.render(self._messages)
        if with_tools == self._template.render(self._messages, (), self._where):
            raise DataError(_left_out(self._where, "tools"))

    def _start(self, before: tuple[Message, ...], prompt: str, text: str, where: str) -> int:
        """Return where in the turn's text its prompt ends.

        An answer may take away the thoughts of the calls before it (gpt-oss), which its prompt
        still has. Then the text has to begin with the prompt that has none.

        Raises:
            DataError: the turn does not begin with its prompt.
        """
        if text.startswith(prompt):
            return len(prompt)
        earlier = _without_thoughts(before)
        if earlier != before:
            bare = self.render(earlier, add_generation_prompt=True)
            asked = prompt.removeprefix(self.render(before))
            if text.startswith(bare) and asked == bare.removeprefix(self.render(earlier)):
                return len(bare)
        same = common_length(prompt, text)
        raise DataError(
            f"{where} does not begin with what the model is given when it is asked for it: the "
            f"chat template's prompt goes on with {_quoted(prompt[same:])} where the turn has "
            f"{_quoted(text[same:])}; give the turn what it lacks, mostly reasoning_content, or "
            "the template other arguments (spec.model.chatTemplateArguments), or use another "
            "template (spec.model.chatTemplate)"
        )

    def _end_of_what_is_said(self, turn: int, text: str, where: str) -> int | None:
        """Return where the last of the turn's own text ends; None where calls alone are said.

        Raises:
            DataError: the template leaves out something that the turn says, or changes it.
        """
        said = self._messages[turn]
        marked, mark_of, marks_of_calls = mark_turn(said)
        every = [*mark_of.values(), *marks_of_calls]
        shown = legible(
            self._template.render((*self._messages[:turn], marked), self._tools, where), every
        )
        if any(mark not in shown for mark in marks_of_calls):
            raise DataError(_left_out(self._where, "tool_calls"))
        for name, mark in mark_of.items():
            if mark not in shown and name != "content":
                raise DataError(_left_out(self._where, name))
            begun = without_marks(shown.split(mark)[0], every)
            if shown.count(mark) != 1 or not begun.endswith(said[name].strip()):
                raise DataError(_changed(where, name, said[name]))
        if without_marks(shown, every) != text:
            raise DataError(_changed(where, "content", said["content"]))
        ends = [len(without_marks(shown.split(mark)[0], every)) for mark in mark_of.values()]
        return max(ends) if ends and not said.get("tool_calls") else None

    def _end(self, turn: int, text: str, said_end: int | None, start: int) -> int | None:
        """Return where the turn's stop token ends; None where it has none."""
        if said_end is None:
            end = self._end_of_calls(turn, text)
            return end if end is not None else self._template.stop_before_end(text, start)
        stop = self._template.stop_after(text[said_end:])
        if stop is not None:
            return said_end + stop
        return self._template.stop_before_end(text, said_end)

    def _end_of_calls(self, turn: int, text: str) -> int | None:
        """Return where a turn of calls ends, if it ends as a turn of words does."""
        mark = chr(FIRST_MARK)
        words = {"role": "assistant", "content": mark}
        try:
            shown = self._template.render((*self._messages[:turn], words), self._tools, "")
        except DataError:
            return None
        _, is_there, tail = shown.partition(mark)
        stop = self._template.stop_after(tail) if is_there else None
        return len(text) - len(tail) + stop if stop is not None and text.endswith(tail) else None

    def _compare_with_marks(
        self, turn: int, text: str, learned: Span, said_end: int | None, where: str
    ) -> None:
        """Hold the template's own marks against what is learned of a turn.

        What they leave out of it (a space, an empty block of thoughts, the stop token) is learned
        all the same, as inference has to produce it.
        """
        messages = self._messages[: turn + 1]
        marks = self._template.generation_marks(messages, self._tools, self._where)
        if marks is None:
            return
        start, end = learned
        own = [(first, last) for first, last in marks if last > start]
        said_start = None
        if said_end is not None:
            said_start = said_end - len(self._messages[turn]["content"].strip())
        if not own or (
            said_start is not None
            and said_end is not None
            and not (own[0][0] <= max(said_start, start) and own[-1][1] >= said_end)
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
                f"{_quoted(beside)}, which the model does not have to say; correct the marks or "
                "remove them (spec.model.chatTemplate)"
            )


def _without_thoughts(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Leave of the assistant's turns only answers and calls; text beside a call is a thought."""
    made = []
    for said in messages:
        kept = {key: text for key, text in said.items() if key not in THOUGHTS}
        made.append(kept | {"content": ""} if said.get("tool_calls") else kept)
    return tuple(made)


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
