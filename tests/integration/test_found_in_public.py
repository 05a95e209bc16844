"""Public reports: the smallest input of each, which release 0.1.0 trained or exported wrongly.

A test bears the tracker and the number of its report. Relatives of each kind are tested
beside the code.
"""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM

from finetune_operator.cli.conclusion import outcome_of
from finetune_operator.cli.result import print_outcome
from finetune_trainer.config import (
    DataConfig,
    DataFormat,
    DatasetSource,
    ExitCode,
    ModelConfig,
    Progress,
    TrainConfig,
)
from finetune_trainer.data.encoding import RowEncoder
from finetune_trainer.data.formats import Conversation, read_example
from finetune_trainer.data.source import Row, open_rows
from finetune_trainer.errors import ConfigError, DataError
from finetune_trainer.export import export
from finetune_trainer.failpoints import ENV_FAILPOINT
from finetune_trainer.model.adapters import choose_trained
from finetune_trainer.model.load import load_model, load_tokenizer
from finetune_trainer.refusals import Refusals
from support.checkpoint.export_fixtures import PROGRESS, export_config, output_fence, trained_model
from support.data.text_fixtures import (
    CHATML_TEMPLATE,
    VOCAB_SIZE,
    save_tokenizer,
    tiny_model,
    tiny_tokenizer,
)
from support.launch.forked_ranks import Ranks, attempt, numbers
from support.launch.launches import train_config
from support.launch.tiny_run import write_inputs
from support.model.every_family import tiny_settings
from support.model.quantized_files import write_fp8

# Rows and templates.


def tokens_of(tokenizer: Any, row: dict[str, Any], **config: Any) -> list[str]:
    """Return the tokens of a row as text."""
    data = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused", **config)
    [encoded] = RowEncoder(data, tokenizer).encode([Row("rows.jsonl line 1", row)])
    [part] = encoded.parts
    return [str(tokenizer.decode([token])) for token in part.tokens]


def test_qwen_1089_a_tool_result_that_the_template_drops_is_refused(tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'tool' %}",
    )
    messages = [
        {"role": "user", "content": "Weather in Bern?"},
        {"role": "tool", "content": "31 degrees"},
        {"role": "assistant", "content": "It is 31 degrees."},
    ]
    with pytest.raises(DataError, match=r"line 1: turn 2 \(tool\) is left out"):
        tokens_of(tiny_tokenizer(tmp_path, template=template), {"messages": messages})


def test_openrlhf_393_begin_and_end_tokens_are_not_doubled(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=None)
    row = {"text": "<|im_start|>Hello<|im_end|>"}
    allowed = {"format": DataFormat.TEXT, "allow_special_tokens": True}
    assert tokens_of(tokenizer, row, **allowed).count("<|im_end|>") == 1


def test_verl_7664_a_template_that_joins_call_arguments_as_text_gets_text(tmp_path: Path) -> None:
    template = CHATML_TEMPLATE.replace(
        "message['content']",
        "message['content'] + (message['tool_calls'][0]['function']['name'] + ' ' + "
        "message['tool_calls'][0]['function']['arguments'] if message['tool_calls'] else '')",
    )
    call = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tokens = tokens_of(tiny_tokenizer(tmp_path, template=template), {"messages": messages})
    assert 'weather {"city": "Bern"}<|im_end|>' in "".join(tokens)


def test_transformers_45488_the_tokens_come_from_the_file(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "Qwen2Tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert tokenizer("in 2024")["input_ids"] == file.encode("in 2024").ids


# Files and columns.


def conversation_of(row: dict[str, Any], **config: Any) -> Conversation:
    """Return a row as a dialogue."""
    data = DataConfig(train=DatasetSource(path="rows.jsonl"), cache_dir="unused", **config)
    found = read_example(Row("rows.jsonl line 1", row), data.format, data.columns)
    assert isinstance(found, Conversation)
    return found


def test_torchtune_2618_a_function_call_of_a_turn_is_a_tool_call() -> None:
    call = {"name": "weather", "arguments": '{"city": "Bern"}'}
    schema = {"name": "weather", "parameters": {}}
    row = {
        "messages": [
            {"role": "user", "content": "Weather in Bern?"},
            {"role": "assistant", "content": "", "function_call": call},
        ],
        "functions": [schema],
    }
    read = conversation_of(row)
    assert read.learned == (1,)
    assert read.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Bern"}},
            }
        ],
    }
    assert read.tools == ({"type": "function", "function": schema},)


def test_llamafactory_3351_the_history_of_a_row_is_its_earlier_turns() -> None:
    row = {"history": [["One?", "1"]], "instruction": "Two?", "output": "2"}
    read = conversation_of(row, format=DataFormat.INSTRUCTION)
    assert [turn["content"] for turn in read.messages] == ["One?", "1", "Two?", "2"]
    assert read.learned == (1, 3)


def test_hub_split_files_of_one_folder_are_not_all_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "test", "validation"):
        (folder / f"{name}.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"test\.jsonl; train\.jsonl; validation\.jsonl") as error:
        open_rows(DatasetSource(path=str(folder)), name="train", cache_dir=tmp_path)
    assert "in spec.dataset.source, and held-out rows in spec.dataset.evalSource" in str(
        error.value
    )


# Models.


def test_ms_swift_9802_a_head_for_several_tokens_is_exported(tmp_path: Path) -> None:
    model = write_inputs(tmp_path) / "model"
    head = {"mtp.layers.0.proj.weight": torch.rand(64, 64)}
    file = model / "model.safetensors"
    save_file(load_file(file) | head, file, metadata={"format": "pt"})
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        method={"type": "lora", "lora": {"r": 2}},
        training={"max_steps": 2, "global_batch_size": 4, "learning_rate": 1e-2},
        data={"max_seq_len": 64},
    )
    ranks = Ranks(config)
    assert ranks.codes() == [0], ranks.termination().message
    output = Path(config.output.dir)
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    written = load_file(output / index["mtp.layers.0.proj.weight"])
    assert torch.equal(written["mtp.layers.0.proj.weight"], head["mtp.layers.0.proj.weight"])
    assert "mtp (1 tensors)" in (output / "README.md").read_text()


@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_peft_1342_a_quantised_base_is_trained_with_adapters_or_refused(
    kind: str, tmp_path: Path
) -> None:
    model = write_inputs(tmp_path, hidden_size=128) / "model"
    if kind == "fp8":
        write_fp8(model)
    else:
        stored = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        AutoModelForCausalLM.from_pretrained(
            model, quantization_config=stored, device_map={"": "cpu"}
        ).save_pretrained(model)
    alone: dict[str, Any] = {"world": {"nproc_per_node": 1}, "data": {"max_seq_len": 64}}
    if kind == "nf4":
        whole = Ranks(train_config(tmp_path / "full", model={"path": str(model)}, **alone))
        assert whole.codes() == [ExitCode.CONFIG]
        assert "is stored in nf4, whose weights cannot be trained" in whole.termination().message
    config = train_config(
        tmp_path,
        method={"type": "lora", "lora": {"r": 2}},
        training={"max_steps": 2, "global_batch_size": 4, "learning_rate": 1e-2},
        output={"format": "both"},
        **alone,
    )
    ranks = Ranks(config)
    assert ranks.codes() == [0], ranks.termination().message
    merged = Path(config.output.dir) / "merged"
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    dtypes = {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()}
    assert dtypes == ({torch.bfloat16} if kind == "fp8" else {torch.float32})


def test_trl_6617_text_for_a_model_that_also_sees_leaves_the_tower_alone(tmp_path: Path) -> None:
    model = write_inputs(tmp_path) / "model"
    settings = tiny_settings("gemma3")
    settings.text_config.vocab_size = VOCAB_SIZE
    base = AutoModelForCausalLM.from_config(settings)
    base.save_pretrained(model)
    config = train_config(
        tmp_path,
        training={"max_steps": 2, "global_batch_size": 4, "weight_decay": 0.1},
        data={"max_seq_len": 64},
        output={"format": "merged", "dtype": "float32"},
    )
    ranks = Ranks(config)
    assert ranks.codes() == [0, 0], ranks.termination().message
    warnings = Progress.read(Path(config.run_dir) / "progress.json").warnings
    assert any("no text reaches model.vision_tower" in sentence for sentence in warnings), warnings
    written = load_file(Path(config.output.dir) / "model.safetensors")
    seen = {
        name: t for name, t in load_file(model / "model.safetensors").items() if "vision" in name
    }
    assert seen
    assert all(torch.equal(written[name], tensor) for name, tensor in seen.items())


def test_peft_2184_an_adapter_that_changed_its_base_is_refused(tmp_path: Path) -> None:
    model = write_inputs(tmp_path) / "model"
    lora = {"r": 2, "target_modules": ["q_proj"]}
    config = train_config(tmp_path, method={"type": "lora", "lora": lora})
    choose_trained(load_model(config, torch.device("cpu")), config).save_pretrained(model / "a")
    path = model / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "pissa"}))
    method = {"type": "lora", "lora": lora | {"start_from": str(model / "a")}}
    config = train_config(tmp_path, method=method)
    with pytest.raises(ConfigError, match="was initialised by pissa, which changes the weights"):
        choose_trained(load_model(config, torch.device("cpu")), config)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "Llama"])
def test_bitsandbytes_1849_experts_that_stay_wide_are_named(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    settings = getattr(transformers, f"{family}Config")(vocab_size=64, **sizes, **heads)
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    model.save_pretrained(tmp_path / "model")
    config = train_config(tmp_path, method={"type": "qlora", "quantization": "nf4", "lora": {}})
    warnings: list[str] = []
    load_model(config, torch.device("cpu"), Refusals(is_new=True, warn=warnings.append))
    stacked = [p for name, p in model.named_parameters() if "experts" in name]
    if family == "Llama":
        assert warnings == []
        return
    size = sum(p.numel() for p in stacked) * 4 / 2**30
    assert f"quantization nf4: {size:.3g} GiB" in warnings[0]
    assert "layers.0.mlp.experts.gate_up_proj and 3 more" in warnings[0]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param({"pad_token": "[PAD]", "eos_token": "<|im_end|>"}, id="beyond the vocabulary"),
        pytest.param({}, id="no pad and no eos"),
    ],
)
def test_llama_cookbook_189_any_id_pads(names: dict[str, str], tmp_path: Path) -> None:
    model = write_inputs(tmp_path) / "model"
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    kept = {key: value for key, value in settings.items() if not key.endswith("_token")}
    path.write_text(json.dumps(kept | names))
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        training={"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 4},
        data={"packing": False, "max_seq_len": 64},
    )
    ranks = Ranks(config)
    assert ranks.codes() == [0], ranks.termination().message


# Exports.


def test_llamafactory_7454_the_learned_stop_is_exported(tmp_path: Path) -> None:
    model = write_inputs(tmp_path) / "model"
    for name in ("config", "generation_config"):
        change(model / f"{name}.json", eos_token_id=0)
    change(model / "tokenizer_config.json", eos_token="<|endoftext|>")
    config = train_config(tmp_path, world={"nproc_per_node": 1}, training={"max_steps": 1})
    assert attempt(config) == [0]

    output = Path(config.output.dir)
    stop = load_tokenizer(config.model).convert_tokens_to_ids("<|im_end|>")
    generation = json.loads((output / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, stop]
    tokenizer = load_tokenizer(config.model.model_copy(update={"path": str(output)}))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", stop)


def test_unsloth_8444_the_rotary_base_and_the_tokenizer_are_the_bases(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    change(model / "config.json", rope_parameters=None, rope_theta=500000.0)
    change(model / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    config = export_config(model, tmp_path / "output", method="full", format="merged")
    folder = exported(config)
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 500000.0
    name = "tokenizer_config.json"
    assert (folder / name).read_bytes() == (model / name).read_bytes()


def exported(config: TrainConfig) -> Path:
    """Export a random model and return the folder."""
    model, tokenizer = trained_model(config), load_tokenizer(config.model)
    fence = output_fence(config)
    [folder] = export(model, tokenizer, config, fence=fence, progress=PROGRESS, warn=print)
    return Path(folder)


def change(path: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_peft_2018_an_adapted_tied_head_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    tiny_model(tmp_path / "model", tied=True)
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        method={"type": "lora", "lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]}},
        training={"max_steps": 1},
    )
    ranks = Ranks(config)
    assert ranks.codes() == [ExitCode.CONFIG]
    message = ranks.termination().message
    assert "the adapters of lm_head cannot be merged" in message
    assert "remove lm_head from spec.method.lora.targetModules (q_proj, lm_head)" in message


def test_early_stopping_reports_the_losses_of_the_exported_weights(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        data={"eval": {"path": str(tmp_path / "eval.jsonl")}},
        training={
            "max_steps": 30,
            "learning_rate": 0.1,  # too high: the held-out loss rises soon
            "schedule": "constant",
            "eval_every_steps": 1,
            "early_stopping": {"patience": 1},
        },
    )
    assert attempt(config) == [0]
    evaluations: dict[int, float] = numbers(config)["evaluations"]
    best = min((step for step in evaluations if step), key=lambda step: evaluations[step])
    progress = Progress.read(Path(config.run_dir) / "progress.json")
    assert best < progress.step
    assert (progress.exported_step, progress.eval_loss) == (best, evaluations[best])
    assert f"trained for {best} steps" in (Path(config.output.dir) / "README.md").read_text()


def test_peft_1381_a_folder_with_model_and_adapter_is_refused_for_what_it_is(
    tmp_path: Path,
) -> None:
    base = tiny_model(tmp_path / "base")
    config = export_config(base, tmp_path / "adapter")
    exported(config)
    shutil.copytree(tmp_path / "adapter", base, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"^spec.model.source \S+ holds a model and an adapter"):
        load_model(config, torch.device("cpu"))


def test_transformers_45127_the_printed_lines_load_an_adapter_with_added_tokens(
    tmp_path: Path,
) -> None:
    base = tiny_model(tmp_path / "base")
    config = export_config(base, tmp_path / "output")
    model = config.model.model_copy(update={"add_tokens": ("<|tool|>",)})
    folder = exported(config.model_copy(update={"model": model}))
    out = io.StringIO()
    print_outcome(Console(file=out, width=60), outcome_of(folder, base, Progress()), chat="")
    names: dict[str, Any] = {}
    exec(out.getvalue().partition("Load it with:")[2].strip(), names)
    assert names["model"].get_input_embeddings().weight.shape[0] == len(names["tokenizer"])


def test_replaced_held_out_rows_restart_the_comparison(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    rows = tmp_path / "eval.jsonl"
    config = train_config(
        tmp_path,
        world={"nproc_per_node": 1},
        data={"eval": {"path": str(rows)}},
        training={
            "max_steps": 12,
            "learning_rate": 3e-3,
            "eval_every_steps": 2,
            "early_stopping": {"patience": 1},
        },
        checkpoint={"every_steps": 2},
    )
    assert attempt(config, {ENV_FAILPOINT: "before-optimizer@8:rank=0"}) != [0]
    harder = [
        {**json.loads(line), "completion": "Zebra 9."} for line in rows.read_text().splitlines()
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in harder))
    assert attempt(config) == [0]

    progress = Progress.read(Path(config.run_dir) / "progress.json")
    losses = numbers(config)["evaluations"]
    assert losses[8] > losses[6], "a higher loss of other rows"
    assert progress.step > 8
    assert progress.best_checkpoint is not None
    assert progress.best_checkpoint.step >= 8
    assert progress.eval_loss_before is None
    assert "the held-out rows have changed since the checkpoint of step 6" in progress.warnings[0]
