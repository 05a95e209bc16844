"""Messages that a chat template leaves out, doubled ends, and call arguments as text."""

from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DataFormat, DatasetSource
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_tokenizer

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
ASKED = {"role": "user", "content": "Weather in Bern?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL], "train": False}
RESULT = {"role": "tool", "content": "31 degrees"}
REPLY = {"role": "assistant", "content": "It is 31 degrees."}
LATE_SYSTEM = {"role": "system", "content": "Be brief."}
# A system turn only in the first place.
TURN = (
    "{% if m.role == 'system' and not loop.first %}"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{{ '<|im_start|>assistant\\n' + m.tool_calls[0].function.name + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
FIRST_SYSTEM = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
NO_CALLS = CHATML_TEMPLATE.replace(
    "{% for message in messages %}",
    "{% for message in messages if message['content'] %}",
)
THOUGHTS = CHATML_TEMPLATE.replace(
    "message['content'] +", "(message['content'].split('</think>')[-1]) +"
)


def texts(
    folder: Path,
    template: str | None,
    row: dict[str, Any],
    rules: Rules = Rules.CURRENT,
    **config: Any,
) -> tuple[str, str]:
    """Return the text of a row, and of its labels."""
    tokenizer = tiny_tokenizer(folder, template=template)
    data = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused", **config)
    [encoded] = RowEncoder(data, tokenizer, rules).encode([Row("line 1", row)])
    [part] = encoded.parts
    labels = [token for token, is_label in zip(part.tokens, part.is_label, strict=True) if is_label]
    return tokenizer.decode(part.tokens), tokenizer.decode(labels)


@pytest.mark.parametrize(
    ("template", "messages", "turn"),
    [
        pytest.param(FIRST_SYSTEM, [ASKED, LATE_SYSTEM, REPLY], r"2 \(system\)", id="late system"),
        pytest.param(NO_CALLS, [ASKED, CALLED, RESULT, REPLY], r"2 \(assistant\)", id="call"),
        pytest.param(
            FIRST_SYSTEM.replace("m.role == 'system'", "messages[loop.index0 - 1].role == m.role"),
            [ASKED, {"role": "user", "content": "And in Rome?"}, REPLY],
            r"2 \(user\)",
            id="second user turn",
        ),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    template: str, messages: list[dict[str, Any]], turn: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"^line 1: turn {turn} is left out by .*, or delete"):
        texts(tmp_path, template, {"messages": messages})


def test_a_message_that_only_a_later_question_shows_is_refused(tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages if message.role != 'tool' or messages[-1].content == 'Bye.' %}",
    )
    bye = {"role": "assistant", "content": "Bye."}
    row = {"messages": [ASKED, RESULT, REPLY, ASKED, bye]}
    with pytest.raises(DataError, match=r"turn 2 \(tool\) is left out"):
        texts(tmp_path, template, row)


@pytest.mark.parametrize("function", [None, "weather"], ids=["null", "text"])
def test_a_call_beside_a_null_function_is_read(function: str | None, tmp_path: Path) -> None:
    call = {"function": function, "name": "weather", "arguments": {"city": "Bern"}}
    template = CHATML_TEMPLATE.replace(
        "message['content']",
        "message['content'] + (message.tool_calls[0].name + message.tool_calls[0].arguments.city "
        "if message.tool_calls else '')",
    )
    row = {"messages": [ASKED, CALLED | {"tool_calls": [call]}, RESULT, REPLY]}
    assert "weatherBern" in texts(tmp_path, template, row)[0]


def test_a_call_without_its_numbers_is_refused(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": {"days": 5, "wind": True}}}
    template = CHATML_TEMPLATE.replace(
        "message['content']",
        "message['content'] + (message.tool_calls[0].function.name if message.tool_calls else '')",
    )
    row = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(DataError, match="has tool_calls, which"):
        texts(tmp_path, template, row)


def test_release_0_1_0_learned_a_reply_to_a_result_that_was_left_out(tmp_path: Path) -> None:
    row = {"messages": [ASKED, CALLED, RESULT, REPLY]}
    text, _ = texts(tmp_path, NO_CALLS, row, Rules.RELEASE_0_1_0)
    assert "weather" not in text


def test_a_message_after_the_last_learned_turn_may_be_left_out(tmp_path: Path) -> None:
    row = {"messages": [ASKED, REPLY, LATE_SYSTEM]}
    _, learned = texts(tmp_path, FIRST_SYSTEM, row)
    assert learned == "It is 31 degrees.<|im_end|>"


def test_earlier_thoughts_may_be_left_out(tmp_path: Path) -> None:
    thoughtful = {"role": "assistant", "content": "<think>Hm.</think>Sunny.", "train": False}
    text, _ = texts(tmp_path, THOUGHTS, {"messages": [ASKED, thoughtful, ASKED, REPLY]})
    assert "Hm." not in text


def test_a_template_that_reads_the_end_of_a_text_is_no_reason_to_refuse(tmp_path: Path) -> None:
    row = {"messages": [ASKED, RESULT, REPLY]}
    ending = "('!' if message['content'].endswith('?') else '') + '<|im_end|>"
    template = CHATML_TEMPLATE.replace("'<|im_end|>", ending)
    text, learned = texts(tmp_path, template, row)
    assert "Bern?!<|im_end|>" in text
    assert learned == "It is 31 degrees.<|im_end|>"


@pytest.mark.parametrize("tail", ["", "\n", " "], ids=["end", "line break", "space"])
def test_an_end_token_of_the_row_is_the_only_one(tail: str, tmp_path: Path) -> None:
    row = {"text": f"Hello there<|im_end|>{tail}"}
    given: dict[str, Any] = {"format": DataFormat.TEXT, "allow_special_tokens": True}
    text, _ = texts(tmp_path, None, row, **given)
    before, _ = texts(tmp_path, None, row, Rules.RELEASE_0_1_0, **given)
    assert (text.count("<|im_end|>"), before.count("<|im_end|>")) == (1, 2)


def test_an_output_that_ends_itself_gets_no_second_end(tmp_path: Path) -> None:
    row = {"instruction": "Greet.", "output": "Hello.<|im_end|>"}
    given: dict[str, Any] = {"format": DataFormat.INSTRUCTION, "allow_special_tokens": True}
    assert texts(tmp_path, None, row, **given)[1] == "Hello.<|im_end|>"


def test_a_stop_token_in_the_row_is_not_added_by_the_template_again(tmp_path: Path) -> None:
    reply = {**REPLY, "content": "Sunny.<|im_end|>"}
    _, learned = texts(
        tmp_path, CHATML_TEMPLATE, {"messages": [ASKED, reply]}, allow_special_tokens=True
    )
    assert learned == "Sunny.<|im_end|>"


def test_end_tokens_of_all_turns_are_written_once(tmp_path: Path) -> None:
    asked, reply = ({**one, "content": "Hi.<|im_end|><|im_end|>"} for one in (ASKED, REPLY))
    text, _ = texts(
        tmp_path, CHATML_TEMPLATE, {"messages": [asked, reply]}, allow_special_tokens=True
    )
    assert text.count("<|im_end|>") == 2


def test_the_text_of_an_end_token_is_followed_by_the_end_token(tmp_path: Path) -> None:
    row = {"text": "Hello<|im_end|>"}  # plain text without allowSpecialTokens
    text, _ = texts(tmp_path, None, row, format=DataFormat.TEXT)
    assert text.count("<|im_end|>") == 2


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("'weather ' + call.function.arguments", id="joined"),
        pytest.param("'weather ' + call.function.arguments.strip()", id="stripped"),
        pytest.param("'weather ' ~ call.function.arguments | tojson", id="as JSON"),
    ],
)
def test_call_arguments_reach_the_text_as_json(arguments: str, tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content']",
        "{{ '<|im_start|>' + message['role'] + '\\n' }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name ~ " + arguments + " }}{% endfor %}{{ message['content']",
    )
    row = {"messages": [ASKED, {**CALLED, "train": True}]}
    _, learned = texts(tmp_path, template, row)
    assert learned.endswith('weather {"city": "Bern"}<|im_end|>')
