"""Environment variables that CUDA's libraries read once, when they are loaded.

`worker` sets them before torch is imported, under every launcher. Values set by a user are not
changed.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from importlib.metadata import version

from finetune_trainer.config import TrainConfig
from finetune_trainer.data.cores import usable_cores
from finetune_trainer.memory.host import ALLOCATOR_VARIABLES
from finetune_trainer.telemetry.collectives.transport import ENV_LOG

_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_FIRST_WITH_THRESHOLD = (2, 13)  # 2.11 refuses the setting when it initializes CUDA
_FEWEST_COMPILERS, _MOST_COMPILERS = 2, 32
_DETERMINISTIC = {
    # Without it cuBLAS alternates between its own buffers (section 2.1.4 of its documentation).
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Reductions in switches (NVLS) and in trees have no fixed order.
    "NCCL_ALGO": "Ring",
}
_NCCL_LOG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def cuda_environment(config: TrainConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for a rank; none on a CPU."""
    if config.world.device != "cuda":
        return {}
    found = {}
    wanted = {}
    if _torch_release() >= _FIRST_WITH_THRESHOLD:
        # torch would round pinned tensors up to a power of two.
        wanted["pinned_max_round_threshold_mb"] = "1"
    if config.training.expandable_segments:
        wanted["expandable_segments"] = "True"
    name = next((name for name in ALLOCATOR_VARIABLES if name in environ), ALLOCATOR_VARIABLES[0])
    settings = environ.get(name, "")
    if missing := [f"{key}:{value}" for key, value in wanted.items() if key not in settings]:
        found[name] = ",".join(filter(None, (settings, *missing)))
    if _COMPILE_THREADS not in environ:
        # Each rank would start up to 32 processes, also beyond the container's CPU limit.
        cores = usable_cores() // config.world.nproc_per_node
        found[_COMPILE_THREADS] = str(min(max(cores, _FEWEST_COMPILERS), _MOST_COMPILERS))
    if config.training.deterministic:
        found |= {name: value for name, value in _DETERMINISTIC.items() if name not in environ}
    if config.world.world_size > 1 and not any(name in environ for name in _NCCL_LOG):
        found |= _log_of_nccl()
    return found


def _log_of_nccl() -> dict[str, str]:
    """Return the variables by which NCCL logs its connections to a file of this process."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # no folder is writable, and NCCL would log to stdout
        return {}
    # No other user of the machine can guess the name. %p is the process: a child that loads NCCL
    # does not truncate the log of its parent.
    name = f"finetune-nccl-{secrets.token_hex(8)}-"
    return {
        "NCCL_DEBUG": "INFO",
        # NCCL 2.12 to 2.31 logs each connection under INIT besides NET, P2P or SHM, which add a
        # line per queue pair and proxy. INIT does not log collectives.
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": os.path.join(folder.replace("%", "%%"), f"{name}%p.log"),
        ENV_LOG: os.path.join(folder, f"{name}{os.getpid()}.log"),
    }


def _torch_release() -> tuple[int, ...]:
    """Return torch's major and minor version, without importing torch."""
    return tuple(int(number) for number in version("torch").split(".")[:2])
