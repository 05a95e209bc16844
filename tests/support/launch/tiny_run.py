"""The inputs of a run that takes seconds: a two-layer model, and rows to train and evaluate on."""

import json
from pathlib import Path

from support.data.text_fixtures import tiny_model


def write_inputs(folder: Path, hidden_size: int = 64) -> Path:
    """Write `model/`, `train.jsonl` and `eval.jsonl` into `folder` and return it."""
    tiny_model(folder / "model", hidden_size=hidden_size)
    for name, count in (("train", 40), ("eval", 6)):
        rows = [
            {"prompt": f"What is {name} number {i} plus {i}?", "completion": f"It is {2 * i}."}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder
