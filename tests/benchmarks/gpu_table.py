"""The 8B class on one GPU: a randomly initialised Llama 3.1 8B, as speed does not need its weights.

Called by `trainer.py` where there is a GPU. Two shapes of data: `uniform`, rows of full length,
for the speed of loop and kernels; `chat`, lengths log-normal around 180 tokens, for packing.
"""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from systems import Task

SEQUENCE = 4096
CASES = (
    ("lora", "uniform", ("ours", "hf_trainer")),
    ("lora", "chat", ("ours", "trl_default", "trl_tuned")),
    ("qlora", "chat", ("ours", "trl_tuned")),
    ("full", "uniform", ("ours", "hf_trainer")),
)
# Model FLOPs a token and parameter: backward through frozen weights needs no weight gradients.
FLOPS_PER_PARAMETER = {"lora": 4, "qlora": 4, "full": 6}
PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}

Train = Callable[[str, Task, list[str], Path], dict[str, Any]]


def measure_table(task: Task, train: Train, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Run every case `repeats` times, systems in turn; return a row for each case and system."""
    import torch

    model = random_model(Path(task.model), folder / "8b")
    peak = next(
        (f for name, f in PEAK_BF16_FLOPS.items() if name in torch.cuda.get_device_name()), None
    )
    table = []
    for method, shape, systems in CASES:
        case = replace(
            task,
            model=str(model),
            method=method,
            shape=shape,
            pack_tokens=SEQUENCE,
            rows_per_step=2,
        )
        speeds: dict[str, list[float]] = {name: [] for name in systems}
        for seed in range(repeats):
            rows = chat_rows(seed, 2000) if shape == "chat" else text_rows(seed, 80)
            turn = replace(case, seed=seed, rows=len(rows))
            done = {n: train(n, turn, rows, folder / f"{method}-{shape}-{n}") for n in systems}
            tokens = done["ours"]["tokens"]
            for name, result in done.items():
                speeds[name].append(tokens / result["seconds"])
        for name, values in speeds.items():
            median = statistics.median(values)
            flops = FLOPS_PER_PARAMETER[method] * 8.03e9 * median
            table.append(
                {
                    "method": method,
                    "shape": shape,
                    "system": name,
                    "tokens_per_second": median,
                    "min": min(values),
                    "max": max(values),
                    "mfu": flops / peak if peak else None,
                }
            )
    return table


def random_model(tokenizer_folder: Path, folder: Path) -> Path:
    """Save Llama 3.1 8B's shape with random weights and the quickstart's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    shape = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def text_rows(seed: int, count: int) -> list[str]:
    """Return rows of more than `SEQUENCE` tokens each."""
    words = _words()
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(words, k=SEQUENCE)) for _ in range(count)]
    return [json.dumps({"text": text}) for text in texts]


def chat_rows(seed: int, count: int) -> list[str]:
    """Return dialogues, log-normal around a median of 180 tokens, two thirds of it the prompt."""
    words, chosen, rows = _words(), random.Random(seed), []
    for _ in range(count):
        length = min(2000, max(10, round(chosen.lognormvariate(4.8, 0.8))))  # words
        text = chosen.choices(words, k=length)
        cut = round(length * chosen.uniform(0.6, 0.75))
        rows.append(
            json.dumps({"prompt": " ".join(text[:cut]), "completion": " ".join(text[cut:])})
        )
    return rows


def _words() -> list[str]:
    from pydoc_data.topics import topics

    return " ".join(topics.values()).split()
