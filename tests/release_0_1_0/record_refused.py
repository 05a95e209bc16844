"""Train what later versions refuse in a new job: attempts that are killed after a checkpoint.

`record.py` calls it with the folder of the release's packages, which are also on PYTHONPATH.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import finetune_trainer
from finetune_trainer.config import TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT
from launches import train_config
from record_run import pack
from text_fixtures import CHATML_TEMPLATE
from tiny_run import write_inputs

FOLDER = Path("/tmp/release-0.1.0")
UID = "5f0c6a52-3f3e-4d8e-9d53-0a5c1b1f0a10"
LAST_SAVED = 2
QUESTION = {"role": "user", "content": "What is 1 plus 1?"}
RESULT = {"role": "tool", "content": "The sum is 2."}
REPLY = {"role": "assistant", "content": "It is 2."}


def _write_rows(path: Path, *messages: dict[str, Any]) -> None:
    path.write_text((json.dumps({"messages": messages}) + "\n") * 16)


def left_out(folder: Path) -> dict[str, Any]:
    """The chat template leaves out the results of tools."""
    template = CHATML_TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages if message['role'] != 'tool' %}",
    )
    _write_rows(folder / "train.jsonl", QUESTION, RESULT, REPLY)
    return {"model": {"path": str(folder / "model"), "chat_template": template}}


def ended_twice(folder: Path) -> dict[str, Any]:
    """The rows end with the token with which the template ends a turn."""
    _write_rows(folder / "train.jsonl", QUESTION, REPLY | {"content": "It is 2.<|im_end|>"})
    return {"data": {"allow_special_tokens": True}}


def split_files(folder: Path) -> dict[str, Any]:
    """A folder has the files of several splits."""
    rows = folder / "rows"
    rows.mkdir()
    for split in ("train", "test", "validation"):
        shutil.copy(folder / "train.jsonl", rows / f"{split}.jsonl")
    return {"data": {"train": {"path": str(rows)}}}


def cut_model(folder: Path) -> dict[str, Any]:
    """`config.json` has fewer layers than the files."""
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))
    return {}


def quantised_files(folder: Path) -> dict[str, Any]:
    """The files of the base are quantised by bitsandbytes."""
    model = folder / "model"
    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    loaded = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=stored, device_map={"": "cpu"}
    )
    loaded.save_pretrained(model)
    return {}


TRAITS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "left-out": left_out,
    "ended-twice": ended_twice,
    "split-files": split_files,
    "cut-model": cut_model,
    "quantised-files": quantised_files,
}


def train(name: str) -> None:
    """Write the inputs of one trait, and train on them until the process is killed."""
    folder = FOLDER / name
    folder.mkdir(parents=True)
    write_inputs(folder, hidden_size=16)
    changes = TRAITS[name](folder)
    values: dict[str, Any] = {
        "job": {"name": name, "uid": UID, "attempt": 1},
        "world": {"nproc_per_node": 1},
        "method": {"type": "lora", "lora": {"r": 2}},
        "output": {"format": "adapter"},
        "training": {"max_steps": 6, "learning_rate": 1e-2},
        "checkpoint": {"every_steps": LAST_SAVED, "keep": 2},
        **changes,
    }
    config: TrainConfig = train_config(folder, **values)
    file = folder / "config-1.json"
    file.write_text(config.to_json())
    environ = {**os.environ, ENV_FAILPOINT: f"before-optimizer@{2 * LAST_SAVED + 1}"}
    command = [sys.executable, "-m", "finetune_trainer", str(file)]
    assert subprocess.run(command, env=environ).returncode != 0
    assert list((folder / "checkpoints").glob(f"step-{LAST_SAVED}.*")), name


def main(source: Path) -> None:
    """Record the archive."""
    assert Path(str(finetune_trainer.__file__)).is_relative_to(source)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in TRAITS:
        train(name)
    pack("runs-refused.tar.xz")
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
