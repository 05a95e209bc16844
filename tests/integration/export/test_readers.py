"""Other versions of transformers read an export as the trainer's own does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_trainer.config import ModelConfig
from finetune_trainer.export import export
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.model.load import load_tokenizer
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.checkpoint.readers import READERS, read_with
from support.data.text_fixtures import CHATML_TEMPLATE, VOCAB_SIZE, tiny_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Families of transformers, with settings under the names of version 4 as the hub's files have them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "qwen2": ("qwen2", {"rope_theta": 1000000.0}),
    "qwen3 with yarn": ("qwen3", {"rope_theta": 1000000.0, "rope_scaling": YARN}),
    "mistral": ("mistral", {"rope_theta": 1000000.0, "sliding_window": 4}),
    "mixtral": ("mixtral", {"rope_theta": 1000000.0, "num_local_experts": 4}),
    "gemma2": ("gemma2", {"sliding_window": 4}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 4, "rope_theta": 500000.0, "rope_local_base_freq": 5000.0},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.25, "rope_theta": 20000.0}),
    "phi3": ("phi3", {"rope_theta": 20000.0}),
    "granite": ("granite", {"logits_scaling": 4.0, "rope_theta": 5000000.0}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 25000}),
    "olmo2": ("olmo2", {"rope_theta": 500000.0}),
}
TOKEN, TEXT = "<|tool|>", "<|im_start|>Where  is it?<|tool|>"


def write_base(folder: Path, name: str, version: int) -> Path:
    """Write a random model as transformers 4 or 5 would have written it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, settings = FAMILIES[name]
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    tiny_tokenizer(folder)
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        extra_special_tokens={},
        additional_special_tokens=["<|im_start|>"],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    if version == 5:
        return folder
    written = json.loads((folder / "config.json").read_text())
    del written["rope_parameters"]
    written["torch_dtype"] = written.pop("dtype")
    (folder / "config.json").write_text(json.dumps({**written, **settings}))
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def exported(base: Path, output: Path, **changes: Any) -> tuple[Path, torch.Tensor, Any]:
    """Export the base as a fully trained model; return folder, logits and tokenizer."""
    config = export_config(base, output, method="full", format="merged")
    model_config = ModelConfig(**{**config.model.model_dump(), **changes})
    config = config.model_copy(update={"model": model_config})
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    fence = output_fence(config)
    export(model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print)
    model.set_attn_implementation("eager")  # the default for gemma2 depends on the version
    return output, probe_logits(model), tokenizer


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, torch.Tensor, Any]]:
    root = tmp_path_factory.mktemp("readers")
    bases = {
        f"{name} {version}": write_base(root / "bases" / f"{name} {version}", name, version)
        for name in FAMILIES
        for version in (4, 5)
    }
    results = [exported(base, root / "out" / name / "o") for name, base in bases.items()]
    changes: dict[str, Any] = {"add_tokens": (TOKEN,)}
    changed = exported(bases["llama 4"], root / "out" / "tokens" / "o", **changes)
    template = CHATML_TEMPLATE.replace("im_start", "im_end")
    other = exported(bases["qwen2 4"], root / "out" / "template" / "o", chat_template=template)
    return [*results, changed, other]


@pytest.mark.full  # 40 seconds, and two packages to install
@pytest.mark.parametrize("reader", READERS)
def test_another_version_computes_the_same_logits_and_tokens(reader: str, exports: Any) -> None:
    found = read_with(reader, [folder for folder, _, _ in exports], TEXT)
    turns = [{"role": "user", "content": TEXT}]
    for folder, logits, tokenizer in exports:
        read = found[str(folder)]
        assert read["tokens"] == tokenizer(TEXT).input_ids, folder
        assert read["chat"] == tokenizer.apply_chat_template(turns, tokenize=False), folder
        assert (read["eos"], read["ends"]) == ("<|im_end|>", 2), folder
        assert read["dtype"] == "torch.float32", folder
        got = torch.tensor(read["logits"])
        torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5, msg=str(folder))
