"""Tokens come from the model's own tokenizer.json, whatever class its configuration names."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from finetune_trainer.config import ModelConfig
from finetune_trainer.data.rules import Rules
from finetune_trainer.model.load import load_tokenizer
from support.data.text_fixtures import save_tokenizer, tiny_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {
    "words": WORDS,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "Llama 3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
}
TEXTS = (
    "the  river of France\nis wide",
    "in 2024 isn't",
    "  Zu\u0308rich \t\n\n é",
    "naïve 😀 ",
    "",
)


def read(folder: Path, **config: Any) -> Any:
    return load_tokenizer(ModelConfig(path=str(folder), **config))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "name",
    [
        *("GPT2Tokenizer", "GPTNeoXTokenizerFast", "CodeGenTokenizer", "Qwen2Tokenizer"),
        *("CohereTokenizerFast", "GemmaTokenizer", "CodeLlamaTokenizer", "LlamaTokenizerFast"),
    ],
)
def test_tokens_and_text_come_from_the_file(name: str, split: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, name, SPLITS[split])
    file, tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read(tmp_path)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == file.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text


def test_release_0_1_0_read_other_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "CohereTokenizerFast", WORDS)
    before = load_tokenizer(ModelConfig(path=str(tmp_path)), Rules.RELEASE_0_1_0)
    ids = before("in 2024", add_special_tokens=False)["input_ids"]
    assert ids != read(tmp_path)("in 2024", add_special_tokens=False)["input_ids"]


def test_special_and_new_tokens_keep_their_numbers(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "Qwen2Tokenizer", WORDS)
    tokenizer = read(tmp_path, add_tokens=("<|tool|>",))
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.eos_token_id == file.token_to_id("<|endoftext|>")
    ids = tokenizer("<|im_end|><|tool|> in", add_special_tokens=False)["input_ids"]
    assert ids[0] == file.token_to_id("<|im_end|>")
    assert ids[1] >= file.get_vocab_size()
    assert tokenizer.convert_ids_to_tokens(ids[1]) == "<|tool|>"


def test_a_tokenizer_that_transformers_reads_as_it_is_stays_the_same(tmp_path: Path) -> None:
    backend = tiny_tokenizer(tmp_path).backend_tokenizer.to_str()
    assert read(tmp_path).backend_tokenizer.to_str() == backend
