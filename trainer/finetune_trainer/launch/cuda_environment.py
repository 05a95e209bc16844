"""What CUDA's libraries read from the environment, once, when they are loaded.

`worker` sets it before anything imports torch, under every launcher alike. What a user has set
stays.
"""

from collections.abc import Mapping

from finetune_trainer.config import TrainConfig

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
_EXPANDS = "expandable_segments"
_DETERMINISTIC = {
    # cuBLAS takes turns on buffers of its own else (its documentation, section 2.1.4).
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Switches that add up (NVLS), and trees, choose their order by themselves.
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
