"""Whole attempts of the trainer, each rank forked from a process that has imported torch already.

A fresh interpreter per rank takes seconds to import what it needs; see `warm_processes`.
"""

import os
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from finetune_trainer.checkpoint.shards import read_shards
from finetune_trainer.config import Termination, TrainConfig
from finetune_trainer.control import leave
from finetune_trainer.launch.rank_report import DEFAULT_ENTRY, RankReport
from finetune_trainer.launch.worker import run_rank
from finetune_trainer.unused_packages import hide_unused
from support.launch.journals import journal_in
from support.launch.launches import free_port
from support.launch.warm_processes import Forks, beside_deepspeed, forkserver

LOST_PEER_SECONDS = 20
ATTEMPT_SECONDS = 120


class Ranks:
    """The ranks of one attempt."""

    def __init__(
        self,
        config: TrainConfig,
        environ: Mapping[str, str] | None = None,
        context: Forks | None = None,
        entry: str = DEFAULT_ENTRY,
    ) -> None:
        """Start them; `entry` is `module:function` of a rank's work."""
        context = context or forkserver()
        self.config = config
        port = str(free_port())
        self.processes: list[BaseProcess] = [
            context.Process(
                target=_be_rank,
                args=(config.to_json(), rank, port, dict(environ or {}), entry),
                daemon=True,
            )
            for rank in range(config.world.world_size)
        ]
        for process in self.processes:
            process.start()

    def codes(self) -> list[int | None]:
        """Wait for all of them, and return their exit codes; those that hang are killed."""
        deadline = time.monotonic() + ATTEMPT_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + LOST_PEER_SECONDS)
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]

    def termination(self, rank: int = 0) -> Termination:
        """Return the termination of a rank."""
        return Termination.read(Path(f"{self.config.termination_path}.{rank}"))


def attempt(config: TrainConfig, environ: Mapping[str, str] | None = None) -> list[int | None]:
    """Run one attempt, and return the exit codes of its ranks."""
    run = partial(_codes, config, environ)
    return beside_deepspeed(run) if config.strategy.type.startswith("zero") else run(forkserver())


def _codes(
    config: TrainConfig, environ: Mapping[str, str] | None, context: Forks
) -> list[int | None]:
    return Ranks(config, environ, context).codes()


def events(config: TrainConfig, rank: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a rank's journal, over all attempts."""
    return journal_in(Path(config.run_dir), rank)


def numbers(config: TrainConfig) -> dict[str, dict[int, Any]]:
    """Return the numbers of each step and evaluation; of one made twice the last ones count."""
    told = events(config)
    steps = [entry for entry in told if entry["event"] == "step"]
    return {
        "steps": {e["step"]: (e["loss"], e["grad_norm"], e["learning_rate"]) for e in steps},
        "evaluations": {e["step"]: e["loss"] for e in told if e["event"] == "evaluated"},
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, whole, by `section.name`."""
    found = {
        name: torch.empty(value.size, dtype=value.properties.dtype)
        for name, value in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    read_shards(found, folder, None)
    return found


def _be_rank(text: str, rank: int, port: str, environ: dict[str, str], entry: str) -> None:
    config = TrainConfig.model_validate_json(text)
    world = str(config.world.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world)
    os.environ.update(LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update(environ)

    def report_end(report: RankReport) -> None:
        Path(f"{config.termination_path}.{rank}").write_text(report.termination.to_json())

    hide_unused(config)
    report = run_rank(config, entry, report_end=report_end)
    report_end(report)
    leave(report.termination.exit_code)
