"""Read this process's place among the ranks from the environment that its launcher has set.

`world` reads it to connect the ranks, `launch` to distinguish a rank from a node's main process.
The supported launchers are our supervisor, torchrun, mpirun, Azure ML and `accelerate launch`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.errors import ConfigError

ACCELERATE = "accelerate launch"  # name of a launcher that starts a single process
_ENV_OF_ACCELERATE = "ACCELERATE_DYNAMO_MODE"  # always set by accelerate, hardly ever by users
_OF_LAUNCHERS = re.compile(
    r"((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|"
    rf"(TORCHELASTIC|OMPI_COMM_WORLD)_\w+|{_ENV_OF_ACCELERATE}"
)


@dataclass(frozen=True)
class Launch:
    """Place of this process as the launcher states it.

    `master_port` is 0 if the launcher does not set a port; `rendezvous` then derives it from the
    job.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


def has_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank, possibly the only one."""
    single = "OMPI_COMM_WORLD_SIZE" in environ or _ENV_OF_ACCELERATE in environ
    return single or {"RANK", "WORLD_SIZE"} <= environ.keys()


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that make a process a rank or describe its peers."""
    return {name: text for name, text in environ.items() if not _OF_LAUNCHERS.fullmatch(name)}


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the place that the launcher of this process states, or None without a launcher.

    torchrun and Azure ML set RANK and WORLD_SIZE; Open MPI sets its own names and no address;
    `accelerate launch` without --multi_gpu sets neither and starts one process.

    Raises:
        ConfigError: A variable is not a number, or only half of a pair is set.
    """
    if not has_launcher(environ):
        return None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment"
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif "OMPI_COMM_WORLD_SIZE" not in environ:
        return Launch(ACCELERATE)
    else:
        launcher = "mpirun"
        prefix = "OMPI_COMM_WORLD_"
        names = (f"{prefix}RANK", f"{prefix}LOCAL_RANK", f"{prefix}SIZE", f"{prefix}LOCAL_SIZE")
    rank, world_size = _number(environ, names[0]), _number(environ, names[2])
    local_world_size = _number(environ, names[3], default=world_size)
    return Launch(
        launcher=launcher,
        rank=rank,
        local_rank=_number(environ, names[1], default=rank % local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR", ""),
        master_port=_number(environ, "MASTER_PORT", default=0),
    )


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often the ranks were restarted, by our supervisor or by torchrun."""
    return _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(
                f"{name} is not set, but related variables are; set it for every rank"
            )
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, not a number; the launcher must set it")
    return int(text)
