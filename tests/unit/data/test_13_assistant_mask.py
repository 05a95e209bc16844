"""All that a generation has to say is learned, on templates of the shapes that models ship.

The shapes are those of Llama 3, Qwen3, Gemma 3 and gpt-oss: how they name roles, where they trim,
what they add to the last turn, leave out of earlier ones or refuse, and how each turn ends.
"""

from functools import cache
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError
from support.data.template_shapes import PLAIN_TOKENS, SHAPES, SPECIAL_TOKENS
from support.data.text_fixtures import tiny_tokenizer

DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A sequence."},
    {"role": "user", "content": "And a tuple, é?"},
    {"role": "assistant", "content": " Also one, naïve 😀. "},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
THOUGHTS = {"thinking": "look", "reasoning_content": "look"}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "It is 21 degrees"},
    {"role": "assistant", "content": "Warm."},
]
LLAMA3_CALL = '{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>'
NO_THOUGHT = "<think>\n\n</think>\n\n"  # what Qwen3 says where it has no thought
QWEN3_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
)
QWEN3_THOUGHT = "<think>\nlook\n</think>\n\n"
FINAL = "<|channel|>final<|message|>"
GPT_OSS_THOUGHT = "<|channel|>analysis<|message|>look<|end|><|start|>assistant"
GPT_OSS_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>'


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the text of each run of labels that a row has on a shape of template."""

    @cache
    def encoder(shape: str, has_marks: bool) -> tuple[RowEncoder, Any]:
        tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("t"))
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
        tokenizer.add_tokens(PLAIN_TOKENS)
        begin, end = ("{%- generation %}", "{%- endgeneration %}") if has_marks else ("", "")
        tokenizer.chat_template = SHAPES[shape].replace("GEN", begin).replace("END", end)
        source = DatasetSource(path="rows.jsonl")
        return RowEncoder(DataConfig(train=source, cache_dir="unused"), tokenizer), tokenizer

    def learned(shape: str, *, has_marks: bool = False, **row: Any) -> list[str]:
        made, tokenizer = encoder(shape, has_marks)
        [encoded] = made.encode([Row("rows.jsonl line 1", row)])
        runs: list[list[int]] = []
        for part in encoded.parts:
            was_label = False
            for token, is_label in zip(part.tokens, part.is_label, strict=True):
                if is_label and not was_label:
                    runs.append([])
                if is_label:
                    runs[-1].append(token)
                was_label = is_label
        return [tokenizer.decode(run) for run in runs]

    return learned


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        ("llama3", ["A sequence.<|eot_id|>", "Also one, naïve 😀.<|eot_id|>"]),
        (
            "qwen3",
            [NO_THOUGHT + "A sequence.<|im_end|>", NO_THOUGHT + " Also one, naïve 😀. <|im_end|>"],
        ),
        ("gemma3", ["A sequence.<end_of_turn>", "Also one, naïve 😀.<end_of_turn>"]),
        ("gpt-oss", [FINAL + "A sequence.<|return|>", FINAL + " Also one, naïve 😀. <|return|>"]),
    ],
)
def test_every_answer_is_learned_from_the_end_of_its_prompt_to_its_stop_token(
    learned: Any, shape: str, answers: list[str]
) -> None:
    assert learned(shape, messages=DIALOGUE) == answers
    assert learned(shape, messages=DIALOGUE, has_marks=True) == answers


@pytest.mark.parametrize(
    ("shape", "thoughts", "answers"),
    [
        ("llama3", {}, [LLAMA3_CALL, "Warm.<|eot_id|>"]),
        ("qwen3", {}, [NO_THOUGHT + QWEN3_CALL, NO_THOUGHT + "Warm.<|im_end|>"]),
        ("qwen3", THOUGHTS, [QWEN3_THOUGHT + QWEN3_CALL, NO_THOUGHT + "Warm.<|im_end|>"]),
        ("gpt-oss", {}, [GPT_OSS_CALL, FINAL + "Warm.<|return|>"]),
        ("gpt-oss", THOUGHTS, [GPT_OSS_THOUGHT + GPT_OSS_CALL, FINAL + "Warm.<|return|>"]),
    ],
)
def test_a_call_is_learned_whole_and_what_the_tool_answers_is_not(
    learned: Any, shape: str, thoughts: dict[str, str], answers: list[str]
) -> None:
    calling = [CALLING[0], CALLING[1] | thoughts, *CALLING[2:]]
    assert learned(shape, messages=calling, tools=TOOLS) == answers
    assert learned(shape, messages=calling, tools=TOOLS, has_marks=True) == answers


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        ("llama3", [LLAMA3_CALL, "Warm.<|eot_id|>", "Also one, naïve 😀.<|eot_id|>"]),
        (
            "qwen3",
            [
                NO_THOUGHT + QWEN3_CALL,
                NO_THOUGHT + "Warm.<|im_end|>",
                NO_THOUGHT + " Also one, naïve 😀. <|im_end|>",
            ],
        ),
        (
            "gpt-oss",
            [
                GPT_OSS_CALL,
                FINAL + "Warm.<|return|>",
                FINAL + " Also one, naïve 😀. <|return|>",
            ],
        ),
    ],
)
def test_a_call_in_the_middle_of_a_dialogue_is_learned_too(
    learned: Any, shape: str, answers: list[str]
) -> None:
    assert learned(shape, messages=[*CALLING, *DIALOGUE[3:]], tools=TOOLS) == answers


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        ("qwen3", [QWEN3_THOUGHT + QWEN3_CALL] * 2 + [NO_THOUGHT + "Warm.<|im_end|>"]),
        ("gpt-oss", [GPT_OSS_THOUGHT + GPT_OSS_CALL] * 2 + [FINAL + "Warm.<|return|>"]),
    ],
)
def test_several_calls_with_thoughts_before_one_answer_are_learned(
    learned: Any, shape: str, answers: list[str]
) -> None:
    call = CALLING[1] | THOUGHTS
    calling = [CALLING[0], call, CALLING[2], call, *CALLING[2:]]
    assert learned(shape, messages=calling, tools=TOOLS) == answers


def test_tools_and_arguments_may_be_json_text(learned: Any) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    calling = [CALLING[0], CALLING[1] | {"tool_calls": [call]}, *CALLING[2:]]
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    answers = [NO_THOUGHT + QWEN3_CALL, NO_THOUGHT + "Warm.<|im_end|>"]
    assert learned("qwen3", messages=calling, tools=tools) == answers


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}])
def test_an_answer_that_its_row_excludes_is_not_learned(
    learned: Any, flag: dict[str, Any], has_marks: bool
) -> None:
    messages = [*DIALOGUE[:2], DIALOGUE[2] | flag, DIALOGUE[3], DIALOGUE[4] | {"weight": 1}]
    answers = learned("llama3", messages=messages, has_marks=has_marks)
    assert answers == ["Also one, naïve 😀.<|eot_id|>"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        pytest.param(
            {"messages": DIALOGUE, "tools": "weather"},
            "rows.jsonl line 1: column 'tools' is not JSON: Expecting value: line 1 column 1 "
            "(char 0); correct or delete the row",
            id="tools that are not JSON",
        ),
        pytest.param(
            {"messages": DIALOGUE, "tools": ["weather"]},
            "rows.jsonl line 1: column 'tools' is not a list of objects; correct the row",
            id="names of tools",
        ),
        pytest.param(
            {"messages": [CALLING[0], {"role": "assistant", "tool_calls": {"name": "weather"}}]},
            "rows.jsonl line 1: column 'messages' turn 2: tool_calls is not a list of objects; "
            "correct the row",
            id="one call without a list",
        ),
        pytest.param(
            {"messages": [DIALOGUE[1], DIALOGUE[2] | {"weight": 0.5}]},
            "rows.jsonl line 1: column 'messages' turn 2 has weight 0.5; write 1 to learn "
            "the turn, else 0",
            id="half a weight",
        ),
        pytest.param(
            {"messages": DIALOGUE, "tools": TOOLS},
            "rows.jsonl line 1 has tools, which the model's chat template leaves out; use a "
            "template that shows them (spec.model.chatTemplate), or delete them",
            id="a template without tools",
        ),
        pytest.param(
            {"messages": CALLING},
            "rows.jsonl line 1 has tool_calls, which the model's chat template leaves out; use a "
            "template that shows them (spec.model.chatTemplate), or delete them",
            id="a template without calls",
        ),
    ],
)
def test_a_row_whose_tools_or_flags_cannot_be_used_is_refused(
    learned: Any, row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError) as error:
        learned("gemma3", **row)
    assert str(error.value) == sentence
