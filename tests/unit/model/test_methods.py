"""What is trained, in which format: adapters, quantised bases, frozen weights, new tokens."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from finetune_trainer.config import ModelConfig, TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import load_model, load_tokenizer, new_token_ids
from finetune_trainer.refusals import Refusals
from support.data.text_fixtures import tiny_model
from support.launch.launches import train_config

CPU = torch.device("cpu")
NEW = ("<|think|>", "<|/think|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("methods")
    tiny_model(made / "model")
    tiny_model(made / "tied", tied=True)
    return made


def settings(folder: Path, method: str = "lora", **changes: Any) -> TrainConfig:
    """Return a configuration of one method; keys of `changes` are paths such as `method.lora`."""
    lora = {} if method == "full" else {"lora": {"r": 4}}
    stored = {"quantization": "nf4"} if method == "qlora" else {}
    values: dict[str, Any] = {
        "world": {"nproc_per_node": 1},
        "method": {"type": method, **lora, **stored},
        "output": {"format": "merged"},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        values.setdefault(section, {})[key] = value
    return train_config(folder, **values)


def trained(config: TrainConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return choose_trained(load_model(config, CPU), config)


def losses(model: Any, steps: int, narrow: bool = False) -> list[float]:
    """Train on one batch and return the loss of every step."""
    ids = torch.randint(3, 700, (4, 24), generator=torch.Generator().manual_seed(0))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            logits = model(input_ids=ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def types(model: Any) -> dict[str, set[torch.dtype]]:
    named = list(model.named_parameters())
    return {
        "trained": {p.dtype for _, p in named if p.requires_grad},
        "frozen": {p.dtype for _, p in named if not p.requires_grad},
    }


@pytest.mark.parametrize(
    ("quantization", "precision", "recompute"),
    [
        pytest.param("nf4", "fp32", "none", id="nf4"),
        pytest.param("nf4", "bf16", "full", id="nf4 in bf16, activations recomputed"),
        pytest.param("int8", "bf16", "none", id="int8"),
        pytest.param("nf4", "bf16", "selective", id="nf4 in bf16, some recomputed"),
    ],
)
def test_adapters_learn_on_a_quantised_base(
    folder: Path, quantization: str, precision: str, recompute: str
) -> None:
    model = trained(
        settings(
            folder,
            "qlora",
            method__quantization=quantization,
            training__precision=precision,
            strategy__activation_checkpointing=recompute,
        )
    )
    linear = {
        name: type(m).__name__ for name, m in model.named_modules() if "Linear" in str(type(m))
    }
    narrow = "Linear4bit" if quantization == "nf4" else "Linear8bitLt"
    assert narrow in linear.values()
    assert linear["base_model.model.lm_head"] == "Linear"
    assert types(model)["trained"] == {torch.float32}
    found = losses(model, 6, narrow=precision == "bf16")
    assert found[-1] < found[0] - 0.1


def test_a_quantised_base_passes_the_same_gradients_after_an_evaluation(folder: Path) -> None:
    def gradients(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=torch.arange(24)[None], use_cache=False).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    model = trained(settings(folder, "qlora"))
    before = gradients(model)
    assert any(bool(gradient.any()) for gradient in before)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(24)[None], use_cache=False)
    torch.testing.assert_close(gradients(model.train()), before, rtol=0, atol=0)


def test_nf4_is_stored_as_bytes_under_every_strategy(folder: Path) -> None:
    def stored(strategy: str) -> set[torch.dtype]:
        config = settings(folder, "qlora", training__precision="bf16", strategy__type=strategy)
        model: Any = load_model(config, CPU)
        assert model.config.quantization_config.bnb_4bit_use_double_quant
        assert model.config.quantization_config.bnb_4bit_compute_dtype == torch.bfloat16
        return {m.weight.dtype for m in model.modules() if type(m).__name__ == "Linear4bit"}

    assert stored("ddp") == {torch.uint8}
    assert stored("fsdp") == {torch.uint8}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"training__precision": "fp64"},
            r"spec\.training\.precision fp64 has no effect with spec\.method\.quantization nf4",
            id="fp64",
        ),
        pytest.param(
            {"method__quantization": "int8", "strategy__type": "fsdp"},
            r"int8 cannot be sharded by spec\.strategy\.type fsdp; use quantization nf4",
            id="int8 under fsdp",
        ),
        pytest.param(
            {"method__quantization": "int8", "method__lora": {"r": 4, "dora": True}},
            r"lora\.dora is not possible with spec\.method\.quantization int8, whose layers",
            id="dora over int8",
        ),
    ],
)
def test_a_quantised_base_that_cannot_work_is_refused(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_model(settings(folder, "qlora", **changes), CPU)


def test_a_missing_bitsandbytes_is_told_with_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # how Python marks what is not there
    with pytest.raises(ConfigError, match=r"pip install finetune-operator\[qlora\]"):
        load_model(settings(folder, "qlora"), CPU)


@pytest.mark.parametrize(
    ("method", "precision", "expected"),
    [
        pytest.param(
            "lora", "fp16", {"frozen": torch.float16, "trained": torch.float32}, id="fp16"
        ),
        pytest.param(
            "lora", "fp64", {"frozen": torch.float64, "trained": torch.float64}, id="fp64"
        ),
        pytest.param("full", "fp16", {"trained": torch.float32}, id="full in fp16"),
        pytest.param("full", "fp64", {"trained": torch.float64}, id="full in fp64"),
    ],
)
def test_frozen_weights_take_the_format_of_the_arithmetic_and_trained_ones_fp32(
    folder: Path, method: str, precision: str, expected: dict[str, torch.dtype]
) -> None:
    model = trained(settings(folder, method, training__precision=precision))
    assert types(model) == {"frozen": set()} | {key: {dtype} for key, dtype in expected.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_zero_reads_weights_in_the_precision_of_its_engine(folder: Path, precision: str) -> None:
    changes = {"training__precision": precision, "strategy__type": "zero2"}
    model = load_model(settings(folder, "full", **changes), CPU)
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_dora_and_rslora_change_what_an_adapter_computes_and_learn(folder: Path) -> None:
    plain = trained(settings(folder))
    scaled = trained(settings(folder, method__lora={"r": 4, "rslora": True}))
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    assert plain.get_submodule(layer).scaling["default"] == 32 / 4
    assert scaled.get_submodule(layer).scaling["default"] == 32 / 2

    dora = trained(
        settings(folder, training__precision="bf16", method__lora={"r": 4, "dora": True})
    )
    magnitudes = [p for name, p in dora.named_parameters() if "magnitude" in name]
    assert len(magnitudes) == 14
    assert types(dora)["trained"] == {torch.float32}
    before = magnitudes[0].detach().clone()
    found = losses(dora, 4, narrow=True)
    assert found[-1] < found[0]
    assert not torch.equal(before, magnitudes[0])


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    """Return the folder of an adapter whose every B has been moved off zero."""
    model = trained(settings(folder, method__lora={"r": 4, "target_modules": ("q_proj", "v_proj")}))
    losses(model, 2)
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return folder / "adapter"


def test_training_starts_from_the_weights_of_an_adapter(folder: Path, adapter: Path) -> None:
    from peft import PeftModel

    chosen = {"r": 4, "target_modules": ("q_proj", "v_proj"), "start_from": str(adapter)}
    config = settings(folder, method__lora=chosen)
    model = trained(config, seed=1)
    expected = PeftModel.from_pretrained(load_model(config, CPU), str(adapter))
    ids = torch.arange(24)[None]
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert len(losses(model, 1)) == 1, "and goes on from there"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"r": 8}, r"has r 4, this job 8; set spec\.method\.lora\.r to", id="rank"),
        pytest.param({"alpha": 8}, r"has lora_alpha 32.*, this job 8.*lora\.alpha", id="alpha"),
        pytest.param({"dora": True}, "has use_dora False, this job True", id="dora"),
        pytest.param(
            {"target_modules": ("q_proj", "k_proj")},
            r"adapts q_proj, v_proj, this job k_proj, q_proj.*targetModules",
            id="targets",
        ),
        pytest.param({"start_from": "."}, r"holds no adapter_config\.json", id="no adapter"),
    ],
)
def test_an_adapter_of_another_shape_is_refused_with_the_difference(
    folder: Path, adapter: Path, changes: dict[str, Any], sentence: str
) -> None:
    chosen = {"r": 4, "target_modules": ("q_proj", "v_proj"), "start_from": str(adapter)}
    with pytest.raises(ConfigError, match=rf"^spec\.method\.lora\.startFrom .*{sentence}"):
        trained(settings(folder, method__lora=chosen | changes))


def test_an_adapter_of_another_base_is_refused(folder: Path, adapter: Path, tmp_path: Path) -> None:
    other = shutil.copytree(adapter, tmp_path / "other")
    tensors = load_file(other / "adapter_model.safetensors")
    wider = {name: torch.cat([t, t], -1) if "lora_A" in name else t for name, t in tensors.items()}
    save_file(wider, other / "adapter_model.safetensors")
    chosen = {"r": 4, "target_modules": ("q_proj", "v_proj"), "start_from": str(other)}
    said = r"belongs to another base model: its .*lora_A.* is \(4, 128\), here \(4, 64\); set spec"
    with pytest.raises(ConfigError, match=rf"^spec\.method\.lora\.startFrom .*{said}"):
        trained(settings(folder, method__lora=chosen))


def with_config(adapter: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Copy an adapter with another configuration; return the settings to start from it."""
    other = shutil.copytree(adapter, folder / "other")
    path = other / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return {"r": 4, "target_modules": ("q_proj", "v_proj"), "start_from": str(other)}


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq"])
def test_an_adapter_that_changes_its_base_is_refused_in_a_new_run(
    folder: Path, adapter: Path, tmp_path: Path, start: str
) -> None:
    chosen = with_config(adapter, tmp_path, init_lora_weights=start)
    config = settings(folder, method__lora=chosen)
    sentence = (
        rf"startFrom .* was initialised by {start}, which changes the weights of the base model"
    )
    with pytest.raises(ConfigError, match=sentence):
        trained(config)
    warnings: list[str] = []
    choose_trained(load_model(config, CPU), config, Refusals(is_new=False, warn=warnings.append))
    [warning] = warnings
    assert start in warning


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_other_initialisations_keep_the_base(
    folder: Path, adapter: Path, tmp_path: Path, start: bool | str
) -> None:
    trained(settings(folder, method__lora=with_config(adapter, tmp_path, init_lora_weights=start)))


def test_an_adapter_that_names_another_base_gives_a_warning(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    chosen = with_config(adapter, tmp_path, base_model_name_or_path="example/other-1b")
    config = settings(folder, method__lora=chosen)
    warnings: list[str] = []
    choose_trained(load_model(config, CPU), config, Refusals(is_new=True, warn=warnings.append))
    [warning] = warnings
    assert "was trained on example/other-1b, and this job trains" in warning


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model_name_or_path": "/elsewhere/model"}, "was trained on /elsewhere/model"),
        ({"alora_invocation_tokens": [1, 2]}, "is an aLoRA"),
    ],
)
def test_another_folder_of_the_same_name_and_an_alora_give_warnings(
    folder: Path, adapter: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    config = settings(folder, method__lora=with_config(adapter, tmp_path, **changes))
    warnings: list[str] = []
    refusals = Refusals(is_new=False, warn=warnings.append)
    choose_trained(load_model(config, CPU), config, refusals)
    [warning] = warnings
    assert sentence in warning


def test_the_same_base_in_another_folder_gives_no_warning(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    named = "someone/model"
    config = settings(
        folder, method__lora=with_config(adapter, tmp_path, base_model_name_or_path=named)
    )
    choose_trained(load_model(config, CPU), config, Refusals(is_new=True, warn=pytest.fail))


def test_a_damaged_adapter_is_refused(folder: Path, adapter: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(adapter, tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"junk")
    chosen = {"r": 4, "target_modules": ("q_proj", "v_proj"), "start_from": str(damaged)}
    with pytest.raises(ConfigError, match=r"startFrom .*: the adapter cannot be loaded \(Safet"):
        trained(settings(folder, method__lora=chosen))


def test_freezing_leaves_what_a_pattern_names_untrained(folder: Path) -> None:
    patterns = ("model.embed_tokens.*", "model.layers.0.*")
    model = trained(settings(folder, "full", method__freeze=patterns))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("model.embed_tokens", "model.layers.0."))
    }
    assert len(frozen) == 10


@pytest.mark.parametrize(
    ("patterns", "tokens", "sentence"),
    [
        pytest.param(
            ("transformer.h.*",),
            (),
            r"spec\.method\.freeze transformer\.h\.\* matches no parameter; names are like "
            r"model\.embed_tokens\.weight, model\.layers\.\d\..*, lm_head\.weight$",
            id="matches nothing",
        ),
        pytest.param(("model.*", "lm_head.*"), (), "freezes every parameter", id="everything"),
        pytest.param(
            ("model.embed_tokens.*",),
            NEW,
            r"spec\.model\.addTokens would never be trained",
            id="the rows of new tokens",
        ),
    ],
)
def test_freezing_that_cannot_be_meant_is_refused(
    folder: Path, patterns: tuple[str, ...], tokens: tuple[str, ...], sentence: str
) -> None:
    config = settings(folder, "full", method__freeze=patterns, model__add_tokens=tokens)
    with pytest.raises(ConfigError, match=sentence):
        trained(config)


@pytest.mark.parametrize("base", ["model", "tied"])
def test_new_tokens_start_as_the_mean_of_the_others_on_every_rank(folder: Path, base: str) -> None:
    config = settings(folder, "full", model__path=str(folder / base), model__add_tokens=NEW)
    ids = new_token_ids(config.model)
    torch.manual_seed(1)
    model, other = load_model(config, CPU), load_model(config, CPU)
    assert ids == [768, 769]
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape[0] == 770
        torch.testing.assert_close(layer.weight[769], layer.weight[:768].mean(0))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (base == "tied")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("base", ["model", "tied"])
def test_adapters_train_the_rows_of_new_tokens_and_no_others(
    folder: Path, base: str, method: str
) -> None:
    config = settings(
        folder,
        method,
        model__path=str(folder / base),
        model__add_tokens=NEW,
        training__precision="bf16",
    )
    model = trained(config)
    rows = {name: p for name, p in model.named_parameters() if "trainable_tokens" in name}
    assert len(rows) == (1 if base == "tied" else 2)
    assert all(p.requires_grad and p.shape == (2, 64) for p in rows.values())
    assert types(model)["trained"] == {torch.float32}
    ids = torch.tensor([[5, 768, 9, 769, 7]])
    logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    assert all(bool(p.grad.any()) for p in rows.values())


def test_new_tokens_are_special_and_one_id_each(folder: Path) -> None:
    tokenizer = load_tokenizer(settings(folder, model__add_tokens=NEW).model)
    assert tokenizer("a<|think|>b")["input_ids"].count(768) == 1
    assert tokenizer.decode([768, 769], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            {"model__add_tokens": ("<|im_start|>",)},
            r"addTokens <\|im_start\|> is already in the vocabulary",
            id="a known token",
        ),
        pytest.param(
            {"model__add_tokens": ("<a>", "<a>")}, "<a> is already in .* or named twice", id="twice"
        ),
        pytest.param(
            {"model__add_tokens": (" ",)}, "addTokens names a token without text", id="empty"
        ),
        pytest.param(
            {"model__chat_template": "{% for m in messages %}\n{{ m.content }\n{% endfor %}"},
            r"spec\.model\.chatTemplate is not valid Jinja: line 2: unexpected '}'",
            id="a template with a slip",
        ),
        pytest.param(
            {"model__chat_template_arguments": {"enable_thinking": False}},
            r"spec\.model\.chatTemplateArguments\.enable_thinking has no effect.*it reads none",
            id="an argument that the template does not read",
        ),
        pytest.param(
            {"model__chat_template_arguments": {"messages": "none"}},
            r"spec\.model\.chatTemplateArguments\.messages has no effect",
            id="an argument that the rows give",
        ),
    ],
)
def test_a_tokenizer_setting_that_cannot_work_is_refused(
    folder: Path, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_tokenizer(settings(folder, **change).model)


def test_arguments_of_the_template_hold_wherever_nobody_gives_others(folder: Path) -> None:
    template = "\n{{ mood is defined and mood }} {{ depth + 1 }}{{ bos_token }}"
    arguments: dict[str, Any] = {"mood": 'it\'s "fine" %}', "depth": 2}
    change: dict[str, Any] = {
        "model__chat_template": template,
        "model__chat_template_arguments": arguments,
    }
    tokenizer = load_tokenizer(settings(folder, **change).model)
    tokenizer.save_pretrained(folder / "exported")
    for one in (tokenizer, load_tokenizer(ModelConfig(path=str(folder / "exported")))):
        said = [{"role": "user", "content": "hi"}]
        text = one.apply_chat_template(said, tokenize=False)
        assert text == '\nit\'s "fine" %} 3'
        assert one.apply_chat_template(said, tokenize=False, depth=0).endswith("1")


def test_a_chat_template_takes_the_place_of_the_tokenizers(folder: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    tokenizer = load_tokenizer(settings(folder, model__chat_template=template).model)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "[user] hi\n"
