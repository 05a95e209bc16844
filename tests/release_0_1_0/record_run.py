"""Train a tiny model with the release: a killed attempt, and a second that completes.

`record.py` calls it with the folder of the release's packages, which are also on PYTHONPATH.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch

import finetune_trainer
from checkpoint_fixtures import step_path
from finetune_trainer.config import TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT
from forked_ranks import tensors
from launches import train_config
from tiny_run import write_inputs

HERE = Path(__file__).parent
FOLDER = Path("/tmp/release-0.1.0")
UID = "5f0c6a52-3f3e-4d8e-9d53-0a5c1b1f0a10"
STEPS, LAST_SAVED = 8, 4


def config(attempt: int) -> TrainConfig:
    """Return the configuration of an attempt; everything is stored below `FOLDER`."""
    values: dict[str, Any] = {
        "job": {"name": "tiny", "uid": UID, "attempt": attempt},
        "world": {"nproc_per_node": 1},
        "model": {"base_name": "example/tiny"},
        "data": {"eval": {"path": str(FOLDER / "eval.jsonl")}, "max_seq_len": 64},
        # Masks of dropout depend on the step, so that a wrong step shows in the losses.
        "method": {"type": "lora", "lora": {"r": 2, "dropout": 0.2}},
        "output": {"format": "adapter"},
        "training": {"max_steps": STEPS, "learning_rate": 1e-2, "eval_every_steps": 4},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "telemetry": {"sample_prompts": ["What is 1 plus 1?"]},
    }
    return train_config(FOLDER, **values)


def train(attempt: int, failpoint: str = "") -> int:
    """Run one attempt; return the exit code of its main process."""
    file = FOLDER / f"config-{attempt}.json"
    file.write_text(config(attempt).to_json())
    environ = {**os.environ, ENV_FAILPOINT: failpoint}
    return subprocess.run([sys.executable, "-m", "finetune_trainer", file], env=environ).returncode


def write_hashes(folder: Path) -> None:
    """Store the hash of each tensor of a checkpoint that the release has read."""
    hashes = {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tensors(folder).items())
    }
    (FOLDER / "tensor-hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


def pack(name: str) -> None:
    """Store `FOLDER` in this folder, with neither times nor owners of this machine."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.name.endswith((".lock", ".sock")) or "tensorboard" in entry.name:
            return None
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(HERE / name, "w:xz", preset=9) as archive:
        archive.add(FOLDER, ".", filter=plain)


def main(source: Path) -> None:
    """Record both archives."""
    assert Path(str(finetune_trainer.__file__)).is_relative_to(source)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    write_inputs(FOLDER, hidden_size=16)
    assert train(1, f"before-optimizer@{LAST_SAVED + 2}") != 0
    write_hashes(step_path(Path(config(1).checkpoint.dir), LAST_SAVED))
    pack("run-killed.tar.xz")
    assert train(2) == 0
    for name in ("model", "c", "train.jsonl", "eval.jsonl"):  # they are in the other archive
        path = FOLDER / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    pack("run-finished.tar.xz")
    shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
