"""Environment variables that CUDA's libraries read once, when they are loaded.

`worker` sets them before torch is imported, under every launcher. Values set by a user are not
changed.
"""

from collections.abc import Mapping

from finetune_trainer.config import TrainConfig

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # new and old name
_EXPANDS = "expandable_segments"
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
    if config.training.expandable_segments:
        name = next((name for name in _ALLOCATOR if name in environ), _ALLOCATOR[0])
        settings = environ.get(name, "")
        if _EXPANDS not in settings:
            found[name] = ",".join(filter(None, (settings, f"{_EXPANDS}:True")))
    if config.training.deterministic:
        found |= {name: value for name, value in _DETERMINISTIC.items() if name not in environ}
    return found
