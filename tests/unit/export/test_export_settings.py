"""`config.json` and tokenizer of an export are the base's, with the changes of the run alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from finetune_trainer.config import ModelConfig, TrainConfig
from finetune_trainer.export import export
from finetune_trainer.export.settings import complete_config
from finetune_trainer.export.tokenizer import files_of
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import CHATML_TEMPLATE, tiny_model
from support.model.every_family import tiny_settings

# Names that vLLM 0.11 and later read from config.json, in its files for the family Llama, for the
# shape of a model (transformers_utils) and for its rotary embeddings.
READ_BY_VLLM = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "is_mm_prefix_lm": False,
    "logit_scale": 1.0,
    "max_position_embeddings": 2048,
    "max_seq_len": 2048,
    "mlp_bias": False,
    "model_max_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 250000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": 768,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


def exported(config: TrainConfig) -> Path:
    [folder] = export(
        trained_model(config),
        load_tokenizer(config.model),
        config,
        fence=output_fence(config),
        progress=PROGRESS,
        warn=print,
    )
    return Path(folder)


def with_model(config: TrainConfig, **changes: Any) -> TrainConfig:
    model = ModelConfig.model_validate({**config.model.model_dump(), **changes})
    return config.model_copy(update={"model": model})


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / name).read_text())
    return settings


@pytest.mark.parametrize("wanted", ["merged", "full"])
def test_each_key_that_vllm_reads_is_exported_as_the_base_has_it(
    base: Path, tmp_path: Path, wanted: str
) -> None:
    local = shutil.copytree(base, tmp_path / "base")
    (local / "config.json").write_text(json.dumps(READ_BY_VLLM))
    method = "full" if wanted == "full" else "lora"
    config = export_config(local, tmp_path / "output", method=method, format="merged")
    found = config_of(exported(config))
    assert {name: found[name] for name in READ_BY_VLLM} == READ_BY_VLLM


def test_keys_that_belong_to_the_weights_come_from_the_export(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    base = {
        "model_type": "llama",
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "fp8"},
        "transformers_version": "4.40.0",
        "_name_or_path": "org/base",
    }
    complete_config(path, base)
    assert config_of(tmp_path) == {
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def test_the_parts_of_a_larger_model_are_completed_alike(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "rope_theta": 1e6, "quantization_config": {}}
    whole = {"model_type": "gemma3", "mm_tokens_per_image": 4, "text_config": text}
    path = tmp_path / "config.json"
    saved = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    path.write_text(json.dumps(saved))
    complete_config(path, whole)
    expected = {"model_type": "gemma3_text", "rope_theta": 1e6}
    assert config_of(tmp_path) == whole | {"text_config": expected}

    path.write_text(json.dumps({"model_type": "gemma3_text"}))
    complete_config(path, whole)
    assert config_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        pytest.param(
            {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5}, id="a base alone"
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            id="stretched",
        ),
        pytest.param(
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            id="a part of each head",
        ),
        pytest.param(
            {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [1, 2]},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
            id="several axes",
        ),
        pytest.param(
            {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            id="two kinds of layers",
        ),
    ],
)
def test_rotary_embeddings_have_the_names_of_transformers_4_as_well(
    tmp_path: Path, rope: dict[str, Any], names: dict[str, Any]
) -> None:
    path = tmp_path / "config.json"
    saved = {"model_type": "llama", "rope_parameters": rope}
    path.write_text(json.dumps(saved))
    complete_config(path, {"model_type": "llama"})
    assert config_of(tmp_path) == saved | names


@pytest.mark.parametrize("wanted", ["adapter", "merged"])
def test_tokenizer_files_are_copied_byte_for_byte(base: Path, tmp_path: Path, wanted: str) -> None:
    local = shutil.copytree(base, tmp_path / "base")
    settings = config_of(local, "tokenizer_config.json")
    settings |= {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "use_default": 1}
    (local / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (local / name).write_text("{}")
    (local / "additional_chat_templates").mkdir()
    (local / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML_TEMPLATE)
    folder = exported(export_config(local, tmp_path / "output", format=wanted))
    expected = {path.relative_to(local): path.read_bytes() for path in files_of(local)}
    assert len(expected) == 8
    found = {path.relative_to(folder): path.read_bytes() for path in files_of(folder)}
    assert found == expected


def test_added_tokens_and_a_template_are_the_only_changes(base: Path, tmp_path: Path) -> None:
    local = shutil.copytree(base, tmp_path / "base")
    settings = config_of(local, "tokenizer_config.json")
    known = {"0": {"content": "<|endoftext|>", "special": True}}
    changes = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": known}
    changes |= {"chat_template": "{{ 1 }}"}
    (local / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    template = CHATML_TEMPLATE.replace("user", "person")
    config = export_config(local, tmp_path / "output", format="merged")
    config = with_model(config, add_tokens=("<|a|>", "<|b|>"), chat_template=template)
    folder = exported(config)

    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>"]) == [768, 769]
    assert (
        tokenizer("<|a|>it<|b|>").input_ids
        == load_tokenizer(config.model)("<|a|>it<|b|>").input_ids
    )
    assert tokenizer.chat_template == template
    found = config_of(folder, "tokenizer_config.json")
    assert [*found.pop("added_tokens_decoder")] == ["0", "768", "769"]
    del changes["added_tokens_decoder"], changes["chat_template"]
    assert found == settings | changes


def test_the_card_names_a_reader_that_does_not_know_the_tokenizer(
    base: Path, tmp_path: Path
) -> None:
    for number, name in enumerate(("TokenizersBackend", "PreTrainedTokenizerFast")):
        local = shutil.copytree(base, tmp_path / name)
        settings = config_of(local, "tokenizer_config.json")
        settings |= {"tokenizer_class": name}
        (local / "tokenizer_config.json").write_text(json.dumps(settings))
        folder = exported(export_config(local, tmp_path / f"{name}-output"))
        note = "Note: transformers 4 cannot load the tokenizer, whose class TokenizersBackend is"
        assert (note in (folder / "README.md").read_text()) is (number == 0)


def test_a_base_that_is_gone_costs_its_files_and_gives_a_warning(
    base: Path, tmp_path: Path
) -> None:
    local = shutil.copytree(base, tmp_path / "base")
    config = export_config(local, tmp_path / "output", format="merged", method="full")
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    shutil.rmtree(local)
    warnings: list[str] = []
    export(
        model,
        tokenizer,
        config,
        fence=output_fence(config),
        progress=PROGRESS,
        warn=warnings.append,
    )
    assert any("spec.model.source" in one and "is gone" in one for one in warnings)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path / "output")))
    assert loaded.chat_template == CHATML_TEMPLATE


@pytest.mark.parametrize("family", ["gemma4_text", "lfm3", "gemma3_text", "olmo3", "llama"])
def test_rotary_parameters_survive_an_export(family: str, tmp_path: Path) -> None:
    settings = tiny_settings(family)
    settings.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    complete_config(path, json.loads(path.read_text()))
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == AutoConfig.for_model(**settings.to_dict()).rope_parameters
