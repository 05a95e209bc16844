"""A training run of two processes that goes on while a test reads its page."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.launch.launches import clean_environment, train_config
from support.launch.tiny_run import write_inputs
from support.telemetry.node_pages import free_ports


@contextmanager
def training(folder: Path) -> Iterator[str]:
    """Train with two ranks until the end of the block; yield the address of their page."""
    write_inputs(folder, hidden_size=256)  # so that some of its messages have more than 1 MiB
    port = free_ports(1)
    config = train_config(
        folder,
        model={"path": str(folder / "model")},
        data={
            "train": {"path": str(folder / "train.jsonl")},
            "eval": {"path": str(folder / "eval.jsonl")},
            "max_seq_len": 64,
        },
        training={"max_steps": 100_000, "eval_every_steps": 5},
        checkpoint={"every_seconds": 2},
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
