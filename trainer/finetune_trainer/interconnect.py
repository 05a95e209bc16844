"""Report the transports that NCCL uses, and refuse sockets if a job requires RDMA.

`rank` calls it once, before the first step. NCCL falls back to TCP sockets without an error, and
such a run is many times slower.
"""

import os
from collections.abc import Mapping, Sequence

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.telemetry import Telemetry
from finetune_trainer.telemetry.collectives.transport import SOCKETS, Transports, take_log
from finetune_trainer.world import World, gather_values


def check_transport(
    config: TrainConfig,
    world: World,
    telemetry: Telemetry,
    *,
    is_new: bool,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Report the transports of all ranks, and refuse sockets if RDMA is required; a collective.

    Args:
        config: The run.
        world: All ranks; does nothing with a single rank.
        telemetry: Outlet for the transports and the warnings.
        is_new: Whether training starts at step 0. A run that resumes continues over sockets with a
            warning, because a slow run is better than a lost one.
        environ: Environment of this process.

    Raises:
        ConfigError: A new run requires RDMA, and a rank uses sockets. All ranks raise it.
    """
    if world.group is None:
        return
    import torch

    world.liveness_barrier()
    # NCCL opens its connections in the first collective. Reading the sum waits for the GPU.
    world.sum(torch.ones(1, device=world.device)).item()
    own = take_log(environ)
    of_ranks = gather_values(world.control_group, own, Transports)
    telemetry.transport(own, Transports.of_all(of_ranks))
    if config.world.rdma_required:
        warning = refuse_sockets(of_ranks, is_new=is_new)
        if warning is not None and world.is_main:
            telemetry.warn(warning)


def refuse_sockets(of_ranks: Sequence[Transports], *, is_new: bool) -> str | None:
    """Check the transports of all ranks of a run that requires RDMA; return a warning, if any.

    Raises:
        ConfigError: A rank of a new run uses sockets.
    """
    with_sockets = [rank for rank, one in enumerate(of_ranks) if SOCKETS in one.names]
    if with_sockets:
        problem = (
            f"spec.topology.rdma required: NCCL uses TCP sockets ({SOCKETS}) on "
            f"{len(with_sockets)} of {len(of_ranks)} rank(s), first on rank {with_sockets[0]}; "
            "check that the RDMA device plugin runs on every node and offers the resource in the "
            "profile's resources.rdma, and that NCCL_IB_DISABLE is not 1; or use auto"
        )
        if is_new:
            raise ConfigError(problem)
        return f"{problem}. Training resumes over sockets"
    unknown = [rank for rank, one in enumerate(of_ranks) if not one.names]
    if unknown:
        return (
            f"spec.topology.rdma required is not checked: the transport of {len(unknown)} of "
            f"{len(of_ranks)} rank(s) is not known, first of rank {unknown[0]}; remove NCCL_DEBUG, "
            "NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE from the environment, and give the ranks a "
            "writable temporary folder"
        )
    return None
