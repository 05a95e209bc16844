"""JSON of any depth is decoded; a string replaces each subtree below the limit."""

import json
import random
from typing import Any

import orjson
import pytest

from finetune_operator.kube.decoding import CUT, IN_EVENT, IN_LIST, MAX_DEPTH, decode, shallow


def nested(levels: int, *, lists: bool = False) -> bytes:
    """Return an object of that many levels."""
    opening, closing = (b"[", b"]") if lists else (b'{"a":', b"}")
    return b'{"a":' + opening * (levels - 1) + b"1" + closing * (levels - 1) + b"}"


def depth(value: Any) -> int:
    levels, inside = 0, [value]
    while inside := [one for one in inside if isinstance(one, dict | list)]:
        levels += 1
        inside = [one for part in inside for one in _inside(part)]
    return levels


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


@pytest.mark.parametrize("lists", [False, True], ids=["objects", "arrays"])
@pytest.mark.parametrize(
    "levels", [1, 99, 100, 101, 102, 253, 254, 255, 256, 500, 990, 1000, 1023, 1024, 1025, 100_000]
)
@pytest.mark.parametrize("around", [0, IN_EVENT, IN_LIST])
def test_an_object_of_any_depth_is_decoded_to_the_same_depth_in_lists_and_watches(
    levels: int, lists: bool, around: int
) -> None:
    alone = decode(nested(levels, lists=lists))
    assert depth(alone) == min(levels, MAX_DEPTH)
    text = b'{"a":' * around + nested(levels, lists=lists) + b"}" * around
    value = decode(text, around)
    for _ in range(around):
        value = value["a"]
    assert value == alone
    assert orjson.loads(orjson.dumps(value)) == value
    assert (CUT in str(value)) == (levels > MAX_DEPTH)


@pytest.mark.parametrize(
    "text",
    [
        rb'{"a":"[[[[[["}',
        rb'{"a":"\"[[[[","b":"]]]]\\"}',
        rb'{"\\":"\\\"[","b":["[\\\\"]}',
        b'{"\xc3\xa9[":["\xe2\x82\xac{"]}',
        b'["{",["}",["]"]]]',
    ],
)
def test_brackets_in_strings_are_no_levels(text: bytes) -> None:
    assert shallow(text, 3) == text


def random_json(chance: random.Random, levels: int) -> Any:
    if levels == 0 or chance.random() < 0.3:
        return chance.choice([1, None, True, "", '"', "\\", '\\"', "{[", "]}", '"}', "\\\\", "é"])
    parts = [random_json(chance, levels - 1) for _ in range(chance.randrange(4))]
    return parts if chance.random() < 0.5 else {f'k\\"[{n}': one for n, one in enumerate(parts)}


def cut(value: Any, levels: int) -> Any:
    if not isinstance(value, dict | list):
        return value
    if levels == 0:
        return CUT
    if isinstance(value, list):
        return [cut(one, levels - 1) for one in value]
    return {key: cut(one, levels - 1) for key, one in value.items()}


def test_exactly_the_subtrees_below_the_limit_are_replaced() -> None:
    chance = random.Random(7)
    for _ in range(500):
        value, levels = random_json(chance, 8), chance.randrange(1, 7)
        for spaces in (None, 1):
            text = json.dumps(value, indent=spaces, ensure_ascii=chance.random() < 0.5)
            assert orjson.loads(shallow(text.encode(), levels)) == cut(value, levels)


@pytest.mark.parametrize("text", [b"[" * 5000, b'{"a":' * 300, b"[" * 300 + b"]" * 299, b"]" * 300])
def test_a_text_that_breaks_off_is_no_json(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        decode(text)
