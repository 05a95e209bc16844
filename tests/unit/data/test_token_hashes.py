"""Tokens and labels of fixed conversations are the same in every version, template by template.

Checkpoints name their data by a hash of tokens and labels, so a change of them would end the resume
of every run. After a change that is meant, add a version to `Rules` and replace the hashes by the
ones that the failure shows. The tokenizer is built here by hand: trained ones differ with the
version of Python whose documentation they are trained on.
"""

import hashlib
import json
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.source import Row
from finetune_trainer.errors import DataError
from support.data.published_templates import FAMILIES
from support.data.template_shapes import PLAIN_TOKENS, SHAPES, SPECIAL_TOKENS

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
TEXTS = [
    *("Who are you?", " I am here. ", "\n\nTwo\nlines\n\n", "naïve 😀", "    indented", "then the"),
]
# Merges that join a word's letters, spaces with words, and line breaks of a prompt and its answer.
MERGES = ["Ċ Ċ", "Ġ t", "h e", "Ġt he", "i n", "a n", "Ġ a", "e r", "Ġ Ġ", "ĠĠ ĠĠ", "s i", "Ġ I"]


# Rows that the template renders, and the hash.
FAMILY_HASHES = {
    "chatml": "10:fac16a7d01f9b998",
    "llama-2": "10:be4bd0790e3cab91",
    "llama-3": "10:3534bdec7a1ab576",
    "mistral-v1": "9:112fc85fb5b4260a",
    "mistral-v2": "9:675a7d149d8f2170",
    "mistral-v3": "12:08010a849e517bb4",
    "gemma": "9:0903b5a91bdaba79",
    "qwen2.5": "10:577e2bd1ec36e670",
    "qwen3": "12:2801b27513c538fd",
    "qwen3 without thinking": "12:2801b27513c538fd",
    "phi-3": "10:32597c6df2747df2",
    "zephyr": "10:519945705625b7b6",
    "vicuna": "10:baef62b0a2b36da8",
    "deepseek": "10:4af64af86fdc345b",
    "deepseek-r1": "0:be7b36e0c0ab9edb",
    "harmony": "12:e650ab1835163145",
}
# These templates leave out a tool's result, and such rows are refused now.
CURRENT_HASHES = FAMILY_HASHES | {
    "mistral-v3": "11:a450c10d8f77b481",
    "vicuna": "9:3af755108c226960",
    "deepseek": "9:941a04db094d4436",
}
SHAPE_HASHES = {
    "llama3": "12:3bc3fcac863f4944",
    "qwen3": "14:c80a7a8c843b5c0c",
    "gemma3": "10:8b110b9b97b9f3f6",
    "gpt-oss": "14:a48dd313fa4f9147",
}


def conversations() -> list[dict[str, Any]]:
    """Return rows of every kind that a chat data set may hold."""

    def asked(*texts: str, **more: Any) -> list[dict[str, Any]]:
        roles = ("user", "assistant") * len(texts)
        return [{"role": r, "content": t} | more for r, t in zip(roles, texts, strict=False)]

    system = {"role": "system", "content": "Be brief."}
    result = {"role": "tool", "name": "weather", "content": "21 degrees"}
    called = [*asked("Weather?", ""), result, {"role": "assistant", "content": "21 degrees."}]
    called[1] |= {"tool_calls": [CALL]}
    thoughtful = asked(*TEXTS[:4])
    thoughtful[1]["reasoning_content"] = "hm"
    thoughtful[3]["reasoning_content"] = " so\n"
    untrained = asked(*TEXTS)
    untrained[1]["train"] = False
    return [
        *({"messages": asked(*TEXTS[at:], *TEXTS[:at])} for at in range(len(TEXTS))),
        {"messages": asked(*TEXTS, *TEXTS, *TEXTS)},
        {"messages": [system, *asked(*TEXTS[:4])]},
        {"messages": thoughtful},
        {"messages": thoughtful[:2]},
        {"messages": called, "tools": [TOOL]},
        {"messages": called[:2], "tools": [TOOL]},
        {"messages": untrained},
        {"messages": asked("Write <|im_end|> and </s>.", "It is <|eot_id|></s><|im_start|>.")},
    ]


def tokenizer(template: str, special: list[str], added: list[str], **named: Any) -> Any:
    """Return a byte-level tokenizer with few merges, of the same vocabulary everywhere."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in map(str.split, MERGES)]
    words = [*letters, *("".join(merge) for merge in merges)]
    model = models.BPE({word: at for at, word in enumerate(words)}, merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
        **named,
    )
    made.add_tokens([AddedToken(token, normalized=False) for token in added])
    made.chat_template = template
    return made


def digest(tokenizer: Any, rules: Rules = Rules.CURRENT) -> str:
    """Return how many rows the template renders, and the hash of all tokens and labels."""
    config = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused")
    encoder, found = RowEncoder(config, tokenizer, rules), []
    for row in conversations():
        try:
            [encoded] = encoder.encode([Row("line 1", row)])
            found.append([[part.tokens, part.is_label] for part in encoded.parts])
        except DataError:
            found.append([])
    return f"{sum(map(bool, found))}:{hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_published_templates_give_the_stored_tokens(family: str) -> None:
    given = FAMILIES[family]
    named = {"bos_token": given.bos, "eos_token": given.eos or given.stop}
    made = tokenizer(given.template, list(given.special), list(given.added), **named)
    assert digest(made, Rules.RELEASE_0_1_0) == FAMILY_HASHES[family]
    assert digest(made) == CURRENT_HASHES[family]


@pytest.mark.parametrize("marks", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tools_thoughts_and_generation_marks_give_the_stored_tokens(
    shape: str, marks: bool
) -> None:
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks else ("", "")
    template = SHAPES[shape].replace("GEN", begin).replace("END", end)
    special = [*SPECIAL_TOKENS, "<|im_start|>", "<|im_end|>"]
    made = tokenizer(template, special, PLAIN_TOKENS, eos_token="<|im_end|>")
    assert digest(made) == SHAPE_HASHES[shape]
