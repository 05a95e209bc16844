"""Rows rendered and tokenised once have the tokens and labels of the plain way, or its errors."""

import random
from functools import cache
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource, LongRows
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.source import Row
from finetune_trainer.data.template import ChatTemplate
from finetune_trainer.errors import ConfigError, DataError
from plain_tokens import PlainEncoder
from published_templates import CHATML, FAMILIES
from template_shapes import PLAIN_TOKENS, SHAPES, SPECIAL_TOKENS
from text_fixtures import TOKENIZERS, family_tokenizer, tiny_tokenizer

TEXTS = [
    *("n", "Paris", " Paris ", "Two words.", "\n\nTwo\nlines\n\n", "    indented", "", "😀 naïve"),
    *("assistant", "user", "x" * 90, "A sentence of some words. " * 6, "<|im_end|>", "</s>"),
    *("<think>hm</think>yes", "e\u0301", "\t", "  \n", "[/INST]", "<|im_start|>assistant\n"),
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
# Each does something with its messages that a pass over them must see, or refuse.
LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HOSTILE = {
    "counts its messages": "{{ messages | length }}" + LOOP + "{% endfor %}" + ASKS,
    "counts them at the end": LOOP + "{% endfor %}{{ messages | length }}" + ASKS,
    "knows the last one": LOOP + "{% if loop.last %}!{% endif %}{% endfor %}" + ASKS,
    "looks ahead": LOOP + "{{ loop.nextitem is defined }}{% endfor %}" + ASKS,
    "knows the length of the loop": LOOP + "{{ loop.length }}{% endfor %}" + ASKS,
    "looks back": LOOP + "{{ loop.previtem.role if loop.index0 }}{% endfor %}" + ASKS,
    "reads the next by its number": LOOP + "{{ (messages[loop.index] or {}).role }}{% endfor %}",
    "reads itself by its number": LOOP + "{{ messages[loop.index0].content }}{% endfor %}" + ASKS,
    "reads the third at once": "{{ messages[2].content }}" + LOOP + "{% endfor %}" + ASKS,
    "reads the last": LOOP + "{% endfor %}{{ messages[-1].role }}" + ASKS,
    "remembers": "{% set seen = namespace(n=0) %}"
    + LOOP
    + "{% set seen.n = seen.n + 1 %}{{ seen.n }}{% endfor %}{{ seen.n }}"
    + ASKS,
    "remembers at the end": "{% set seen = namespace(n=0) %}"
    + LOOP
    + "{{ seen.n }}{% endfor %}{% set seen.n = 7 %}{{ seen.n }}"
    + ASKS,
    "remembers what changes": LOOP + "{{ loop.changed(m.role) }}{% endfor %}" + ASKS,
    "uses up an iterator": "{% set rest = messages | map(attribute='role') %}"
    + LOOP
    + "{% endfor %}{{ rest | list }}"
    + ASKS,
    "prints all": LOOP + "{% endfor %}{{ messages }}" + ASKS,
    "prints all as JSON": "{{ messages | tojson }}" + LOOP + "{% endfor %}" + ASKS,
    "filters its loop": LOOP.replace("messages", "messages if m.content") + "{% endfor %}" + ASKS,
    "says another name behind it": "{% set m = 1 %}" + LOOP + "{% endfor %}{{ m }}" + ASKS,
    "stores what is said behind": LOOP + "{% set x = 1 %}{% endfor %}{{ x is defined }}" + ASKS,
    "stops early": LOOP + "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}" + ASKS,
    "has two loops": LOOP + "{% endfor %}" + LOOP + "{% endfor %}" + ASKS,
    "loops within a loop": LOOP + "{% for n in messages %}{{ n.role }}{% endfor %}{% endfor %}",
    "compares messages": LOOP + "{{ m == messages[0] }}{% endfor %}" + ASKS,
    "asks what they are": LOOP + "{{ messages is sequence }}{{ messages is string }}{% endfor %}",
    "asks for an attribute": LOOP + "{{ messages.copy is defined }}{% endfor %}" + ASKS,
    "has a macro": "{% macro say(m) %}{{ m.role }}{% endmacro %}"
    + LOOP
    + "{{ say(m) }}{% endfor %}",
}


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
    """Hold both ways against each other; return how many conversations gave tokens."""
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
def test_rows_have_the_tokens_of_the_plain_way(family: str, kind: str) -> None:
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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_looks_elsewhere_is_rendered_the_plain_way(
    name: str, tokenizer: Any
) -> None:
    compare(tokenizer(HOSTILE[name]), name, 25)


BEFORE = [
    *("{{ bos_token }}", "{{ messages[0].role }}", "{% if messages %}!{% endif %}"),
    *("{% set a = 1 %}", "{% set a = messages[1] %}", "{{ messages | length }}"),
    *("{% set messages = messages[1:] %}", "{{ add_generation_prompt }}", "{{ (tools or []) }}"),
]
WITHIN = [
    *("{{ loop.index0 }}", "{% if loop.first %}first{% endif %}", "{% set a = m.role %}"),
    *("{{ '!' if loop.last }}", "{{ loop.previtem.role }}", "{{ messages[loop.index0 - 1].role }}"),
    *("{% set n.k = n.k + 1 %}", "{{ n.k }}", "{{ a }}", "{{ add_generation_prompt }}"),
    *("{% if n.k > 2 %}many{% endif %}", "{{ loop.cycle('x', 'y') }}", "{{ loop.revindex }}"),
    *("{% if m.role == 'user' %}{% set n.asked = m.content %}{% endif %}", "{{ n.asked }}"),
    *("{% for o in messages[:2] %}{{ o.role }}{% endfor %}", "{{ messages[0].content }}"),
    *("{% if loop.index == 5 %}{{ raise_exception('five') }}{% endif %}", "{{ m.thoughts }}"),
]
BEHIND = [
    *(
        "{{ n.k }}",
        "{% set n.k = 0 %}",
        "{{ a }}",
        "{{ m }}",
        "{{ messages[-1].role }}",
        "{{ loop }}",
    ),
    *("{% set b = 2 %}{{ b }}", "{{ n.asked }}", "{% if not add_generation_prompt %}.{% endif %}"),
    *("{% for o in messages %}{{ o.role }}{% endfor %}", "{{ messages[1].role }}"),
]


def random_template(choose: random.Random) -> str:
    """Return a template that may read and remember anything, before, within or behind its loop."""

    def some(pieces: list[str]) -> str:
        return "".join(choose.sample(pieces, choose.choice([0, 0, 1, 1, 2, 3])))

    head = "{{ '<|im_start|>' + m.role + '\\n' }}"
    loop = ["{% for m in messages %}", some(WITHIN), head, "{{ m.content + '<|im_end|>\\n' }}"]
    start = "{% set n = namespace(k=0, asked='') %}" + some(BEFORE)
    return "".join([start, *loop, some(WITHIN), "{% endfor %}", some(BEHIND), ASKS])


def test_random_templates_give_the_same_tokens_or_the_same_errors(tokenizer: Any) -> None:
    given = 0
    for seed in range(120):
        template = random_template(random.Random(seed))
        given += compare(tokenizer(template), str(seed), 4)
    assert given > 70


def test_rows_that_are_cut_have_the_tokens_of_the_plain_way(tokenizer: Any) -> None:
    long_rows = {"max_seq_len": 16, "long_rows": LongRows.TRUNCATE}
    assert compare(tokenizer(CHATML), "cut", 40, **long_rows)


FAST = {
    **{
        family: FAMILIES[family].template
        for family in ("chatml", "deepseek", "gemma", "llama-2", "llama-3", "mistral-v1")
    },
    **{name: HOSTILE[name] for name in ("remembers", "remembers at the end", "looks back")},
}


@pytest.mark.parametrize("name", FAST)
def test_one_pass_renders_every_turn_of_the_usual_templates(name: str) -> None:
    tokenizer = family_tokenizer("llama-2", "bytes")
    tokenizer.chat_template = FAST[name]
    template = ChatTemplate(tokenizer)
    roles = ["user", "assistant"] * 4
    messages = [{"role": role, "content": f"Text {at}."} for at, role in enumerate(roles)]
    turns = [1, 3, 5, 7]
    marked = {turn: messages[turn] | {"content": "other"} for turn in turns}
    after = [turn + 1 for turn in turns]
    texts = template.beginnings(messages, (), after, marked, add_generation_prompt=False)
    prompts = template.beginnings(messages, (), turns, {}, add_generation_prompt=True)
    assert texts is not None
    assert prompts is not None
    for turn in turns:
        before = messages[:turn]
        assert texts.text(turn + 1) == template.render(messages[: turn + 1], (), "")
        assert texts.other(turn) == template.render([*before, marked[turn]], (), "")
        assert prompts.text(turn) == template.render(before, (), "", add_generation_prompt=True)
