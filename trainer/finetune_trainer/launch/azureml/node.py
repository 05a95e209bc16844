"""Translate Azure ML's variables of a node for the supervisor.

With the distribution PyTorch and one process per instance, Azure ML sets NODE_RANK and MASTER_*,
and also makes that process a rank in a world of nodes (RANK, WORLD_SIZE, LOCAL_RANK). Without a
distribution it sets none of these.
"""

from collections.abc import Mapping

from finetune_trainer.config import ENV_NODE_RANK, ENV_RDZV_ENDPOINT, ENV_TRAIN_CONFIG
from finetune_trainer.errors import ConfigError
from finetune_trainer.launchers import without_launcher

_DISTRIBUTION = "distribution: {type: pytorch, process_count_per_instance: 1}"


def environment_of_supervisor(environ: Mapping[str, str], nnodes: int) -> dict[str, str]:
    """Return the environment in which a supervisor finds its place among `nnodes` nodes.

    Raises:
        ConfigError: A variable is missing, or a node has more than one process.
    """
    num_started = environ.get("WORLD_SIZE", str(nnodes))
    if num_started != str(nnodes):
        raise ConfigError(
            f"WORLD_SIZE is {num_started}, but spec.topology.nodes is {nnodes}: Azure ML must "
            f"start one process per node, which starts the ranks of its node; set "
            f"{_DISTRIBUTION} and resources.instance_count {nnodes}"
        )
    place: dict[str, str] = {}
    if nnodes > 1:
        missing = [
            name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
        ]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} are not set, and spec.topology.nodes is {nnodes}; set "
                f"{_DISTRIBUTION}, for which Azure ML sets them"
            )
        place = {
            ENV_NODE_RANK: environ["NODE_RANK"],
            ENV_RDZV_ENDPOINT: f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        }
    own = without_launcher(environ)
    own.pop(ENV_TRAIN_CONFIG, None)  # not read by ranks, and up to 128 KiB
    return own | place
