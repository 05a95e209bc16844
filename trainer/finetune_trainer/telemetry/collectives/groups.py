"""Map the description that torch stores with a process group to the name of its purpose.

`World` and the mesh describe their groups on creation; torch's recorder reports the same text.
"""

from finetune_trainer.config import StrategyConfig

CONTROL = "control"
CHECKPOINT = "checkpoint"

_DEFAULT = "default_pg"  # the group of `init_process_group`
_UNDESCRIBED = "undefined"  # DeepSpeed's group of all ranks; no other library creates one


class GroupNames:
    """Names of the groups of one run."""

    def __init__(self, strategy: StrategyConfig) -> None:
        """Prepare the names for a strategy."""
        self.use(strategy)

    def use(self, strategy: StrategyConfig) -> None:
        """Name the groups of a strategy.

        Without replicas, FSDP shards parameters over the default group; with replicas, its mesh
        creates two groups.
        """
        is_sharded = strategy.type == "fsdp" and strategy.replicas == 1
        self._names = {
            _DEFAULT: "shard" if is_sharded else "dp",
            _UNDESCRIBED: "dp",
            "mesh_shard": "shard",
            "mesh_replica": "replica",
            CONTROL: CONTROL,
            CHECKPOINT: CHECKPOINT,
        }

    def of(self, description: str) -> str | None:
        """Return the name in `metrics.GROUPS`; None for a group of another library."""
        return self._names.get(description)
