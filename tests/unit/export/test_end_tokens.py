"""The exported model stops where the learned turns end, in every file that a server reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.answers import MAX_NEW_TOKENS, answer
from finetune_trainer.export import export
from finetune_trainer.export.end_tokens import with_stops
from finetune_trainer.export.tryout import try_export
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_model

END, START, STOP = range(3)
WITH_EOS = CHATML_TEMPLATE.replace("<|im_end|>", "<|im_end|>' + eos_token + '")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def base_of(chat: Path, folder: Path, own: Any, *, template: str = CHATML_TEMPLATE) -> Path:
    """Copy a base that ends texts with `<|endoftext|>`, and has `own` where families have it."""
    shutil.copytree(chat, folder)
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    (folder / "chat_template.jinja").write_text(template)
    edit(folder / "config.json", eos_token_id=own)
    edit(folder / "generation_config.json", eos_token_id=own)
    return folder


def run_export(base: Path, tmp_path: Path, stops: tuple[int, ...], wanted: str) -> Any:
    """Try and run an export; return its folder, config and warnings."""
    config = export_config(base, tmp_path / "output", format=wanted)
    model, tokenizer, warnings = trained_model(config), load_tokenizer(config.model), list[str]()
    try_export(model, tokenizer, config, stops)
    fence = output_fence(config)
    [folder] = export(
        model,
        tokenizer,
        config,
        fence=fence,
        progress=PROGRESS,
        warn=warnings.append,
        stops=stops,
    )
    return Path(folder), config, warnings


@pytest.mark.parametrize(
    ("own", "stops", "ids"),
    [
        pytest.param(END, (STOP,), [END, STOP], id="a base such as Qwen2.5 with ChatML"),
        pytest.param([END, START], (STOP,), [END, START, STOP], id="a list such as Llama 3's"),
        pytest.param(END, (STOP, START), [END, STOP, START], id="two kinds of stops"),
        pytest.param(None, (STOP,), STOP, id="a base without an end token"),
        pytest.param(STOP, (STOP,), STOP, id="an Instruct model"),
        pytest.param([END, STOP], (STOP,), [END, STOP], id="an Instruct model with a list"),
        pytest.param(END, (), END, id="rows of text that end with no special token"),
    ],
)
def test_learned_stops_join_the_end_tokens_of_generation(
    chat: Path, tmp_path: Path, own: Any, stops: tuple[int, ...], ids: Any
) -> None:
    base = base_of(chat, tmp_path / "base", own)
    folder, config, warnings = run_export(base, tmp_path, stops, "merged")
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ids
    tokenizer = load_tokenizer(config.model.model_copy(update={"path": str(folder)}))
    assert tokenizer.eos_token_id == (stops[0] if stops else END)
    assert warnings == []


def test_end_tokens_that_only_the_config_names_remain(chat: Path, tmp_path: Path) -> None:
    base = base_of(chat, tmp_path / "base", [END, START])
    (base / "generation_config.json").unlink()
    folder, _, _ = run_export(base, tmp_path, (STOP,), "merged")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [END, START, STOP]


def test_an_adapter_has_the_stop_in_its_tokenizer_its_card_and_its_settings(
    chat: Path, tmp_path: Path
) -> None:
    base = base_of(chat, tmp_path / "base", END)
    folder, config, warnings = run_export(base, tmp_path, (STOP,), "adapter")
    tokenizer = load_tokenizer(config.model.model_copy(update={"path": str(folder)}))
    assert tokenizer.eos_token_id == STOP
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [END, STOP]}
    [note] = warnings
    assert note.startswith("responses end with `<|im_end|>`, at which the base model does not stop")
    assert f"Note: {note}." in (folder / "README.md").read_text()


def test_a_template_that_writes_the_end_token_keeps_it(chat: Path, tmp_path: Path) -> None:
    base = base_of(chat, tmp_path / "base", END, template=WITH_EOS)
    folder, config, [note] = run_export(base, tmp_path, (STOP,), "merged")
    tokenizer = load_tokenizer(config.model.model_copy(update={"path": str(folder)}))
    assert tokenizer.eos_token_id == END
    assert "another token than `<|endoftext|>`" in note
    assert f"Note: {note}." in (folder / "README.md").read_text()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [END, STOP]


@pytest.mark.parametrize("wanted", ["adapter", "merged"])
def test_the_map_of_special_tokens_names_the_stop_as_well(
    chat: Path, tmp_path: Path, wanted: str
) -> None:
    base = base_of(chat, tmp_path / "base", END)
    known = {"eos_token": {"content": "<|endoftext|>", "lstrip": False}, "pad_token": "x"}
    (base / "special_tokens_map.json").write_text(json.dumps(known))
    folder, _, _ = run_export(base, tmp_path, (STOP,), wanted)
    found = json.loads((folder / "special_tokens_map.json").read_text())
    assert found == {"eos_token": "<|im_end|>", "pad_token": "x"}


def test_a_sample_response_ends_at_a_learned_stop(chat: Path, tmp_path: Path) -> None:
    config = export_config(base_of(chat, tmp_path / "base", END), tmp_path / "output")
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    calls = []

    def always_stop(module: Any, inputs: Any, logits: torch.Tensor) -> None:
        calls.append(logits)
        logits[..., STOP] = 1e6

    model.get_output_embeddings().register_forward_hook(always_stop)
    answer(model, tokenizer, "Hello")
    assert len(calls) == MAX_NEW_TOKENS
    answer(model, tokenizer, "Hello", stops=(STOP,))
    assert len(calls) == MAX_NEW_TOKENS + 1


def test_a_single_end_token_stays_a_number() -> None:
    assert with_stops(3, (3,)) == 3
    assert with_stops([3], (3,)) == [3]
    assert with_stops(None, ()) is None
