"""Random manifests, rows and chat templates, each from a seed, most of them almost right."""

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2].parent
NASTY_TEXTS = (
    "", " ", "\n", "\t", "\u0000", "\u0085", "\u2028", "\ufeff", "\u202e", "é", "e\u0301", "👩‍🚀",
    "a" * 300, "x" * 5000, "../..", "/", "~", "~nobody/x", "file:///", "file://host/x", "https://",
    "azureml://x", "hf://", "pvc://", "{", "}", "{}", "{name}", "{namespace}/{name}", "{nam",
    "${x}", "$(X)", "$$", "%", "%s", "*", "[", "(", "\\", "'", '"', "`id`", ":", "- a", "# no",
    "null", "yes", "0x10", "1e3", "1_000", ".inf", "2001-01-01", "12:30", "=", "<<", "-1", "1Gi",
    "1h", "h", "P1D", "9" * 400, "1e400", "<|im_end|>", "<|im_start|>assistant\n", "[/INST]",
    "</s>", "<unk>", "</think>",
)  # fmt: skip
NASTY_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.0, -0.0, 0.5, 1e-30, 1e308, float("inf"), float("nan"), 2**31,
    2**63, 2**64, 10**400, [], {}, [[]], [{}], {"": ""}, [None], {"a": {"b": {"c": 1}}}, b"x",
)  # fmt: skip
YAML_PIECES = (
    ":", ": ", "- ", "{", "}", "[", "]", ",", "&a ", "*a", "<<: ", "!!python/object:os.system ",
    "!!set ", "!!binary x", "!x ", "|", ">", "'", '"', "\t", "\x00", "\x07", "%YAML 1.1\n", "---\n",
    "...\n", "\r", "\r\n", "\ufeff", "#", "? ", "@", "`", "~", "\u2028", "\ud7ff", "&" * 3, "*" * 3,
)  # fmt: skip

Place = tuple[Any, Any]
"""A dict or a list of a tree, and a key or an index of it."""


def read_manifests() -> list[Any]:
    """Return the documents of the examples, and those of the tests' manifests with a flaw."""
    good = sorted(ROOT.glob("examples/**/*.yaml"))
    bad = sorted(ROOT.glob("tests/manifests/**/*.yaml"))
    files = [*good * (1 + 4 * len(bad) // len(good)), *bad]
    found = []
    for file in files:
        try:
            found += [one for one in yaml.safe_load_all(file.read_text()) if isinstance(one, dict)]
        except yaml.YAMLError:  # some are bad just so
            continue
    return found


def places(tree: Any) -> list[Place]:
    """Return every place of a tree."""
    found, rest = [], [tree]
    while rest:
        parent = rest.pop()
        items = parent.items() if isinstance(parent, dict) else enumerate(parent)
        for key, value in items:
            found.append((parent, key))
            if isinstance(value, (dict, list)):
                rest.append(value)
    return found


def nasty(choose: random.Random) -> Any:
    """Return a value that somebody may write by mistake, or to break something."""
    if choose.random() < 0.05:
        deep: Any = "deep"
        for _ in range(choose.choice((5, 40, 150))):
            deep = [deep] if choose.random() < 0.5 else {"a": deep}
        return deep
    return deepcopy(choose.choice((*NASTY_TEXTS, *NASTY_VALUES)))


def change(tree: Any, choose: random.Random) -> None:
    """Change one place of a tree: another value, no value, another name, one of somewhere else."""
    found = places(tree)
    if not found:
        return
    parent, key = choose.choice(found)
    how = choose.randrange(7)
    if how <= 2:
        parent[key] = nasty(choose)
    elif how == 3:
        del parent[key]
    elif how == 4:
        other, name = choose.choice(found)
        parent[key] = deepcopy(other[name])
    elif how == 5 and isinstance(parent, dict):
        names = (str(key).upper(), f"{key}s", nasty(choose), str(key)[:-1])
        name = choose.choice([one for one in names if not isinstance(one, (dict, list))])
        parent[name] = parent.pop(key)
    else:
        parent[key] = [parent[key]] if choose.random() < 0.5 else {"value": parent[key]}


def change_text(text: str, choose: random.Random, pieces: Sequence[str]) -> str:
    """Change some characters of a text."""
    for _ in range(choose.randint(1, 4)):
        at = choose.randint(0, len(text))
        end = min(len(text), at + choose.choice((0, 0, 1, 1, 5, 40)))
        text = text[:at] + choose.choice(("", *pieces)) + text[end:]
    return text[: choose.randint(0, len(text))] if choose.random() < 0.1 else text


def manifest(choose: random.Random, originals: Sequence[Any]) -> bytes:
    """Return a file of one or two documents."""
    documents = [deepcopy(choose.choice(originals)) for _ in range(choose.choice((1, 1, 1, 1, 2)))]
    for document in documents:
        for _ in range(choose.choice((0, 1, 1, 1, 2, 4))):
            change(document, choose)
    text = _as_text(documents, choose)
    if choose.random() < 0.01:
        text += "\nx: " + choose.choice("[{") * 5000
    if choose.random() < 0.25:
        text = change_text(text, choose, YAML_PIECES)
    data = text.encode("utf-8", "surrogatepass")
    if choose.random() < 0.02:
        data = choose.choice((data[1::2], text.encode("utf-16", "surrogatepass"), b"\xff" + data))
    return data


def _as_text(documents: Sequence[Any], choose: random.Random) -> str:
    try:
        if choose.random() < 0.2:
            return json.dumps(documents[0], default=str, skipkeys=True)
        return yaml.safe_dump_all(documents, allow_unicode=choose.random() < 0.7)
    except (RecursionError, yaml.YAMLError, ValueError):  # too deep to be written this way
        return "{}"


CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which is the capital of France?"},
        {"role": "assistant", "content": "Paris", "reasoning_content": "An easy one."},
        {"role": "user", "content": "And of Peru?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "find", "arguments": '{"of": "Peru"}'}}
            ],
        },
        {"role": "tool", "content": "Lima", "name": "find"},
        {"role": "assistant", "content": "Lima.", "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
}
ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "chat": (
        CONVERSATION,
        {"messages": CONVERSATION["messages"][:3]},
        {"messages": [dict(one) for one in CONVERSATION["messages"][1:3]]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "2 + 2?", "completion": "4"},
    ),
    "instruction": ({"instruction": "Add.", "input": "2, 2", "output": "4"},),
    "text": ({"text": "One line of text.\nAnother one."},),
}


def row(choose: random.Random, data_format: str) -> bytes:
    """Return one line of JSON."""
    made = deepcopy(choose.choice(ROWS[data_format]))
    for _ in range(choose.choice((0, 1, 1, 2, 3))):
        parent, key = choose.choice(places(made) or [(made, "text")])
        if isinstance(parent.get(key) if isinstance(parent, dict) else parent[key], str):
            texts = (*NASTY_TEXTS, "\ud83d")
            text = str(parent[key])
            at = choose.randint(0, len(text))
            parent[key] = text[:at] + choose.choice(texts) + choose.choice((text[at:], ""))
        else:
            change(made, choose)
    try:
        line = json.dumps(made, default=str, skipkeys=True, ensure_ascii=choose.random() < 0.5)
    except (RecursionError, ValueError):
        line = "{}"
    if choose.random() < 0.01:
        line = line[:-1] + ', "x": ' + choose.choice("[{") * 5000
    data = line.encode("utf-8", "surrogatepass")
    if choose.random() < 0.05:
        at = choose.randint(0, len(data))
        data = data[:at] + bytes([choose.randrange(256)]) + data[at + choose.randint(0, 2) :]
    return data.replace(b"\n", b" ")


TEMPLATE_PIECES = (
    "{{ ", " }}", "{% ", " %}", "{%- endfor %}", "{% if x %}", "{% endif %}", "{% raw %}", "{#",
    "#}", "message", "messages", "['role']", "['content']", ".strip()", "|trim", "|upper",
    "|tojson", "loop.last", "raise_exception('no')", "add_generation_prompt", "not ", "messages[0]",
    "messages[-1]", "tools", "{% generation %}", "{% endgeneration %}", "strftime_now('%d')", "'",
    '"', "{% set ns = namespace(x=0) %}", "{{ 1/0 }}", "{{ messages | length }}", "{% break %}",
    "<|im_end|>", "<|im_start|>assistant\n", " ", "\n",
)  # fmt: skip


def template(choose: random.Random, originals: Sequence[str]) -> str:
    """Return a chat template, of which some pieces may be others."""
    return change_text(choose.choice(originals), choose, TEMPLATE_PIECES)


Check = Callable[[bytes], None]
"""Takes one input and raises where it does what no input may."""
