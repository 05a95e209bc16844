"""What is exported loads elsewhere and answers as the trained model does, or nothing is."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from finetune_trainer.claims.names import CLAIMS
from finetune_trainer.config import ExitCode, TrainConfig
from finetune_trainer.errors import ConfigError, ExportError, TrainerError
from finetune_trainer.export import export
from finetune_trainer.export.merge import probe_logits
from finetune_trainer.export.publish import ExportRecord
from finetune_trainer.export.tryout import try_export
from finetune_trainer.model.load import load_tokenizer
from finetune_trainer.refusals import Refusals
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import CHATML_TEMPLATE, VOCAB_SIZE, tiny_model

ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors", "generation_config.json"}
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors"}
BESIDE = {"README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
RECORD = {"finetune-export.json"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "base")


def run_export(model: Any, config: TrainConfig, warnings: list[str] | None = None) -> list[Path]:
    warn = (warnings if warnings is not None else []).append
    tokenizer = load_tokenizer(config.model)
    return [
        Path(p)
        for p in export(
            model, tokenizer, config, fence=output_fence(config), progress=PROGRESS, warn=warn
        )
    ]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != CLAIMS}


def load_merged(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def tiny_of_family(name: str, base: Path, folder: Path, **changes: Any) -> Path:
    """Save a random model of another family with the tokenizer of `base`; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name != "falcon":
        settings |= {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    if name == "gpt_oss":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    settings |= changes
    shutil.copytree(base, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).save_pretrained(
            folder
        )
    return folder


def test_a_loaded_adapter_gives_the_trained_models_logits_bit_for_bit(
    base: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    config = export_config(base, tmp_path / "output")
    model = trained_model(config)
    (folder,) = run_export(model, config)

    assert folder == tmp_path / "output"
    assert names(folder) == ADAPTER_FILES | BESIDE | RECORD
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert torch.equal(probe_logits(loaded), probe_logits(model))
    assert load_tokenizer(config.model.model_copy(update={"path": str(folder)})).chat_template == (
        CHATML_TEMPLATE
    )


def test_a_merged_model_loads_without_peft_and_answers_alike(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="merged")
    model = trained_model(config)
    (folder,) = run_export(model, config)

    assert names(folder) == MODEL_FILES | BESIDE | RECORD
    loaded = load_merged(folder)
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(probe_logits(loaded), probe_logits(model), rtol=0, atol=1e-5)


def test_export_leaves_the_callers_model_as_it_was(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="both")
    model = trained_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_export(model, config)

    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(module.training for module in model.modules())


def test_both_formats_lie_side_by_side(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="both")
    folders = run_export(trained_model(config), config)
    assert folders == [tmp_path / "output" / "adapter", tmp_path / "output" / "merged"]
    assert names(folders[0]) == ADAPTER_FILES | BESIDE
    assert names(folders[1]) == MODEL_FILES | BESIDE
    assert names(tmp_path / "output") == {"adapter", "merged"} | RECORD


def test_a_fully_trained_model_is_written_whole(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", method="full", format="merged")
    model = trained_model(config)
    (folder,) = run_export(model, config)
    assert torch.equal(probe_logits(load_merged(folder)), probe_logits(model))


def test_a_merge_keeps_the_type_of_a_narrow_base(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="merged", precision="bf16")
    model = trained_model(config, strength=0.05)
    warnings: list[str] = []
    (folder,) = run_export(model, config, warnings)
    loaded = load_merged(folder)
    assert loaded.dtype == torch.bfloat16
    gap = (probe_logits(loaded) - probe_logits(model)).norm() / probe_logits(model).norm()
    assert gap < 2e-2
    assert warnings == []


def test_an_adapter_too_weak_for_the_type_it_is_merged_into_is_reported(
    base: Path, tmp_path: Path
) -> None:
    config = export_config(base, tmp_path / "output", format="merged", precision="bf16")
    warnings: list[str] = []
    run_export(trained_model(config, strength=1e-6), config, warnings)
    assert len(warnings) == 1
    assert "rounding the merged weights to torch.bfloat16" in warnings[0]


@pytest.mark.parametrize("wanted", ["adapter", "both"])
def test_an_adapter_that_learnt_nothing_is_not_exported(
    base: Path, tmp_path: Path, wanted: str
) -> None:
    config = export_config(base, tmp_path / "output", format=wanted)
    with pytest.raises(TrainerError, match="training had no effect"):
        run_export(trained_model(config, strength=0.0), config)
    assert names(tmp_path / "output") == set()


def test_weights_that_are_not_finite_are_not_exported(base: Path, tmp_path: Path) -> None:
    for wanted, method in (("adapter", "lora"), ("merged", "lora"), ("merged", "full")):
        config = export_config(base, tmp_path / "output", format=wanted, method=method)
        model = trained_model(config)
        next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))
        with pytest.raises(TrainerError, match="not finite"):
            run_export(model, config)
    assert names(tmp_path / "output") == set()


def test_a_merge_that_changes_the_answers_is_not_exported(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="merged")
    model = trained_model(config)
    # Merging replaces the adapted layer, and with it this part of what it computes.
    adapted = model.base_model.model.model.layers[0].mlp.up_proj
    adapted.register_forward_hook(lambda module, inputs, output: output * 1.01)
    with pytest.raises(ExportError, match="merging base and adapter changes the logits") as caught:
        run_export(model, config)
    adapter = tmp_path / "output" / "adapter"
    assert f"; the adapter is in {adapter}, and the last checkpoint is" in str(caught.value)
    assert caught.value.exit_code is ExitCode.DO_NOT_RESTART
    assert names(adapter) == ADAPTER_FILES | BESIDE
    assert names(tmp_path / "output") == {"adapter"} | RECORD


def test_the_adapter_is_there_before_anything_is_merged(base: Path, tmp_path: Path) -> None:
    """And nothing of an older export lies beside it, nor is it called whole."""
    config = export_config(base, tmp_path / "output", format="both")
    run_export(trained_model(config), config)
    model = trained_model(config, seed=1)
    base_model = model.get_base_model()
    kept, base_model.generation_config = base_model.generation_config, None  # it cannot be saved
    with pytest.raises(ExportError, match=r"^the adapters cannot be merged \(AttributeError: "):
        run_export(model, config)
    adapter = tmp_path / "output" / "adapter"
    assert names(tmp_path / "output") - {"merged"} == {"adapter"} | RECORD
    assert not list((tmp_path / "output").glob("merged/*"))
    record = ExportRecord.read(tmp_path / "output" / "finetune-export.json")
    assert not record.is_whole
    assert set(record.files) == {f"adapter/{name}" for name in names(adapter)}

    base_model.generation_config = kept
    run_export(model, config)
    assert ExportRecord.read(tmp_path / "output" / "finetune-export.json").is_whole
    assert names(tmp_path / "output" / "merged") == MODEL_FILES | BESIDE


def test_whoever_may_read_other_new_files_may_read_an_export(base: Path, tmp_path: Path) -> None:
    config = export_config(base, tmp_path / "output", format="both")
    before = os.umask(0o027)
    try:
        run_export(trained_model(config), config)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "output").rglob("*") if path.is_file()]
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in files}
    assert set(modes) >= ADAPTER_FILES | MODEL_FILES
    assert set(modes.values()) == {"0o640"}


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "falcon"])
def test_a_family_that_cannot_attend_as_others_do_is_merged(
    name: str, base: Path, tmp_path: Path
) -> None:
    other = tiny_of_family(name, base, tmp_path / "base")
    config = export_config(other, tmp_path / "output", format="both")
    model = trained_model(config, strength=0.2)
    try_export(model, load_tokenizer(config.model), config)
    _, folder = run_export(model, config)
    loaded = load_merged(folder)
    assert type(loaded) is type(model.get_base_model())
    torch.testing.assert_close(probe_logits(loaded), probe_logits(model), rtol=0, atol=1e-4)


def test_an_adapter_without_tensors_is_not_exported(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from finetune_trainer.export.output import check_adapter

    for tensors in ({}, {"q.lora_A.weight": torch.empty(0), "q.lora_B.weight": torch.empty(0)}):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(TrainerError, match="the adapter has no weights"):
            check_adapter(tmp_path)


@pytest.mark.parametrize(
    ("given", "recorded", "written"),
    [
        pytest.param("org/base", "org/recorded", "org/base", id="as the job says"),
        pytest.param(None, "org/recorded", "org/recorded", id="as the model folder says"),
        pytest.param(None, None, None, id="the folder itself, with a warning"),
    ],
)
def test_an_adapter_names_a_base_that_another_machine_can_find(
    base: Path, tmp_path: Path, given: str | None, recorded: str | None, written: str | None
) -> None:
    settings = json.loads((base / "config.json").read_text())
    if recorded:
        settings["_name_or_path"] = recorded
    local = tmp_path / "local"
    local.mkdir()
    for file in base.iterdir():
        (local / file.name).write_bytes(file.read_bytes())
    (local / "config.json").write_text(json.dumps(settings))
    config = export_config(local, tmp_path / "output", base_name=given)
    warnings: list[str] = []
    (folder,) = run_export(trained_model(config), config, warnings)

    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == (written or str(local))
    assert len(warnings) == (0 if written else 1)
    assert f"base_model: {written}" in (folder / "README.md").read_text() or not written


def test_the_model_card_says_what_was_done(base: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    config = export_config(base, tmp_path / "output", base_name="org/base", format="both")
    adapter, merged = run_export(trained_model(config), config)

    card = ModelCard.load(adapter / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["finetune-operator", "lora"],
        "base_model": "org/base",
        "base_model_relation": "adapter",
    }
    text = card.text
    assert "# tiny-chat" in text
    assert "| held-out loss | 2.5000 | 1.5000 |" in text
    assert "| rows truncated | 1 | - |" in text
    assert '"learningRate": 0.001' in text
    assert f"| torch | {torch.__version__} |" in text
    hashes = [line for line in text.splitlines() if line.startswith("| content hash | ")]
    assert len(hashes[0].split(" | ")[1]) == 64
    assert str(tmp_path) not in text, "no path of this machine"

    front = (merged / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(front)["base_model_relation"] == "finetune"


def test_a_missing_data_file_costs_the_card_its_hash_and_nothing_else(
    base: Path, tmp_path: Path
) -> None:
    config = export_config(base, tmp_path / "output")
    Path(config.data.train.path).unlink()
    warnings: list[str] = []
    (folder,) = run_export(trained_model(config), config, warnings)
    assert "| content hash | - | - |" in (folder / "README.md").read_text()
    assert "the model card lacks the hash" in warnings[0]


@pytest.mark.parametrize(
    ("wanted", "method"),
    [("adapter", "lora"), ("merged", "lora"), ("both", "lora"), ("merged", "full")],
)
def test_a_tried_export_changes_neither_the_model_nor_a_random_number_nor_the_output(
    base: Path, tmp_path: Path, wanted: str, method: str
) -> None:
    config = export_config(base, tmp_path / "output", format=wanted, method=method)
    model = trained_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    try_export(model, load_tokenizer(config.model), config)
    assert torch.equal(torch.get_rng_state(), random)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(module.training for module in model.modules())
    assert not (tmp_path / "output").exists()


def spoil_generation(model: Any) -> None:
    model.get_base_model().generation_config = None


def spoil_adapters(model: Any) -> None:
    model.peft_config["default"].target_modules = {"no_such_layer"}


def spoil_what_is_written_of_adapters(model: Any) -> None:
    model.peft_config["default"].r = object()  # no JSON


def spoil_shapes(model: Any) -> None:
    model.get_base_model().config.intermediate_size += 1


def spoil_class(model: Any) -> None:
    model.get_base_model().config.hidden_act = "no_such_function"


@pytest.mark.parametrize(
    ("spoil", "wanted", "says"),
    [
        pytest.param(spoil_generation, "both", "the whole model of Llama", id="what is saved"),
        pytest.param(spoil_adapters, "merged", "the whole model of Llama", id="adapters"),
        pytest.param(
            spoil_what_is_written_of_adapters,
            "adapter",
            "the adapter of LlamaForCausalLM",
            id="settings of adapters",
        ),
        pytest.param(spoil_shapes, "merged", "in a model built from its config", id="shapes"),
        pytest.param(spoil_class, "merged", "KeyError", id="the class"),
    ],
)
def test_what_could_not_be_exported_is_refused_before_training(
    base: Path, tmp_path: Path, spoil: Any, wanted: str, says: str
) -> None:
    config = export_config(base, tmp_path / "output", format=wanted)
    model = trained_model(config)
    spoil(model)
    with pytest.raises(ConfigError, match=rf"^spec\.output\.format {wanted}: ") as caught:
        try_export(model, load_tokenizer(config.model), config)
    assert says in str(caught.value)
    assert "could not be exported after the training (" in str(caught.value)


def test_a_tokenizer_that_cannot_be_saved_is_found_before_training(
    base: Path, tmp_path: Path
) -> None:
    config = export_config(base, tmp_path / "output")
    model = config.model.model_copy(update={"chat_template": CHATML_TEMPLATE})
    config = config.model_copy(update={"model": model})
    tokenizer = load_tokenizer(config.model)
    tokenizer.chat_template = {"default": 1}  # no text
    with pytest.raises(ConfigError, match=r"could not be exported .*the tokenizer: "):
        try_export(trained_model(config), tokenizer, config)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.parametrize("wanted", ["merged", "both"])
@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", ("lm_head",)), ("gpt2", ("c_attn", "lm_head")), ("gpt_neox", ("lm_head",))],
)
def test_an_adapter_on_a_tied_head_is_refused_before_training(
    base: Path, tmp_path: Path, name: str, layers: tuple[str, ...], wanted: str
) -> None:
    config = tied_config(base, tmp_path, name, layers, wanted)
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    with pytest.raises(ConfigError, match=rf"^spec.output.format {wanted}: ") as caught:
        try_export(model, tokenizer, config)
    assert f"remove {layers[-1]} from spec.method.lora.targetModules" in str(caught.value)
    warnings: list[str] = []
    try_export(model, tokenizer, config, refusals=Refusals(is_new=False, warn=warnings.append))
    assert str(caught.value) in warnings[0]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.parametrize(
    ("name", "layers", "wanted", "is_tied"),
    [
        pytest.param("llama", ("lm_head",), "adapter", True, id="the adapter alone"),
        pytest.param("llama", ("lm_head",), "both", False, id="a head of its own"),
        pytest.param("llama", ("q_proj",), "both", True, id="another layer"),
        pytest.param("gpt2", (), "both", True, id="all layers but the head"),
    ],
)
def test_an_adapter_beside_a_tied_head_is_not_refused(
    base: Path, tmp_path: Path, name: str, layers: tuple[str, ...], wanted: str, is_tied: bool
) -> None:
    config = tied_config(base, tmp_path, name, layers, wanted, is_tied=is_tied)
    try_export(trained_model(config), load_tokenizer(config.model), config)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_head_that_is_tied_by_config_alone_is_refused_before_training(
    base: Path, tmp_path: Path, is_new: bool
) -> None:
    other = shutil.copytree(base, tmp_path / "base")
    settings = json.loads((other / "config.json").read_text()) | {"tie_word_embeddings": True}
    (other / "config.json").write_text(json.dumps(settings))
    config = export_config(other, tmp_path / "output", format="merged")
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    warnings: list[str] = []
    refusals = Refusals(is_new=is_new, warn=warnings.append)
    if is_new:
        with pytest.raises(ConfigError, match="tie_word_embeddings true, but its files hold"):
            try_export(model, tokenizer, config, refusals=refusals)
    else:
        try_export(model, tokenizer, config, refusals=refusals)
        assert "a new run would be refused" in warnings[0]


def tied_config(
    base: Path,
    tmp_path: Path,
    name: str,
    layers: tuple[str, ...],
    wanted: str,
    *,
    is_tied: bool = True,
) -> TrainConfig:
    """Write a tiny model of a family; return a configuration with adapters on `layers`."""
    other = tiny_of_family(name, base, tmp_path / "base", tie_word_embeddings=is_tied)
    config = export_config(other, tmp_path / "output", format=wanted)
    assert config.method.lora is not None
    lora = config.method.lora.model_copy(update={"target_modules": layers})
    method = config.method.model_copy(update={"lora": lora})
    return config.model_copy(update={"method": method})


def test_added_tokens_of_a_tied_model_are_merged(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", tied=True)
    config = export_config(base, tmp_path / "output", format="merged")
    model_config = config.model.model_copy(update={"add_tokens": ("<|tool|>",)})
    config = config.model_copy(update={"model": model_config})
    model = trained_model(config, strength=0.2)
    try_export(model, load_tokenizer(config.model), config)
    [folder] = run_export(model, config)
    assert load_merged(folder).get_input_embeddings().weight.shape[0] > VOCAB_SIZE
