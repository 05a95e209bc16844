"""Nodes of an Azure ML job as processes of this machine, each with what Azure ML gives it."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.config import ENV_TRAIN_CONFIG, Termination, TrainConfig, pack
from finetune_trainer.launch.azureml.mounts import SCRATCH, resolve_mounts
from support.launch.launches import clean_environment

ENTRY = ("-P", "-m", "finetune_trainer.launch.azureml")
STAND_IN = str(Path(__file__).with_name("stand_in_azureml.py"))


@dataclass
class Node:
    """A started node.

    Attributes:
        given: The run's configuration, and where its mounts are on this node.
    """

    process: "subprocess.Popen[str]"
    given: tuple[TrainConfig, Mapping[str, str]]

    @property
    def config(self) -> TrainConfig:
        """The configuration as this node saw it, but for what went with its scratch folder."""
        config, mounts = self.given
        return resolve_mounts(config, {SCRATCH: "/gone", **mounts})

    def wait(self, timeout: float = 150) -> int:
        """Return the exit code; the logs are in `stdout` and `stderr` then."""
        self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode

    @property
    def last_words(self) -> Termination:
        """What the last line of the log says."""
        return Termination.model_validate_json(self.stdout.splitlines()[-1])


def start_node(
    config: TrainConfig,
    mounts: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    stand_in: str | None = None,
) -> Node:
    """Start the whole command of a job on a node.

    Args:
        config: With `mount://NAME` for what is mounted.
        mounts: Where it is, by name.
        environ: What the node has besides the configuration.
        stand_in: A function of `rank_entries` instead of a rank's real work.
    """
    own = {"AZUREML_RUN_ID": "a-run", "AZUREML_EXPERIMENT_ID": "an-experiment"}
    placed = [f"{name}={path}" for name, path in mounts.items()]
    command: Sequence[str] = (*ENTRY, *placed)
    if stand_in is not None:
        command = (STAND_IN, *placed, stand_in)
    process = subprocess.Popen(
        [sys.executable, *command],
        env=clean_environment(**own, **environ, **{ENV_TRAIN_CONFIG: pack(config)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Node(process, (config, mounts))


def variables(node: int, nodes: int, port: int) -> dict[str, str]:
    """Return what Azure ML sets for the distribution PyTorch with one process an instance."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(node),
        "RANK": str(node),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(nodes),
    }
