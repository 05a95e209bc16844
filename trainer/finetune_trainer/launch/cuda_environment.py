"""Environment variables that CUDA's libraries read once, when they are loaded.

`worker` sets them before torch is imported, under every launcher. Values set by a user are not
changed.
"""

from collections.abc import Mapping
from importlib.metadata import version

from finetune_trainer.config import TrainConfig
from finetune_trainer.data.cores import usable_cores
from finetune_trainer.memory.host import ALLOCATOR_VARIABLES

_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_FIRST_WITH_THRESHOLD = (2, 13)  # 2.11 refuses the setting when it initializes CUDA
_FEWEST_COMPILERS, _MOST_COMPILERS = 2, 32
_DETERMINISTIC = {
    # Without it cuBLAS alternates between its own buffers (section 2.1.4 of its documentation).
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Reductions in switches (NVLS) and in trees have no fixed order.
    "NCCL_ALGO": "Ring",
}


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
    return found


def _torch_release() -> tuple[int, ...]:
    """Return torch's major and minor version, without importing torch."""
    return tuple(int(number) for number in version("torch").split(".")[:2])
