"""A training run of two processes that goes on while a test reads its page."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.launch.launches import clean_environment, train_config
from support.launch.tiny_run import write_inputs
from support.telemetry.node_pages import free_ports

_HIDDEN_SIZE = 256  # so that some messages have more than 1 MiB


@contextmanager
def training(folder: Path) -> Iterator[str]:
    """Train with two ranks until the end of the block; yield the address of their page."""
    write_inputs(folder, hidden_size=_HIDDEN_SIZE)
    training = {"max_steps": 100_000, "eval_every_steps": 5}
    with _page_of(folder, training, checkpoint_seconds=2) as address:
        yield address


@contextmanager
def learning(folder: Path, num_steps: int) -> Iterator[str]:
    """Train on sums that the model does not see twice, so that its held-out loss falls.

    The block must end before the last step. Yield the address of the page.
    """
    write_inputs(folder, hidden_size=_HIDDEN_SIZE)
    pairs = [(first, second) for first in range(100) for second in range(100)]
    random.Random(0).shuffle(pairs)
    for name, chosen in (("eval", pairs[:32]), ("train", pairs[32:])):
        rows = [
            {"prompt": f"What is {first} plus {second}?", "completion": f"It is {first + second}."}
            for first, second in chosen
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    training = {
        "global_batch_size": 8,
        "max_steps": num_steps,
        "eval_every_steps": num_steps // 20,
        "learning_rate": 3e-4,
        "schedule": "cosine",
        "warmup": 0.1,
    }
    with _page_of(folder, training, checkpoint_seconds=20) as address:
        yield address


@contextmanager
def _page_of(folder: Path, training: dict[str, Any], checkpoint_seconds: float) -> Iterator[str]:
    port = free_ports(1)
    config = train_config(
        folder,
        model={"path": str(folder / "model")},
        data={
            "train": {"path": str(folder / "train.jsonl")},
            "eval": {"path": str(folder / "eval.jsonl")},
            "max_seq_len": 64,
        },
        training=training,
        checkpoint={"every_seconds": checkpoint_seconds},
        telemetry={"metrics_port": port},
    )
    (folder / "config.json").write_text(config.to_json())
    run = subprocess.Popen(
        [sys.executable, "-m", "finetune_trainer", str(folder / "config.json")],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
        run.send_signal(signal.SIGTERM)
        code = run.wait(60)
        assert code == 75, code
    finally:
        run.kill()
        run.wait()
