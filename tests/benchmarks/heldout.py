"""Measure adapters on held-out dialogues, with transformers and peft alone.

    python heldout.py MODEL ROWS ADAPTER...

Prints one JSON object: the mean loss of the answers' tokens, of the base and of each adapter.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer


def mean_loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the mean loss over the tokens that follow each prompt, one row at a time."""
    total, count = 0.0, 0
    for row in rows:
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        prefix = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, tokenize=False
        )
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        start = len(tokenizer(prefix, add_special_tokens=False)["input_ids"])
        ids = torch.tensor(tokenizer(whole, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1].float()
        total += functional.cross_entropy(logits, ids[start:], reduction="sum").item()
        count += len(ids) - start
    return total / count


def main() -> None:
    """Measure what the command line names."""
    base_folder, rows_file, *adapters = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    rows = [json.loads(line) for line in Path(rows_file).read_text().splitlines()]
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32).eval()
    losses = {"base": mean_loss(base, tokenizer, rows)}
    for folder in adapters:
        adapted = PeftModel.from_pretrained(base, folder)
        losses[folder] = mean_loss(adapted.eval(), tokenizer, rows)
        base = adapted.unload()
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
