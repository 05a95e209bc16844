"""Other versions of transformers, as readers of exported folders."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

READERS = {
    "4.57": ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2"),
    "5.20": ("transformers==5.20.0",),
    "pinned": (),
}
"""Packages of each reader, in addition to the tests' environment."""

_PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folders, text, out = json.loads(sys.argv[1])
found = {}
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text).input_ids
    turns = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(turns, tokenize=False) if tokenizer.chat_template else None
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(32) * 7919 % model.config.get_text_config().vocab_size
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None]).logits[0].float()
    ends = model.generation_config.eos_token_id
    rest = {"tokens": tokens, "chat": chat, "eos": tokenizer.eos_token, "ends": ends}
    found[folder] = {"logits": logits.tolist(), "dtype": str(model.dtype), **rest}
with open(out, "w") as file:
    json.dump(found, file)
"""


def read_with(reader: str, folders: Sequence[Path], text: str) -> Mapping[str, Any]:
    """Load each exported folder with a version of transformers in a process of its own.

    Returns:
        By folder: `logits` of a fixed row, `dtype` of the model, `tokens` of `text`, `chat` with
        `text` as the only turn, and the end tokens of tokenizer and generation.
    """
    place = _installed(reader)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        arguments = json.dumps([[str(folder) for folder in folders], text, str(out)])
        paths = [str(place)] if place else []
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"transformers {reader}: {done.stderr[-3000:]}"
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def _installed(reader: str) -> Path | None:
    """Install a reader once a machine; skip the test if no package index can be reached."""
    packages = READERS[reader]
    if not packages:
        return None
    place = Path(tempfile.gettempdir()) / f"finetune-test-readers-{os.getuid()}" / packages[0]
    if not place.exists():
        draft = place.with_name(f"{place.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(draft), *packages],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.strip()[-300:]}")
        draft.rename(place)
    return place
