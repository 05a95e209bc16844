"""Base models whose files are quantised: dequantised, trained as QLoRA, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.export.merge import cast_copy
from finetune_trainer.model.load import load_model, load_settings
from finetune_trainer.model.quantize import unquantized_warning
from finetune_trainer.model.stored_quantization import resolve_stored_quantization
from finetune_trainer.model.unread import check_unread, unread_tensors
from finetune_trainer.refusals import STRICT, Refusals
from support.launch.launches import train_config
from support.model.every_family import tiny_settings
from support.model.quantized_files import write_fp8, write_mxfp4

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"]}
LORA = {"type": "lora", "lora": {"r": 2}}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def write_plain(folder: Path, family: str = "Llama", **changes: Any) -> Path:
    settings = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **changes)
    getattr(transformers, f"{family}ForCausalLM")(settings).save_pretrained(folder / "model")
    return folder / "model"


def write_bitsandbytes(folder: Path, **settings: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_plain(folder),
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        device_map={"": "cpu"},
    )
    model.save_pretrained(folder / "model")
    return folder / "model"


def resolved(config: TrainConfig, refusals: Refusals = STRICT) -> TrainConfig:
    return resolve_stored_quantization(config, load_settings(config.model), refusals)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_fp8_and_mxfp4_are_dequantised_exactly(kind: str, precision: str, tmp_path: Path) -> None:
    if kind == "fp8":
        exact = write_fp8(write_plain(tmp_path))
    else:
        exact = write_mxfp4(write_plain(tmp_path, "GptOss", head_dim=32, **MOE))
    config = resolved(train_config(tmp_path, method=LORA, training={"precision": precision}))
    assert config.output.dtype == "bfloat16"
    model = load_model(config, CPU)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, tensor in exact.items():
        assert torch.equal(model.get_parameter(name), tensor.to(dtype)), name
    assert not hasattr(model.config, "quantization_config")
    assert not unread_tensors(config.model).extra
    for saved in (model, cast_copy(model, torch.bfloat16)):  # as full fine-tuning exports it
        saved.save_pretrained(tmp_path / "saved")
        plain = type(model).from_pretrained(tmp_path / "saved", dtype=dtype)
        assert all(torch.equal(p, plain.get_parameter(n)) for n, p in model.named_parameters())
    empty = load_model(config, torch.device("meta"))
    assert not hasattr(empty.config, "quantization_config")


@pytest.mark.parametrize(
    ("stored", "kind", "layer"),
    [(NF4, "nf4", "Linear4bit"), ({"load_in_8bit": True}, "int8", "Linear8bitLt")],
)
def test_lora_on_files_of_bitsandbytes_is_qlora(
    stored: dict[str, Any], kind: str, layer: str, tmp_path: Path
) -> None:
    write_bitsandbytes(tmp_path, **stored)
    config = resolved(train_config(tmp_path, method=LORA))
    assert (config.method.type, config.method.quantization) == ("qlora", kind)
    model = load_model(config, CPU)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == layer
    assert not unread_tensors(config.model).extra


@pytest.mark.parametrize(
    ("stored", "changes", "sentence"),
    [
        pytest.param(NF4, {"method": {"type": "full"}}, "weights cannot be trained", id="full"),
        pytest.param(
            {"load_in_8bit": True},
            {"method": {"type": "full"}},
            "is stored in int8, whose weights cannot be trained",
            id="full int8",
        ),
        pytest.param(
            NF4,
            {"method": LORA | {"type": "qlora", "quantization": "int8"}},
            "spec.method.quantization is int8; set it to nf4",
            id="another kind",
        ),
        pytest.param(
            NF4,
            {"method": LORA, "strategy": {"type": "fsdp"}},
            "spec.strategy.type fsdp cannot shard; use ddp",
            id="fsdp",
        ),
        pytest.param({"load_in_4bit": True}, {"method": LORA}, "quantised with fp4", id="fp4"),
        pytest.param({"quant_method": "gptq", "bits": 4}, {"method": LORA}, "gptq", id="gptq"),
        pytest.param({"quant_method": "awq", "bits": 4}, {"method": LORA}, "awq", id="awq"),
        pytest.param(
            {"quant_method": "fp8"},
            {"method": LORA | {"type": "qlora", "quantization": "nf4"}},
            "would quantise it a second time",
            id="twice",
        ),
    ],
)
def test_other_combinations_are_refused_in_a_new_run(
    stored: dict[str, Any], changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write_plain(tmp_path) / "config.json"
    stored = {"quant_method": "bitsandbytes"} | stored
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    config = train_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"^spec\.model\.source .*{sentence}"):
        resolved(config)
    warnings: list[str] = []
    assert resolved(config, Refusals(is_new=False, warn=warnings.append)) is config
    [warning] = warnings
    assert sentence in warning


@pytest.mark.parametrize("leaf", ["activation_scale", "scale", "qscale_weight"])
def test_scales_of_other_names_belong_to_their_weight(leaf: str, tmp_path: Path) -> None:
    write_fp8(write_plain(tmp_path))
    file = tmp_path / "model" / "model.safetensors"
    scale = {f"model.layers.0.mlp.up_proj.{leaf}": torch.ones(1)}
    save_file(load_file(file) | scale, file, metadata={"format": "pt"})
    assert not unread_tensors(train_config(tmp_path).model).extra


def test_fp8_with_scales_of_another_name_is_refused(tmp_path: Path) -> None:
    file = write_plain(tmp_path) / "model.safetensors"
    write_fp8(tmp_path / "model")
    renamed = {n.replace("_scale_inv", "_scale"): t for n, t in load_file(file).items()}
    save_file(renamed, file, metadata={"format": "pt"})
    config = resolved(train_config(tmp_path, method=LORA))
    with pytest.raises(ConfigError, match=r"with scales that are not read \(model\.layers"):
        load_model(config, CPU)


def test_heads_for_further_tokens_of_quantised_files_are_named_and_left_out(
    tmp_path: Path,
) -> None:
    file = write_plain(tmp_path) / "model.safetensors"
    head = {"mtp.proj.weight": torch.ones(128, 128)}
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    write_fp8(tmp_path / "model")
    config = resolved(train_config(tmp_path, method=LORA))
    unread = unread_tensors(config.model)
    warnings: list[str] = []
    check_unread(unread, "base", Refusals(is_new=True, warn=warnings.append))
    [warning] = warnings
    assert "contain mtp (2 tensors)" in warning
    assert warning.endswith("a whole model is exported without them")
    assert "left out, because they are quantised in the files" in unread.notes(is_whole=True)[0]


@pytest.mark.parametrize("family", ["dbrx", "mixtral", "qwen3_moe", "llama"])
def test_experts_that_stay_wide_are_found_in_every_layout(family: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_settings(family))
    warning = unquantized_warning(model)
    if family == "llama":
        assert warning is None
        return
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    assert warning is not None
    assert f"({names[0]} and {len(names) - 1} more)" in warning
