"""Which tokens of a conversation are learned, on the shapes of template that models ship."""

from functools import cache
from typing import Any

import pytest

from finetune_trainer.config import ColumnMap, DataConfig, DataFormat, DatasetSource
from finetune_trainer.data.encoding import Encoded, RowEncoder
from finetune_trainer.data.source import Row
from finetune_trainer.errors import ConfigError, DataError
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_tokenizer

LLAMA3 = (
    "{{ bos_token or '<|endoftext|>' }}"
    "{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim "
    "+ '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
    + CHATML_TEMPLATE
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
    "{% endif %}" + CHATML_TEMPLATE
)
# As Qwen3: an empty block of thoughts before the last answer alone, earlier thoughts removed.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1] | trim) "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The mark closes in front of the stop token, as in many published templates.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
)
HEADER = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
NO_STOP = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"

DIALOGUE = [
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a tuple, é?"},
    {"role": "assistant", "content": " Also one, naïve 😀. "},
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = cache(
        lambda template: tiny_tokenizer(tmp_path_factory.mktemp("t"), template=template)
    )

    def make(
        template: str | None, data_format: DataFormat = DataFormat.CHAT, **columns: str
    ) -> "Encoder":
        return Encoder(tokenizer(template), data_format, ColumnMap(**columns))

    return make


class Encoder:
    """Encodes one row, and shows what is learned as text."""

    def __init__(self, tokenizer: Any, data_format: DataFormat, columns: ColumnMap) -> None:
        self.tokenizer = tokenizer
        config = DataConfig(
            train=DatasetSource(path="rows.jsonl"),
            format=data_format,
            columns=columns,
            cache_dir="unused",
        )
        self._encoder = RowEncoder(config, tokenizer)

    def text(self, **row: Any) -> str:
        """Return the whole row, decoded."""
        return str(self.tokenizer.decode(self.encode(**row).tokens))

    def learned(self, **row: Any) -> list[str]:
        """Return the text of each run of labels."""
        runs: list[list[int]] = []
        for encoded in self.parts(**row):
            for place, (token, is_label) in enumerate(
                zip(encoded.tokens, encoded.is_label, strict=True)
            ):
                if is_label and place and encoded.is_label[place - 1]:
                    runs[-1].append(token)
                elif is_label:
                    runs.append([token])
        return [self.tokenizer.decode(run) for run in runs]

    def encode(self, **row: Any) -> Encoded:
        [encoded] = self.parts(**row)
        return encoded

    def parts(self, **row: Any) -> tuple[Encoded, ...]:
        [encoded] = self._encoder.encode([Row("rows.jsonl line 1", row)])
        return encoded.parts


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        pytest.param(
            CHATML_TEMPLATE,
            ["A sequence.<|im_end|>", " Also one, naïve 😀. <|im_end|>"],
            id="ChatML keeps white space",
        ),
        pytest.param(
            DEFAULT_SYSTEM,
            ["A sequence.<|im_end|>", " Also one, naïve 😀. <|im_end|>"],
            id="a default system prompt",
        ),
        pytest.param(
            THINKING,
            [NO_THOUGHT + "A sequence.<|im_end|>", NO_THOUGHT + " Also one, naïve 😀. <|im_end|>"],
            id="an empty block of thoughts is learned",
        ),
        pytest.param(
            MARKED,
            [HEADER + "A sequence.<|im_end|>", HEADER + " Also one, naïve 😀. <|im_end|>"],
            id="generation marks that leave the stop token out",
        ),
        pytest.param(
            NO_GENERATION_PROMPT,
            [HEADER + "A sequence.<|im_end|>", HEADER + " Also one, naïve 😀. <|im_end|>"],
            id="no generation prompt, so that the model has to say the header",
        ),
    ],
)
def test_all_that_follows_a_prompt_is_learned_to_the_stop_token_and_nothing_else(
    encoder: Any, template: str, answers: list[str]
) -> None:
    assert encoder(template).learned(messages=DIALOGUE) == answers


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, LLAMA3, DEFAULT_SYSTEM])
def test_what_comes_before_an_answer_is_what_the_model_is_given_when_asked(
    encoder: Any, template: str
) -> None:
    made = encoder(template)
    encoded = made.encode(messages=DIALOGUE[:2])
    asked = made.tokenizer.apply_chat_template(DIALOGUE[:1], add_generation_prompt=True)
    assert encoded.tokens[: encoded.is_label.index(True)] == asked["input_ids"]


def test_a_template_without_marks_learns_the_same_as_one_with_them(encoder: Any) -> None:
    marked = encoder(MARKED).encode(messages=DIALOGUE)
    assert encoder(NO_GENERATION_PROMPT).encode(messages=DIALOGUE) == marked


def test_earlier_thoughts_that_the_template_removes_later_are_learned_in_a_row_of_their_own(
    encoder: Any,
) -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>\noh\n</think>\n\nNo."},
    ]
    assert encoder(THINKING).learned(messages=messages) == [
        "<think>\nhm\n</think>\n\nYes.<|im_end|>",
        "<think>\noh\n</think>\n\nNo.<|im_end|>",
    ]


def test_a_template_without_stop_tokens_gets_the_end_token_after_the_last_answer(
    encoder: Any,
) -> None:
    made = encoder(NO_STOP)
    assert made.learned(messages=DIALOGUE[:2]) == ["assistant: A sequence.\n<|im_end|>"]
    assert made.learned(messages=DIALOGUE) == [
        "assistant: A sequence.\n<|im_end|>",
        "assistant:  Also one, naïve 😀. \n<|im_end|>",
    ]


def test_a_dialogue_may_begin_with_an_answer(encoder: Any) -> None:
    learned = encoder(CHATML_TEMPLATE).learned(messages=DIALOGUE[1:])
    assert learned == ["A sequence.<|im_end|>", " Also one, naïve 😀. <|im_end|>"]


def test_answers_inside_a_prompt_are_examples_and_not_learned(encoder: Any) -> None:
    row = {"prompt": DIALOGUE[:3], "completion": DIALOGUE[3:]}
    assert encoder(CHATML_TEMPLATE).learned(**row) == [" Also one, naïve 😀. <|im_end|>"]


@pytest.mark.parametrize(
    ("template", "data_format", "row"),
    [
        pytest.param(
            CHATML_TEMPLATE, DataFormat.CHAT, {"prompt": "Hi", "completion": ""}, id="completion"
        ),
        pytest.param(
            CHATML_TEMPLATE,
            DataFormat.CHAT,
            {"messages": [DIALOGUE[0], {"role": "assistant", "content": " \n"}]},
            id="white space",
        ),
        pytest.param(
            MARKED.replace("{% endgeneration %}", "<|im_end|>{% endgeneration %}"),
            DataFormat.CHAT,
            {"prompt": "Hi", "completion": ""},
            id="marks around the stop token",
        ),
        pytest.param(
            None,
            DataFormat.INSTRUCTION,
            {"instruction": "Add", "output": ""},
            id="paragraphs",
        ),
        pytest.param(None, DataFormat.TEXT, {"text": ""}, id="text"),
    ],
)
def test_an_empty_answer_is_not_learned_by_its_stop_token_alone(
    encoder: Any, template: str | None, data_format: DataFormat, row: dict[str, Any]
) -> None:
    assert encoder(template, data_format).learned(**row) == []


def test_an_empty_answer_among_others_is_passed_over(encoder: Any) -> None:
    empty = {"role": "assistant", "content": ""}
    learned = encoder(CHATML_TEMPLATE).learned(messages=[DIALOGUE[0], empty, *DIALOGUE[2:]])
    assert learned == [" Also one, naïve 😀. <|im_end|>"]


def test_an_answer_that_is_a_call_needs_no_content(encoder: Any) -> None:
    calling = CHATML_TEMPLATE.replace(
        "message['content']",
        "message.content + (message.tool_calls[0].name if message.tool_calls else '')",
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look_up"}]}
    assert encoder(calling).learned(messages=[DIALOGUE[0], call]) == ["look_up<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        pytest.param({"messages": DIALOGUE[:2]}, {}, id="messages"),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "What is a list?"},
                    {"from": "gpt", "value": "A sequence."},
                ]
            },
            {},
            id="ShareGPT conversations",
        ),
        pytest.param({"prompt": "What is a list?", "completion": "A sequence."}, {}, id="strings"),
        pytest.param(
            {"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:2]}, {}, id="prompt as messages"
        ),
        pytest.param(
            {"q": "What is a list?", "a": "A sequence."},
            {"prompt": "q", "completion": "a"},
            id="columns of other names",
        ),
        pytest.param(
            {"dialog": DIALOGUE[:2], "messages": "a note"},
            {"messages": "dialog"},
            id="a configured column before the usual one",
        ),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "What is a list?"}]},
                    {"role": "assistant", "content": "A sequence.", "name": None},
                ]
            },
            {},
            id="text parts and null fields",
        ),
    ],
)
def test_all_customs_of_writing_a_dialogue_give_the_same_tokens(
    encoder: Any, row: dict[str, Any], columns: dict[str, str]
) -> None:
    made = encoder(CHATML_TEMPLATE, **columns)
    assert made.text(**row) == (
        "<|im_start|>user\nWhat is a list?<|im_end|>\n"
        "<|im_start|>assistant\nA sequence.<|im_end|>\n"
    )
    assert made.learned(**row) == ["A sequence.<|im_end|>"]


def test_a_system_column_becomes_the_system_turn(encoder: Any) -> None:
    text = encoder(CHATML_TEMPLATE).text(system="Be brief.", prompt="Hi", completion="Ho")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


def test_an_instruction_becomes_turns_where_the_model_has_a_template(encoder: Any) -> None:
    made = encoder(CHATML_TEMPLATE, DataFormat.INSTRUCTION)
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert made.text(**row) == (
        "<|im_start|>user\nAdd\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    assert made.learned(**row) == ["3<|im_end|>"]


def test_an_instruction_becomes_paragraphs_where_it_has_none(encoder: Any) -> None:
    made = encoder(None, DataFormat.INSTRUCTION)
    row = {"instruction": "Add", "input": "", "output": "3"}
    assert made.text(**row) == "Add\n\n3<|im_end|>"
    assert made.learned(**row) == ["3<|im_end|>"]


def test_a_text_is_learned_whole_with_its_end_token(encoder: Any) -> None:
    made = encoder(None, DataFormat.TEXT)
    assert made.learned(text="Once upon a time") == ["Once upon a time<|im_end|>"]


def test_the_date_a_template_prints_does_not_depend_on_the_day(encoder: Any) -> None:
    made = encoder("{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML_TEMPLATE)
    assert made.text(messages=DIALOGUE[:2]).startswith("Today: 26 Jul 2024\n<|im_start|>user")


def test_a_template_that_leaves_the_answer_out_teaches_no_silence(encoder: Any) -> None:
    made = encoder(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match=r"line 1: turn 2: the model's chat template leaves out"):
        made.text(prompt="What?", completion="That.")


def test_chat_without_a_template_says_what_to_do(encoder: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^spec\.dataset\.format chat needs a chat template.*instruction or text"
    ):
        encoder(None)


@pytest.mark.parametrize(
    ("data_format", "row", "columns", "sentence"),
    [
        pytest.param(
            DataFormat.CHAT,
            {"question": "a", "answer": "b"},
            {},
            "rows.jsonl line 1 has no column messages or conversations, and not both prompt and "
            "completion; it has question, answer. Name yours in spec.dataset.columns.messages, or "
            "in spec.dataset.columns.prompt and spec.dataset.columns.completion",
            id="no known column",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"instruction": "a", "input": "", "output": "b", "text": "c"},
            {},
            "rows.jsonl line 1 has no column messages or conversations, and not both prompt and "
            "completion; it has instruction, input, output, text. For such rows set "
            "spec.dataset.format: instruction",
            id="rows of format instruction",
        ),
        pytest.param(
            DataFormat.INSTRUCTION,
            {"text": "a"},
            {},
            "rows.jsonl line 1 has no column instruction; it has text. For such rows set "
            "spec.dataset.format: text",
            id="rows of format text",
        ),
        pytest.param(
            DataFormat.TEXT,
            {"prompt": "a", "completion": "b"},
            {},
            "rows.jsonl line 1 has no column text; it has prompt, completion. For such rows set "
            "spec.dataset.format: chat",
            id="rows of format chat",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"instruction": "a", "output": 5},
            {},
            "rows.jsonl line 1 has no column messages or conversations, and not both prompt and "
            "completion; it has instruction, output. Name yours in spec.dataset.columns.messages, "
            "or in spec.dataset.columns.prompt and spec.dataset.columns.completion",
            id="columns of format instruction with another type",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"question": "a", "answer": "b"},
            {"prompt": "frage", "completion": "answer"},
            "spec.dataset.columns.prompt 'frage': rows.jsonl line 1 has no such column; it has "
            "question, answer",
            id="a configured column is missing",
        ),
        pytest.param(
            DataFormat.TEXT,
            {"body": "a"},
            {},
            "rows.jsonl line 1 has no column text; it has body. Name yours in "
            "spec.dataset.columns.text",
            id="no text",
        ),
        pytest.param(
            DataFormat.INSTRUCTION,
            {"instruction": "a", "output": 5},
            {},
            "rows.jsonl line 1: column 'output' holds int 5, not text; convert it, or name "
            "another column in spec.dataset.columns.output",
            id="a number where text belongs",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": "hello"},
            {},
            "rows.jsonl line 1: column 'messages' holds text, not a list of messages; convert it, "
            "or name another column in spec.dataset.columns.messages",
            id="text where messages belong",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": "wizard", "content": "a"}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 has the role 'wizard'; use one of "
            "system, developer, user, human, assistant, gpt, model, tool, observation",
            id="an unknown role",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": ["user"], "content": "a"}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 has the role ['user']; use one of "
            "system, developer, user, human, assistant, gpt, model, tool, observation",
            id="a role that is a list",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [DIALOGUE[0], {"role": "assistant", "text": "yo"}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 2 has no text: it has role, text, and "
            "neither content nor value; write its text as content, or delete the row",
            id="a misspelt key",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"conversations": [{"from": "gpt", "value": None}]},
            {},
            "rows.jsonl line 1: column 'conversations' turn 1 has no text: it has from, value "
            "(null), and neither content nor value; write its text as content, or delete the row",
            id="null content",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": "user", "content": False}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 holds a truth value; only text can be "
            "trained on",
            id="a truth value as content",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": "user", "content": 0}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 holds int 0; only text can be trained on",
            id="zero as content",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 has a part without text; write the text "
            "of each part as text",
            id="a misspelt key in a part",
        ),
        pytest.param(
            DataFormat.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            {},
            "rows.jsonl line 1: column 'messages' turn 1 holds a list; only text can be trained on",
            id="a picture",
        ),
    ],
)
def test_a_wrong_row_is_named_with_what_it_has_and_the_field_to_set(
    encoder: Any,
    data_format: DataFormat,
    row: dict[str, Any],
    columns: dict[str, str],
    sentence: str,
) -> None:
    with pytest.raises(DataError) as error:
        encoder(CHATML_TEMPLATE, data_format, **columns).text(**row)
    assert str(error.value) == sentence


def test_a_conversation_that_the_template_refuses_is_named(encoder: Any) -> None:
    with pytest.raises(
        DataError, match=r"^rows\.jsonl line 1: the model's chat template refuses.*must alternate"
    ):
        encoder(ALTERNATING).learned(messages=[DIALOGUE[0], *DIALOGUE])


def test_a_turn_that_cannot_be_found_in_the_rendered_text_is_named(encoder: Any) -> None:
    shouting = CHATML_TEMPLATE.replace("message['content']", "messages | length ~ '-' ~ index")
    shouting = "{% set index = messages[0].content ~ messages[-1].content %}" + shouting
    with pytest.raises(DataError, match=r"^rows\.jsonl line 1: turn 2 does not begin with"):
        encoder(shouting).learned(messages=DIALOGUE)
