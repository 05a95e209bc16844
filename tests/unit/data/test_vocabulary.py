"""A token that the model has no number for is refused with its row, where the data has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.config import DataConfig, DatasetSource, ModelConfig
from finetune_trainer.data.sequences import TokenDataset, prepare
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.load import load_settings, load_tokenizer
from finetune_trainer.model.vocabulary import padding_id, refuse_unknown_tokens
from support.data.text_fixtures import tiny_tokenizer

NEW = "<|tool|>"
PLAIN, WITH_NEW = ({"prompt": "Hi", "completion": f"Good {word} day."} for word in ("fine", NEW))


def save_model(folder: Path, *, has_token: bool) -> Path:
    """Save a tokenizer, perhaps with a token more than the model has, and its configuration."""
    tokenizer = tiny_tokenizer(folder)
    settings = {"model_type": "llama", "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(settings))
    if has_token:
        tokenizer.add_tokens([NEW])
        tokenizer.save_pretrained(folder)
    return folder


def prepared(
    folder: Path, tokenizer: Any, *sources: list[dict[str, str]], name: str = "train"
) -> TokenDataset:
    paths = [folder / f"{number}.jsonl" for number in range(len(sources))]
    for path, rows in zip(paths, sources, strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *also = (DatasetSource(path=str(path)) for path in paths)
    config = DataConfig(
        train=first, also=tuple(also), cache_dir=str(folder / "cache"), allow_special_tokens=True
    )
    return prepare(config, config.sources, tokenizer, name=name)


def test_the_first_row_with_such_a_token_is_named_in_every_source(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_model(tmp_path, has_token=True)))
    tokenizer = load_tokenizer(config)
    train = prepared(tmp_path, tokenizer, [PLAIN] * 3, [PLAIN, WITH_NEW, WITH_NEW])
    last = len(tokenizer) - 2
    with pytest.raises(ConfigError) as caught:
        refuse_unknown_tokens(config, tokenizer, train, None)
    assert str(caught.value).startswith(
        f"spec.model.source {tmp_path}: {train.origin(4)} has the token '{NEW}' with number "
        f"{last + 1}, but tokens of the model end at {last}; use the tokenizer of the model"
    )
    assert "spec.dataset.also[0].source" in str(caught.value)
    plain = prepared(tmp_path, tokenizer, [PLAIN] * 3)
    held_out = prepared(tmp_path, tokenizer, [PLAIN, WITH_NEW], name="eval")
    with pytest.raises(ConfigError, match=r"row 2 of spec\.dataset\.evalSource has the token"):
        refuse_unknown_tokens(config, tokenizer, plain, held_out)


def test_tokens_that_no_row_has_and_those_of_add_tokens_are_not_refused(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_model(tmp_path / "longer", has_token=True)))
    tokenizer = load_tokenizer(config)
    refuse_unknown_tokens(config, tokenizer, prepared(tmp_path, tokenizer, [PLAIN]), None)

    folder = save_model(tmp_path / "own", has_token=False)
    config = ModelConfig(path=str(folder), add_tokens=(NEW,))
    tokenizer = load_tokenizer(config)
    train = prepared(tmp_path, tokenizer, [PLAIN, WITH_NEW])
    assert train.find({len(tokenizer) - 1}) == (1, len(tokenizer) - 1), "it is in the data"
    refuse_unknown_tokens(config, tokenizer, train, train)


def test_padding_uses_the_tokenizers_id_if_the_model_has_a_row_for_it(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_model(tmp_path, has_token=True)))
    tokenizer = load_tokenizer(config)
    assert padding_id(config, tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = NEW
    assert padding_id(config, tokenizer) == 0
    added = config.model_copy(update={"add_tokens": ("<|new|>",)})
    tokenizer = load_tokenizer(added)
    tokenizer.pad_token = "<|new|>"
    assert padding_id(added, tokenizer) == tokenizer.pad_token_id > 0


def test_a_padding_id_beyond_the_vocabulary_of_config_json_is_left_out(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_model(tmp_path, has_token=False)))
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"pad_token_id": settings["vocab_size"]}))
    assert load_settings(config).pad_token_id is None
