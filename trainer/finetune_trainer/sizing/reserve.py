"""GPU memory that a rank needs in addition to tensors.

The sizes are estimates, not limits of the libraries. NCCL takes 0.9 GiB and more for the first
communicator (NCCL issues 864 and 1685).
"""

from finetune_trainer.config import TrainConfig

_MIB = 2**20
_CONTEXT_BYTES = 600 * _MIB
_WORKSPACE_BYTES = 300 * _MIB
_COMPILER_BYTES = 200 * _MIB
_FIRST_COMMUNICATOR_BYTES = 900 * _MIB
_COMMUNICATOR_BYTES = 700 * _MIB


def reserve_bytes(config: TrainConfig) -> int:
    """Return the bytes for the context, workspaces of libraries and communicators."""
    size = _CONTEXT_BYTES + _WORKSPACE_BYTES + _COMPILER_BYTES * config.training.compile
    if config.world.world_size > 1:
        more = 2 if config.strategy.replicas > 1 else 0  # one per dimension of the mesh
        size += _FIRST_COMMUNICATOR_BYTES + more * _COMMUNICATOR_BYTES
    return size


def measured_reserve(config: TrainConfig) -> int:
    """Return the part of the reserve that a rank has allocated before it measures free memory.

    These are the CUDA context and the communicator of all ranks, which `world` creates eagerly.
    """
    communicator = _FIRST_COMMUNICATOR_BYTES if config.world.world_size > 1 else 0
    return _CONTEXT_BYTES + communicator
