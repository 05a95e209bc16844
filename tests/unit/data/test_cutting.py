"""A huge row is cut before it is tokenised, and no token that is kept changes."""

import random
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from finetune_trainer.config import DataConfig, DatasetSource, LongRows
from finetune_trainer.data.cutting import KNOWN_PATTERNS, Cutter
from finetune_trainer.data.encoding import EncodedRow, RowEncoder
from finetune_trainer.data.sequences import fit
from finetune_trainer.data.source import Row
from support.data.text_fixtures import family_tokenizer

MAX_SEQ_LEN = 48
PIECES = [
    "a",
    "word",
    "e\u0301",
    "\N{GRINNING FACE}",
    "é",
    "1234",
    "!?",
    "'s",
    "\n",
    "\r\n",
    "\t",
    "  ",
    " ",
]


def encode(tokenizer: Any, content: list[str], long_rows: LongRows) -> EncodedRow:
    roles = ["user", "assistant"] * len(content)
    said = [{"role": role, "content": text} for role, text in zip(roles, content, strict=False)]
    config = DataConfig(
        train=DatasetSource(path="rows.jsonl"),
        cache_dir="unused",
        max_seq_len=MAX_SEQ_LEN,
        long_rows=long_rows,
    )
    [encoded] = RowEncoder(config, tokenizer).encode([Row("line 1", {"messages": said})])
    return encoded


def kept(encoded: EncodedRow) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens and labels that truncation keeps."""
    parts = [fit(part, MAX_SEQ_LEN, LongRows.TRUNCATE) for part in encoded.parts]
    return [(one.tokens.tolist(), one.is_label.tolist()) for part in parts for one in part]


def patterns() -> list[Any]:
    """Return how tokenizers of bytes split a text: GPT-2, Llama 3, Qwen2, SmolLM2."""
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_word = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = [
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated"), bytes_alone])
        for one in sorted(KNOWN_PATTERNS)
    ]
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_word])
    return [by_word, *known, digits]


@pytest.mark.parametrize("kind", range(len(patterns())))
def test_the_tokens_that_are_kept_are_those_of_the_whole_row(kind: int) -> None:
    tokenizer = family_tokenizer("chatml", "bytes")
    tokenizer.backend_tokenizer.pre_tokenizer = patterns()[kind]
    if kind == 1:  # as Qwen has it
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    rng = random.Random(kind)
    num_cut = 0
    for _ in range(40):
        lengths = [rng.choice([3, 30, 3000]) for _ in range(4)]
        content = ["x" + "".join(rng.choices(PIECES, k=length)) for length in lengths]
        cut = encode(tokenizer, content, LongRows.TRUNCATE)
        assert kept(cut) == kept(encode(tokenizer, content, LongRows.SPLIT))
        num_cut += cut.is_cut
    assert num_cut > 10


def test_of_ten_megabytes_only_the_beginning_is_tokenised() -> None:
    tokenizer = family_tokenizer("chatml", "bytes")
    encoded = encode(tokenizer, ["Hi", "a long answer " * 700_000], LongRows.TRUNCATE)
    assert encoded.is_cut
    assert MAX_SEQ_LEN < len(encoded.parts[0].tokens) < 2000
    [(tokens, is_label)] = kept(encoded)
    assert (len(tokens), is_label[-1]) == (MAX_SEQ_LEN, True)


def test_a_text_of_few_long_tokens_is_taken_whole() -> None:
    tokenizer = family_tokenizer("chatml", "bytes")
    tokenizer.add_tokens(["-" * 500])
    content = ["Hi", "Ho " + ("-" * 500 + " a ") * 40]
    encoded = encode(tokenizer, content, LongRows.TRUNCATE)
    assert not encoded.is_cut
    assert kept(encoded) == kept(encode(tokenizer, content, LongRows.SPLIT))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"normalizer": normalizers.NFKC()}, id="a normalizer"),
        pytest.param({"pre_tokenizer": pre_tokenizers.Metaspace()}, id="metaspace"),
        pytest.param(
            {"pre_tokenizer": pre_tokenizers.Split(Regex(r".{7}"), "isolated")}, id="a pattern"
        ),
    ],
)
def test_a_tokenizer_that_joins_words_gets_whole_texts(change: dict[str, Any]) -> None:
    tokenizer = family_tokenizer("chatml", "bytes")
    text = "some words " * 1000
    assert Cutter(tokenizer, 8).end(text) == 131
    for part, value in change.items():
        setattr(tokenizer.backend_tokenizer, part, value)
    assert Cutter(tokenizer, 8).end(text) is None


def test_a_token_that_holds_a_space_is_not_cut_in_two() -> None:
    tokenizer = family_tokenizer("chatml", "bytes")
    tokenizer.add_tokens(["some words"])
    assert Cutter(tokenizer, 8).end("some words " * 1000) is None
