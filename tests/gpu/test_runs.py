"""Whole runs on one device: parity, methods, recomputation, export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from support.launch.device_runs import (
    Device,
    Trained,
    device_config,
    largest_difference,
    needs_cuda,
    train,
)
from support.strategies.parity_families import (
    MAX_NORM,
    PER_PACK,
    RATE,
    ROW_TOKENS,
    ROWS,
    STEPS,
    by_loop,
    write_model,
    write_rows,
)

pytestmark = pytest.mark.gpu
LORA = {"type": "lora", "lora": {"r": 8}}


@pytest.fixture(scope="module")
def plain(inputs: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with adapters, nothing recomputed or compiled, that others are held against."""
    return train(device_config(inputs, tmp_path_factory.mktemp("plain"), device, method=LORA))


def run_beside(plain: Trained, inputs: Path, device: Device, folder: Path, **changes: Any) -> float:
    """Return the largest difference of the losses of a run to those of `plain`."""
    made = train(device_config(inputs, folder, device, **{"method": LORA, **changes}))
    return largest_difference(made.losses, plain.losses)


def test_fp32_makes_the_losses_of_a_plain_loop(tmp_path: Path, device: Device) -> None:
    from transformers import AutoTokenizer

    write_model("llama", tmp_path / "model")
    rows = write_rows(tmp_path, AutoTokenizer.from_pretrained(tmp_path / "model"))
    _, expected = by_loop(tmp_path, "full", rows, device)
    config = device_config(
        tmp_path,
        tmp_path / "job",
        device,
        data={"format": "text", "max_seq_len": PER_PACK * ROW_TOKENS + 1, "packing": True},
        training={
            "precision": "fp32",
            "max_steps": STEPS,
            "learning_rate": RATE,
            "schedule": "constant",
            "weight_decay": 0.01,
            "max_grad_norm": MAX_NORM,
            "global_batch_size": ROWS // PER_PACK,
        },
    )
    made = train(config)
    # The order of the sums differs, and a GPU's kernels are other ones for another shape.
    assert largest_difference(made.losses, expected.losses) < (2e-5 if device == "cuda" else 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_activations_change_no_loss(
    how: str, plain: Trained, inputs: Path, device: Device, tmp_path: Path
) -> None:
    strategy = {"activation_checkpointing": how}
    assert run_beside(plain, inputs, device, tmp_path / "job", strategy=strategy) < 1e-3


@pytest.mark.full
def test_compiled_layers_make_the_losses_of_eager_ones(
    plain: Trained, inputs: Path, device: Device, tmp_path: Path
) -> None:
    needs_cuda(device, "inductor builds a CPU's kernels for minutes; `make bench-gpu` does so")
    training = {"compile": True, "is_compile_asked": True}
    assert run_beside(plain, inputs, device, tmp_path / "job", training=training) < 1e-2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_on_a_quantised_base_learn(
    kind: str, inputs: Path, device: Device, tmp_path: Path
) -> None:
    made = train(
        device_config(
            inputs,
            tmp_path / "job",
            device,
            method={"type": "qlora", "quantization": kind, "lora": {"r": 8}},
            training={"max_steps": 20, "learning_rate": 1e-2},
        )
    )
    assert made.losses[-1] < made.losses[0] - 0.1


@pytest.mark.full
def test_eight_bit_moments_make_nearly_the_losses_of_fp32(
    inputs: Path, device: Device, tmp_path: Path
) -> None:
    training = {"max_steps": 20, "learning_rate": 1e-3}
    full = {"method": {"type": "full"}, "training": training}
    wide = train(device_config(inputs, tmp_path / "wide", device, **full))
    full["training"] = {**training, "optimizer": "adamw8bit"}
    narrow = train(device_config(inputs, tmp_path / "narrow", device, **full))
    assert largest_difference(narrow.losses[-3:], wide.losses[-3:]) < 0.03
    assert narrow.losses[-1] < narrow.losses[0] - 0.1
    sizes = [
        sum(file.stat().st_size for file in (one.folder / "checkpoints").glob("step-*/*"))
        for one in (narrow, wide)
    ]
    assert sizes[0] < sizes[1] / 2  # about 4 bytes a parameter in place of 12


@pytest.mark.full
def test_a_compiled_update_in_eight_bits_makes_the_losses_of_an_eager_one(
    inputs: Path, device: Device, tmp_path: Path
) -> None:
    needs_cuda(device, "updates are compiled on GPUs alone")
    made = {}
    for compiles in (True, False):
        training = {"compile": compiles, "optimizer": "adamw8bit", "learning_rate": 1e-3}
        changes = {"method": {"type": "full"}, "training": training}
        made[compiles] = train(device_config(inputs, tmp_path / str(compiles), device, **changes))
    assert largest_difference(made[True].losses, made[False].losses) < 0.03


@pytest.mark.full
def test_float8_products_learn(inputs: Path, device: Device, tmp_path: Path) -> None:
    needs_cuda(device, "a CPU has no float8 product")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8: Ada, Hopper or newer")
    training = {"float8": True, "compile": True, "max_steps": 20, "learning_rate": 1e-3}
    made = train(device_config(inputs, tmp_path / "job", device, training=training))
    assert made.losses[-1] < made.losses[0] - 0.1


def test_what_is_exported_has_the_held_out_loss_of_the_trained_model(
    inputs: Path, device: Device, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = device_config(
        inputs,
        tmp_path / "job",
        device,
        method=LORA,
        data={"eval": {"path": str(inputs / "eval.jsonl")}},
        output={"format": "both"},
    )
    made = train(config)
    (told,) = (line["loss"] for line in made.events("evaluated") if line["step"] == 10)
    out = Path(config.output.dir)
    rows = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(out / "merged")
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    for model in (
        AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32),
        PeftModel.from_pretrained(base, out / "adapter"),
    ):
        assert held_out_loss(model.to(device).eval(), tokenizer, rows) == pytest.approx(
            told, abs=0.03
        )


def held_out_loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the mean loss of the answers' tokens, each dialogue alone."""
    total, count = 0.0, 0
    for row in rows:
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
        start = len(tokenizer(asked, add_special_tokens=False)["input_ids"])
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = ids.to(model.device)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1].float()
        total += float(functional.cross_entropy(logits, ids[start:], reduction="sum"))
        count += len(ids) - start
    return total / count
