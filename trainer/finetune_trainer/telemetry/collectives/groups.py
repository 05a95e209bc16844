"""What a process group is for, by the description that torch keeps of it.

`World` and the mesh describe theirs when they are made; torch's recorder has the same words.
"""

from finetune_trainer.config import StrategyConfig

CONTROL = "control"
CHECKPOINT = "checkpoint"

_DEFAULT = "default_pg"  # of `init_process_group`
_UNDESCRIBED = "undefined"  # of DeepSpeed's, which is of all ranks; nobody else makes such a group


class GroupNames:
    """Names of the groups of one run."""

    def __init__(self, strategy: StrategyConfig) -> None:
        """Prepare; FSDP without replicas divides parameters among the ranks of the default group.

        With replicas its mesh makes two groups of its own.
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
        """Return one of `metrics.GROUPS`; None for a group that is none of ours."""
        return self._names.get(description)
