"""Labels with the chat templates of widely used models, from `tests/corpus/chat_templates`.

The stored labels are compared, and independently of them the conversation and the prompts of
`apply_chat_template`, which knows no turns.
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from finetune_trainer.data.encoding import EncodedRow
from finetune_trainer.data.rules import Rules
from finetune_trainer.data.template import FIXED_DATE
from finetune_trainer.errors import DataError
from support.data.chat_templates import (
    CONVERSATIONS,
    ChatTemplateCase,
    cases,
    encode,
    learned,
    learned_texts,
    learned_turns,
    tokenizer,
)

LEARNED = [
    pytest.param(case, conversation, id=f"{name}-{conversation}")
    for name, case in cases().items()
    for conversation, result in case.learned.items()
    if not isinstance(result, str)
]


def published_text(fast: Any, row: Any, num_messages: int, *, is_prompt: bool) -> str:
    """Render the first messages as inference does, on the date of the trainer."""
    template = re.sub(
        r"strftime_now\('(.*?)'\)",
        lambda call: repr(FIXED_DATE.strftime(call[1])),
        fast.chat_template,
    )
    return str(
        fast.apply_chat_template(
            row["messages"][:num_messages],
            tools=row.get("tools"),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=is_prompt,
        )
    )


def words(message: dict[str, Any]) -> list[str]:
    """Return the texts of a turn, in the order of templates."""
    calls = [one["function"] for one in message.get("tool_calls", [])]
    texts = [message.get("reasoning_content", ""), message["content"]]
    texts += [text for call in calls for text in (call["name"], *call["arguments"].values())]
    return [text for text in texts if text]


def last_tokens(fast: Any, row: EncodedRow) -> list[str]:
    return [fast.convert_ids_to_tokens(part.tokens[end - 1]) for part, _, end in learned_turns(row)]


def test_the_corpus_has_forty_families() -> None:
    assert len({case.template for case in cases().values()}) >= 40
    assert all(set(case.learned) == set(CONVERSATIONS) for case in cases().values())


@pytest.mark.parametrize("case", cases().values(), ids=cases())
def test_labels_and_refusals_are_the_stored_ones(case: ChatTemplateCase) -> None:
    assert learned(case) == case.learned


@pytest.mark.parametrize(("case", "conversation"), LEARNED)
def test_each_turn_is_learned_after_its_prompt_with_its_stop_token(
    case: ChatTemplateCase, conversation: str
) -> None:
    fast, row = tokenizer(case), CONVERSATIONS[conversation]
    encoded = encode(fast, row)
    places = [at for at, one in enumerate(row["messages"]) if one["role"] == "assistant"]
    turns = list(learned_turns(encoded))
    assert len(turns) == len(places)
    for at, (part, start, end) in zip(places, turns, strict=True):
        prompt = published_text(fast, row, at, is_prompt=True)
        text = fast.decode(part.tokens[start:end])
        assert part.tokens[:start] == fast(prompt, add_special_tokens=False)["input_ids"]
        assert re.search(".*".join(map(re.escape, words(row["messages"][at]))), text, re.DOTALL)
        assert fast.convert_ids_to_tokens(part.tokens[end - 1]) in case.stops
        assert sum(text.count(stop) for stop in case.stops) == 1
        # The template renders the turn like this, but for an end token that it lacks.
        rest = (prompt + text).removesuffix(case.eos or "")
        assert published_text(fast, row, at + 1, is_prompt=False).startswith(rest)
    assert fast.convert_ids_to_tokens(list(encoded.stops)) == last_tokens(fast, encoded)


@pytest.mark.parametrize("case", cases().values(), ids=cases())
def test_a_refusal_names_the_row_and_a_remedy(case: ChatTemplateCase) -> None:
    for result in case.learned.values():
        if isinstance(result, str):
            assert re.match("line 1[: ].*(spec\\.model\\.chatTemplate|correct or delete)", result)


GLM = cases()["glm-4.5"]
CALLS = CONVERSATIONS["tools"]


@pytest.mark.parametrize("close", ["</tool_call>", "<tool_call|>", "[/CALL]", "<|call_end|>"])
def test_a_call_that_only_its_closing_token_ends_is_followed_by_the_end_token(close: str) -> None:
    template = GLM.template.replace("</tool_call>", close)
    fast = tokenizer(replace(GLM, template=template, added=(close, "<tool_call>")))
    called, _ = learned_texts(fast, encode(fast, CALLS))
    before, _ = learned_texts(fast, encode(fast, CALLS, Rules.RELEASE_0_1_0))
    assert called.endswith(f"\n{close}<|endoftext|>")
    assert before.endswith(f"\n{close}")


@pytest.mark.parametrize("family", ["qwen-2.5", "qwen-3", "lfm2-2025-11"])
def test_a_stop_token_that_is_not_special_ends_a_call_as_it_ends_a_text(family: str) -> None:
    given, stop = cases()[family], "<|im_end|>"
    special = tuple(token for token in given.special if token != stop)
    fast = tokenizer(replace(given, special=special, added=(*given.added, stop), eos=special[-1]))
    called, reply = learned_texts(fast, encode(fast, CALLS))
    assert called.endswith(stop)
    assert reply == given.learned["tools"][1]


def with_text_beside_the_call() -> dict[str, Any]:
    """Return a row whose call has text beside it, which templates render as a thought."""
    asked, called, *rest = CALLS["messages"]
    return {**CALLS, "messages": [asked, {**called, "content": "Let me look."}, *rest]}


def test_text_beside_a_call_that_moves_behind_its_result_is_not_learned_again() -> None:
    row = with_text_beside_the_call()
    fast = tokenizer(cases()["gemma-4"])
    _, reply = learned_texts(fast, encode(fast, row, Rules.RELEASE_0_1_0))
    assert reply == "Let me look.Hot today.<turn|>"
    with pytest.raises(DataError, match=r"^line 1: turn 4 does not begin with its generation"):
        encode(fast, row)


@pytest.mark.parametrize("family", ["gpt-oss", "qwen-3", "qwen-2.5", "exaone-4", "llama-4"])
def test_text_beside_a_call_is_learned_once(family: str) -> None:
    fast = tokenizer(cases()[family])
    called, reply = learned_texts(fast, encode(fast, with_text_beside_the_call()))
    assert "Let me look." in called
    assert reply == cases()[family].learned["tools"][1]


ALWAYS_A_HEADER = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name ~ call.function.arguments }}{% endfor %}
{{- '</call>END' if m.tool_calls else m.content + '</reply>END' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>"])
def test_the_header_of_the_next_turn_is_not_learned_with_a_call(end: str) -> None:
    """Command A writes the header after each conversation, with or without a prompt."""
    template, added = ALWAYS_A_HEADER.replace("END", end), ("</call>", "</reply>")
    given = replace(cases()["chatml"], template=template, added=added, eos=end.strip())
    fast = tokenizer(given)
    called, reply = learned_texts(fast, encode(fast, CALLS))
    assert called.endswith(f"</call>{end.strip()}")
    assert reply == f"Hot today.</reply>{end.strip()}"
    before, _ = learned_texts(fast, encode(fast, CALLS, Rules.RELEASE_0_1_0))
    assert "<|im_start|>" in before
