"""Find the node of an attempt on which a rank runs. Pure."""

from finetune_operator.backends.base import AttemptRef
from finetune_operator.errors import NoSuchRankError


def node_of(ref: AttemptRef, rank: int) -> int:
    """Return the number of the node on which a rank runs.

    Raises:
        NoSuchRankError: The rank does not exist.
    """
    topology = ref.spec.topology if ref.spec is not None else None
    per_node = (topology and (topology.processes_per_node or topology.gpus_per_node)) or 1
    world_size = per_node * (topology.nodes if topology is not None else 1)
    if rank >= world_size:
        ranks = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        raise NoSuchRankError(f"rank {rank} does not exist; {ref.handle.name} has {ranks}")
    return rank // per_node
