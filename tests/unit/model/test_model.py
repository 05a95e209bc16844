"""Loading, adapters and the loss, on a real two-layer model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from finetune_trainer.config import (
    CheckpointConfig,
    DataConfig,
    DatasetSource,
    JobRef,
    LoraSettings,
    MethodConfig,
    ModelConfig,
    OutputConfig,
    TrainConfig,
    TrainingConfig,
)
from finetune_trainer.data.batch import NO_TARGET, MicroBatch
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import attach_lora
from finetune_trainer.model.identity import model_fingerprint
from finetune_trainer.model.load import base_name, load_model, load_settings, load_tokenizer
from finetune_trainer.model.loss import CausalLoss, loss_inputs
from finetune_trainer.strategies.optimizer import make_adamw
from support.data.text_fixtures import tiny_model
from support.model.every_family import tiny_model as tiny_family
from support.model.every_family import tiny_settings
from support.model.model_families import family

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def config(folder: Path, *, method="lora", precision="fp32", dropout=None) -> TrainConfig:
    return TrainConfig(
        job=JobRef(name="tiny", uid="u"),
        model=ModelConfig(path=str(folder)),
        data=DataConfig(train=DatasetSource(path="x"), cache_dir="x"),
        method=MethodConfig(
            type=method,
            lora=None if method == "full" else LoraSettings(),
            quantization="nf4" if method == "qlora" else "none",
        ),
        training=TrainingConfig(
            global_batch_size=1,
            max_steps=1,
            learning_rate=1e-3,
            precision=precision,
            dropout=dropout,
        ),
        checkpoint=CheckpointConfig(dir="x"),
        output=OutputConfig(dir="x", format="merged" if method == "full" else "adapter"),
        run_dir="x",
        termination_path="x",
    )


def micro_batch(rows=2, length=12, labels=((3, 4, 5), (4, 9))):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 700, (rows, length), generator=generator)
    targets = torch.full((rows, length), NO_TARGET)
    for row, positions in enumerate(labels):
        for position in positions:
            targets[row, position] = ids[row, position + 1]
    positions = torch.arange(length).expand(rows, -1)
    return MicroBatch.of(ids, positions, targets, tokens=ids.numel())


def gradients(module, batch):
    module.zero_grad()
    loss = module(**loss_inputs(batch, CPU))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters()}


def test_loss_and_every_gradient_equal_cross_entropy_over_all_positions(folder):
    module = CausalLoss(load_model(config(folder, method="full"), CPU))
    rows = micro_batch()
    loss, grads = gradients(module, rows)

    module.zero_grad()
    output = module.model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
    expected = functional.cross_entropy(
        output.logits.flatten(0, 1), rows.targets.flatten(), reduction="sum"
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_without_labels_gives_a_zero_loss_and_zero_gradients(folder):
    module = CausalLoss(load_model(config(folder, method="full"), CPU))
    loss, grads = gradients(module, micro_batch(labels=()))
    assert loss == 0
    assert all(not gradient.any() for gradient in grads.values())


@pytest.mark.parametrize(
    ("method", "precision", "base", "trained"),
    [
        pytest.param("full", "bf16", {torch.float32}, {torch.float32}, id="full keeps fp32"),
        pytest.param("lora", "bf16", {torch.bfloat16}, {torch.float32}, id="narrow frozen base"),
        pytest.param("lora", "fp32", {torch.float32}, {torch.float32}, id="all fp32"),
    ],
)
def test_trained_parameters_are_fp32_whatever_the_base_is(folder, method, precision, base, trained):
    settings = config(folder, method=method, precision=precision)
    model = load_model(settings, CPU)
    assert {p.dtype for p in model.parameters()} == base
    if settings.method.lora:
        model = attach_lora(model, settings.method.lora)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == trained


def test_lora_adapts_every_linear_layer_but_the_head(folder):
    model = attach_lora(load_model(config(folder), CPU), LoraSettings())
    adapted = {
        name.split(".lora_A")[0].rsplit(".", 1)[-1]
        for name in model.state_dict()
        if "lora_A" in name
    }
    assert adapted == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_lora_refuses_a_target_that_matches_nothing_and_lists_what_there_is(folder):
    model = load_model(config(folder), CPU)
    with pytest.raises(ConfigError, match=r"targetModules wqkv match no linear layer.*q_proj"):
        attach_lora(model, LoraSettings(target_modules=("q_proj", "wqkv")))


@pytest.mark.parametrize("targets", [(), ("c_attn", "c_proj", "c_fc")], ids=["default", "named"])
def test_lora_adapts_the_linear_layers_of_gpt2(targets):
    model = attach_lora(family("gpt2"), LoraSettings(target_modules=targets))
    adapted = {name.split(".lora_A")[0] for name in model.state_dict() if "lora_A" in name}
    assert {name.rsplit(".", 1)[-1] for name in adapted} == {"c_attn", "c_proj", "c_fc"}


def test_matrices_alone_are_decayed():
    model = tiny_family(tiny_settings("gpt_oss"))
    trained = dict(model.named_parameters())
    training = TrainingConfig(
        global_batch_size=1, max_steps=1, learning_rate=1e-3, weight_decay=0.1
    )
    decayed, left = make_adamw(trained, training).param_groups
    names = {parameter: name for name, parameter in trained.items()}
    assert all(names[p].endswith(("weight", "_proj")) for p in decayed["params"])
    biases = [names[p] for p in left["params"] if p.ndim == 2]
    assert {name.rsplit(".", 1)[-1] for name in biases} == {
        "gate_up_proj_bias",
        "down_proj_bias",
    }


def test_dropout_is_set_where_the_model_has_it(folder):
    assert load_model(config(folder, dropout=0.25), CPU).config.attention_dropout == 0.25


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(tmp_path):
    with pytest.raises(ConfigError, match=r"^spec\.model\.source .*none is not a folder; check"):
        load_tokenizer(config(tmp_path / "none").model)


@pytest.mark.parametrize("read", [load_tokenizer, load_settings])
def test_a_name_on_the_hub_is_never_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[ModelConfig], object]
) -> None:
    tiny_model(tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^spec\.model\.source: the model of org/tiny"):
        read(ModelConfig(path="org/tiny"))


def test_a_missing_model_is_a_sentence(tmp_path):
    empty = tmp_path / "nothing"
    empty.mkdir()
    for load in (lambda c: load_model(c, CPU), lambda c: load_tokenizer(c.model)):
        with pytest.raises(ConfigError, match=r"^spec\.model\.source: the (model|tokenizer) of"):
            load(config(empty))


@pytest.mark.parametrize(
    ("file", "content", "part", "reason"),
    [
        pytest.param(
            "model.safetensors",
            "junk",
            "model",
            "SafetensorError: Error while deserializing header: header too small",
            id="weights",
        ),
        pytest.param("tokenizer.json", "{}", "tokenizer", "KeyError: 'added_tokens'", id="key"),
        pytest.param(
            "tokenizer_config.json",
            "[]",
            "tokenizer",
            "AttributeError: 'list' object has no attribute 'get'",
            id="a list where an object belongs",
        ),
    ],
)
def test_a_damaged_model_is_a_mistake_in_the_configuration(
    folder, tmp_path, file, content, part, reason
):
    damaged = shutil.copytree(folder, tmp_path / "model")
    (damaged / file).write_text(content)
    load = {"model": lambda c: load_model(c, CPU), "tokenizer": lambda c: load_tokenizer(c.model)}[
        part
    ]
    with pytest.raises(ConfigError) as caught:
        load(config(damaged))
    assert str(caught.value) == (
        f"spec.model.source: the {part} of {damaged} cannot be loaded ({reason}); check the name, "
        "the revision, that its files are complete and, for a gated model, the token"
    )


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_a_weight_that_no_file_holds_is_refused_instead_of_left_to_chance(folder, tmp_path, method):
    damaged = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(damaged / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    told = r"lack 1 of the model's \d+ weights \(model\.layers\.1\.mlp\.up_proj\.weight\), which"
    with pytest.raises(ConfigError, match=rf"^spec\.model\.source: the files of \S+ {told}"):
        load_model(config(damaged, method=method), CPU)


def test_a_model_whose_head_was_not_saved_is_refused_and_a_tied_head_is_none(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((damaged / "config.json").read_text())
    weights = load_file(damaged / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    for tied in (True, False):
        changed = {**settings, "tie_word_embeddings": tied}
        (damaged / "config.json").write_text(json.dumps(changed))
        if tied:
            model = load_model(config(damaged), CPU)
            assert model.lm_head.weight is model.model.embed_tokens.weight
        else:
            with pytest.raises(ConfigError, match=r"weights \(lm_head\.weight\), which would be"):
                load_model(config(damaged), CPU)


def test_the_configuration_of_another_model_is_refused_with_what_differs(folder, tmp_path):
    damaged = shutil.copytree(folder, tmp_path / "model")
    settings = json.loads((damaged / "config.json").read_text())
    changed = {**settings, "intermediate_size": settings["intermediate_size"] * 2}
    (damaged / "config.json").write_text(json.dumps(changed))
    hidden, there = settings["hidden_size"], settings["intermediate_size"]
    with pytest.raises(ConfigError) as caught:
        load_model(config(damaged), CPU)
    first = f"model.layers.0.mlp.down_proj.weight is {hidden} x {there}, and {hidden} x {2 * there}"
    assert f"do not match its config.json ({first} by config.json; " in str(caught.value)
    assert str(caught.value).endswith("; 3 more); take both from one model")


@pytest.mark.parametrize(
    ("left", "added", "remedy"),
    [
        pytest.param("", "pytorch_model.bin", "pytorch_model.bin is a pickle, which", id="pickle"),
        pytest.param("", "adapter_config.json", "it holds an adapter and no model", id="adapter"),
        pytest.param("", "notes.txt", "it has no model.safetensors; copy", id="no weights"),
        pytest.param("tokenizer_config.json", "notes.txt", "; check the name", id="a part is left"),
        pytest.param("no tokenizer", "notes.txt", "it has no tokenizer.json; save", id="none"),
    ],
)
def test_a_folder_that_lacks_a_part_is_told_what_to_do_about_it(
    folder, tmp_path, left, added, remedy
):
    damaged = shutil.copytree(folder, tmp_path / "model")
    (damaged / added).write_text("{}")
    gone = [damaged / "model.safetensors"] if not left else damaged.glob("tokenizer*")
    for file in gone:
        if file.name != left:
            file.unlink()
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(config(damaged).model) if left else load_model(config(damaged), CPU)
    assert remedy in str(caught.value)


def test_the_base_name_is_one_that_another_machine_can_use(folder, tmp_path):
    assert base_name(ModelConfig(path="org/name")) == "org/name"
    assert base_name(ModelConfig(path=str(folder), base_name="org/named")) == "org/named"
    assert base_name(ModelConfig(path=str(folder))) is None
    (tmp_path / "config.json").write_text('{"_name_or_path": "org/recorded"}')
    assert base_name(ModelConfig(path=str(tmp_path))) == "org/recorded"


def test_the_model_fingerprint_changes_with_the_weights_and_the_revision(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert model_fingerprint(ModelConfig(path=str(folder))) != model_fingerprint(
        ModelConfig(path=str(tmp_path))
    )
    assert model_fingerprint(ModelConfig(path="o/n", revision="a")) != model_fingerprint(
        ModelConfig(path="o/n", revision="b")
    )
