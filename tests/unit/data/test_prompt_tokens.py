"""Prompts counted within a text give the tokens, labels and errors of prompts tokenised alone."""

import random
from functools import cache
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource, LongRows
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.source import Row
from finetune_trainer.errors import ConfigError, DataError
from support.data.published_templates import CHATML, FAMILIES
from support.data.template_shapes import PLAIN_TOKENS, SHAPES, SPECIAL_TOKENS
from support.data.text_fixtures import TOKENIZERS, family_tokenizer, tiny_tokenizer

TEXTS = [
    *("n", "Paris", " Paris ", "Two words.", "\n\nTwo\nlines\n\n", "    indented", "", "😀 naïve"),
    *("assistant", "user", "x" * 90, "A sentence of some words. " * 6, "<|im_end|>", "</s>"),
    *("<think>hm</think>yes", "e\u0301", "\t", "  \n", "[/INST]", "<|im_start|>assistant\n"),
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}


class PlainEncoder(RowEncoder):
    """Tokenises the prompt of each turn separately."""

    def _count_prompt(self, *given: Any) -> None:
        """Return None, as for a tokenizer whose prompts cannot be counted."""
        return None


def conversation(choose: random.Random) -> dict[str, Any]:
    """Return a row; every second one is an ordinary dialogue, which few templates refuse."""
    messages: list[dict[str, Any]] = []
    if choose.random() < 0.5:
        roles = ["user", "assistant"] * choose.randint(1, 5)
        return {"messages": [{"role": r, "content": choose.choice(TEXTS[:5])} for r in roles]}
    if choose.random() < 0.3:
        messages.append({"role": "system", "content": choose.choice(TEXTS)})
    for turn in range(choose.randint(1, 9)):
        role = ("user", "assistant")[(turn + (choose.random() < 0.04)) % 2]
        said: dict[str, Any] = {"role": role, "content": choose.choice(TEXTS[:12])}
        if choose.random() < 0.08:
            said["content"] = choose.choice(TEXTS)
        if role == "assistant" and choose.random() < 0.15:
            said["reasoning_content"] = choose.choice(["hm", " hm\n"])
        if role == "assistant" and choose.random() < 0.08:
            said["train"] = False
        messages.append(said)
        if role == "assistant" and choose.random() < 0.06:
            said["tool_calls"] = [CALL]
            messages.append({"role": "tool", "name": "weather", "content": "21 degrees"})
    return {"messages": messages, **({"tools": [TOOL]} if choose.random() < 0.15 else {})}


def outcome(encoder: RowEncoder, row: dict[str, Any]) -> Any:
    try:
        return list(encoder.encode([Row("line 1", row)]))
    except (DataError, ConfigError) as error:
        return str(error)


def compare(tokenizer: Any, seed: str, count: int, **data: Any) -> int:
    """Compare both encoders; return the number of conversations that gave tokens."""
    config = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused", **data)
    made, plain = RowEncoder(config, tokenizer), PlainEncoder(config, tokenizer)
    choose, given = random.Random(seed), 0
    for _ in range(count):
        row = conversation(choose)
        expected = outcome(plain, row)
        assert outcome(made, row) == expected, row
        given += not isinstance(expected, str)
    return given


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("t")

    @cache
    def with_template(template: str) -> Any:
        made = tiny_tokenizer(folder)
        made.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
        made.add_tokens(PLAIN_TOKENS)
        made.chat_template = template
        return made

    return with_template


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_counted_prompts_give_the_tokens_of_separate_ones(family: str, kind: str) -> None:
    given = compare(family_tokenizer(family, kind), f"{family} {kind}", 12)
    assert given or family == "deepseek-r1"  # no turn of it begins with its prompt


@pytest.mark.parametrize("has_marks", [False, True], ids=["no marks", "marks"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_calls_thoughts_and_generation_marks_change_nothing(
    shape: str, has_marks: bool, tokenizer: Any
) -> None:
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if has_marks else ("", "")
    template = SHAPES[shape].replace("GEN", begin).replace("END", end)
    assert compare(tokenizer(template), shape, 40)


def test_truncated_rows_give_the_tokens_of_separate_prompts(tokenizer: Any) -> None:
    long_rows = {"max_seq_len": 16, "long_rows": LongRows.TRUNCATE}
    assert compare(tokenizer(CHATML), "cut", 40, **long_rows)
