"""Ten steps of many model families, by manifest and in a plain loop: the same losses and weights.

    PYTHONPATH=tests python tests/support/strategies/parity_families.py [FAMILY...]

Each family is trained packed and not, whole and with LoRA, in fp32 by `ftctl run`; what it exports
is compared, LoRA's merged into the base. The loop beside it shares nothing with the trainer: it
gives the model each row alone, and knows Hugging Face's loss, clipping and AdamW. All rows are in
every step, so that their order tells nothing.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from support.data.text_fixtures import VOCAB_SIZE, tiny_tokenizer
from support.launch.journals import journal_in
from support.launch.launches import clean_environment
from support.model.model_families import SMALL, SMALL_GPT2

STEPS, ROWS, ROW_TOKENS, RATE, DECAY, MAX_NORM, RANK = 10, 6, 33, 1e-3, 0.01, 1.0, 4
PER_PACK = 2
LOSS_LIMIT, WEIGHTS_LIMIT = 1e-6, 1e-3
_SIZES = {**SMALL, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": {**_SIZES, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 8},
    "gemma2": {**_SIZES, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_SIZES, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": _SIZES,
    "gpt2": {**SMALL_GPT2, "vocab_size": VOCAB_SIZE, "n_positions": 128},
    "falcon": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "gpt_oss": {**_SIZES, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Their packs would leak: the trainer gives each row a sequence of its own.
NOT_PACKED = frozenset({"falcon", "gpt_oss"})


@dataclass(frozen=True)
class Found:
    """What came of one training: the loss of each step, and the weights at the end."""

    losses: list[float]
    weights: dict[str, Tensor]


def write_model(family: str, folder: Path) -> None:
    """Save a random model, large enough in its numbers for a leak to show, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer(folder, template=None)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **ids})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    model.save_pretrained(folder)


def write_rows(folder: Path, tokenizer: Any) -> list[list[int]]:
    """Write texts of equally many tokens, so that every order packs alike; return their tokens."""
    generator = torch.Generator().manual_seed(1)
    rows: list[list[int]] = []
    texts: list[str] = []
    while len(rows) < ROWS:
        numbers = torch.randint(0, 1000, (ROW_TOKENS,), generator=generator).tolist()
        text = " ".join(map(str, numbers))
        while len(tokens := tokenizer(text, add_special_tokens=False)["input_ids"]) >= ROW_TOKENS:
            text = text[:-1]
        if len(tokens) == ROW_TOKENS - 1:
            rows.append([*tokens, tokenizer.eos_token_id])
            texts.append(text)
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "train.jsonl").write_text("".join(lines))
    return rows


def write_adapter(model_folder: Path, folder: Path) -> None:
    """Save an adapter to begin with, whose B is not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"
    )
    model = get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)


def manifest(family: str, method: str, *, is_packed: bool) -> dict[str, Any]:
    """Return the job: packed by default, as far as the family can be."""
    batch = ROWS // PER_PACK if is_packed and family not in NOT_PACKED else ROWS
    lora = {"r": RANK, "alpha": 2 * RANK, "dropout": 0.0, "startFrom": "file://./adapter"}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": f"{method}-{'packed' if is_packed else 'padded'}"},
        "spec": {
            "model": {"source": "file://./model", "baseName": "tiny"},
            "dataset": {"source": "file://./train.jsonl", "format": "text"},
            "method": {"type": method, **({"lora": lora} if method == "lora" else {})},
            "training": {
                "maxSteps": STEPS,
                "learningRate": RATE,
                "schedule": "constant",
                "weightDecay": DECAY,
                "maxGradNorm": MAX_NORM,
                "globalBatchSize": batch,
                "microBatchSize": 1,
                "maxSeqLength": PER_PACK * ROW_TOKENS + 1,
                **({} if is_packed else {"packing": False}),
                "precision": "fp32",
            },
            "topology": {"gpusPerNode": 0, "processesPerNode": 1},
            **({"output": {"format": "merged"}} if method == "lora" else {}),
            "backend": {"type": "local", "local": {"threadsPerProcess": 1}},
        },
    }


def by_manifest(family: str, folder: Path, method: str, *, is_packed: bool) -> Found:
    """Train by `ftctl run`."""
    from safetensors.torch import load_file

    job = manifest(family, method, is_packed=is_packed)
    file = folder / f"{job['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "finetune_operator", "run", "--plain", str(file)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    place = folder / "runs/default" / job["metadata"]["name"]
    losses = [event["loss"] for event in journal_in(place) if event["event"] == "step"]
    files = sorted((place / "output").glob("*.safetensors"))
    return Found(losses, {key: value for file in files for key, value in load_file(file).items()})


def by_loop(
    folder: Path, method: str, rows: Sequence[Sequence[int]], device: str = "cpu"
) -> tuple[Found, Found]:
    """Train in a plain loop; return what it began with and what came of it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def saved(losses: list[float]) -> Found:
        whole = model
        if isinstance(model, PeftModel):
            whole = PeftModel.from_pretrained(base_of(folder), folder / "adapter")
            whole.load_state_dict(model.state_dict())
            whole = whole.merge_and_unload()
        state = {name: tensor.cpu().clone() for name, tensor in whole.state_dict().items()}
        return Found(losses, state)

    def base_of(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    model = base_of(folder)
    if method == "lora":
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    model.to(device).train()
    first = saved([])
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": DECAY},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses = []
    num_labels = sum(len(row) - 1 for row in rows)
    for _ in range(STEPS):
        total = 0.0
        for row in rows:
            ids = torch.tensor([row], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / num_labels
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return first, saved(losses)


def differences(found: Found, expected: Found, first: Found) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and that of the weights to their update."""
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True))
    shared = [name for name in expected.weights if name in found.weights]
    assert shared, "nothing was exported"
    off = sum(squared(found.weights[n] - expected.weights[n]) for n in shared)
    moved = sum(squared(expected.weights[n] - first.weights[n]) for n in shared)
    return loss, math.sqrt(off / moved)


def squared(tensor: Tensor) -> float:
    """Return the sum of the squares."""
    return float(tensor.double().square().sum())


def compare(family: str, folder: Path, packed: Sequence[bool] = (True, False)) -> list[str]:
    """Train one family whole and with LoRA; return a line of each way, those that differ marked."""
    from transformers import PreTrainedTokenizerFast

    write_model(family, folder / "model")
    # AutoTokenizer rebuilds the tokenizers of some families, and ignores tokenizer.json.
    rows = write_rows(folder, PreTrainedTokenizerFast.from_pretrained(folder / "model"))
    write_adapter(folder / "model", folder / "adapter")
    lines = []
    for method in ("full", "lora"):
        first, expected = by_loop(folder, method, rows)
        for is_packed in packed:
            found = by_manifest(family, folder, method, is_packed=is_packed)
            loss, weights = differences(found, expected, first)
            is_alike = loss <= LOSS_LIMIT and weights <= WEIGHTS_LIMIT
            how = "packed" if is_packed else "padded"
            lines.append(
                f"{family:12} {method} {how} loss {loss:.1e} weights {weights:.1e}"
                f"{'' if is_alike else '  DIFFERS'}"
            )
    return lines


def main() -> int:
    """Compare, and return 1 if anything differs."""
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    disable_progress_bar()
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    is_alike = True
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as folder:
            for line in compare(family, Path(folder)):
                print(line, flush=True)
                is_alike &= "DIFFERS" not in line
    return 0 if is_alike else 1


if __name__ == "__main__":
    sys.exit(main())
