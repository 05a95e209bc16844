"""Models by configuration, with weights drawn on the device, and rows of text; no hub is asked.

    python -m gpu_bench.shapes FOLDER SHAPE DEVICE

draws a model in a process of its own, as what a process leaves in the device's memory would count
for whoever is measured next.
"""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from support.data.text_fixtures import VOCAB_SIZE, tiny_tokenizer

_TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    # Llama 3.2 1B and Llama 3.1 8B.
    "1b": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
}


def write_model(folder: Path, shape: str, device: str) -> None:
    """Save a random Llama of the shape in bf16 with its tokenizer, whole or not at all.

    It is saved in files of 4 GB, so that the host holds one of them at a time.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    tokenizer = tiny_tokenizer(draft)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, **ids)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(draft, max_shard_size="4GB")
    count = sum(parameter.numel() for parameter in model.parameters())
    (draft / "parameters.json").write_text(json.dumps(count))
    draft.rename(folder)


def number_of_parameters(folder: Path) -> int:
    """Return how many parameters the model in `folder` has, tied ones once."""
    return int(json.loads((folder / "parameters.json").read_text()))


def text_rows(count: int, length: int, seed: int = 0) -> str:
    """Return JSON Lines of random words, each row of at least `length` tokens."""
    from pydoc_data.topics import topics

    words = " ".join(topics.values()).split()
    chosen = random.Random(seed)
    texts = (" ".join(chosen.choices(words, k=length)) for _ in range(count))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
