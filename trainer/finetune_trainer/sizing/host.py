"""Compute the host memory of rank 0's node, whose ranks train on GPUs.

The start check uses it. The processes themselves are not counted: they have started by then.
Measured on two gloo ranks, which `test_host_ranks.py` compares. The heap of malloc may retain some
hundred MiB of freed tensors, which are not counted either.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.method import ITEMSIZE, base_precision, is_loaded_once
from finetune_trainer.sizing.model_shape import ModelShape, Weight
from finetune_trainer.sizing.moments import moment_nbytes
from finetune_trainer.sizing.zero import stage_of

_FP32 = 4


@dataclass(frozen=True)
class HostPeak:
    """Bytes that the ranks of a node allocate in host memory.

    Attributes:
        moments: Bytes by moment: loading, training, checkpoint, export.
    """

    moments: Mapping[str, int]

    @property
    def moment(self) -> str:
        """Name of the moment that needs most."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def nbytes(self) -> int:
        """Bytes at that moment."""
        return self.moments[self.moment]


def host_peak(
    shape: ModelShape, config: TrainConfig, *, converts: bool = True, allocator: str = ""
) -> HostPeak:
    """Return the host memory of the node of rank 0.

    Args:
        shape: Shape of the model with its trained parameters.
        config: Configuration of the run.
        converts: Whether loading changes the dtype of the weights. Otherwise they stay mapped from
            the files, except stacked experts.
        allocator: Settings of torch's allocator.
    """
    host = _Host(shape, config, allocator)
    ranks = config.world.nproc_per_node
    training = ranks * host.offloaded()
    checkpoint = training + ranks * host.staged() * config.checkpoint.enabled
    return HostPeak(
        {
            "loading": host.loaded(converts=converts),
            "training": training,
            "checkpoint": checkpoint,
            "export": checkpoint + host.exported(),
        }
    )


def loading_bytes(shape: ModelShape, config: TrainConfig, *, converts: bool) -> int:
    """Return the host memory that rank 0 needs to load the model.

    If `auto` chooses the strategy, it is the memory to load a model that is sharded.
    """
    if config.auto is not None and "strategy" in config.auto.settings:
        strategy = config.strategy.model_copy(update={"type": "fsdp", "replicas": 1})
        config = config.model_copy(update={"strategy": strategy})
    return _Host(shape, config, "").loaded(converts=converts)


def pinned_nbytes(nbytes: int, settings: str = "") -> int:
    """Return the bytes that torch pins for one tensor: the next power of two, up to twice its size.

    `settings` are the allocator's; `pinned_max_round_threshold_mb` in them disables the rounding
    above that many MiB.
    """
    found = re.search(r"pinned_max_round_threshold_mb:(\d+)", settings)
    if nbytes == 0 or (found and nbytes > int(found[1]) * 2**20):
        return nbytes
    return 1 << (nbytes - 1).bit_length()


class _Host:
    """Parts of the sum: bytes of a rank, or of rank 0 in `loaded` and `exported`."""

    def __init__(self, shape: ModelShape, config: TrainConfig, allocator: str) -> None:
        self.shape, self.config, self.allocator = shape, config, allocator
        self.world_size = config.world.world_size
        self.zero_stage, self.offload = stage_of(config), config.strategy.offload
        self.is_sharded = config.strategy.type == "fsdp"
        self.shards = self.world_size // config.strategy.replicas if self.is_sharded else 1

    def loaded(self, *, converts: bool) -> int:
        """Return the bytes of the base model, if rank 0 loads it into host memory."""
        if not is_loaded_once(self.config):
            return 0
        if converts:
            return self.shape.sum_weights(lambda w: w.count * w.itemsize)
        size = self.shape.hidden * ITEMSIZE[base_precision(self.config)]
        experts = (self.shape.kinds[kind].experts for kind in self.shape.order)
        return sum(3 * one.count * one.width * size for one in experts if one is not None)

    def offloaded(self) -> int:
        """Return the bytes of offloaded parameters, gradients and moments."""
        if self.zero_stage:
            return self._offloaded_by_engine()
        if self.offload == "cpu":
            return self.shape.sum_weights(self._offloaded_weight)
        return 0

    def _offloaded_weight(self, weight: Weight) -> int:
        pinned = self._pinned(weight.shard_nbytes(self.shards)) * (1 + weight.is_trained)
        return pinned + self._moments(weight) * weight.is_trained

    def _offloaded_by_engine(self) -> int:
        """Return ZeRO's fp32 weights, moments and gradients, and with `cpu` the parameters."""
        if self.offload not in ("optimizer", "cpu"):
            return 0
        size = 4 * _FP32 * self._num_trained()
        if self.offload == "cpu":
            itemsize = ITEMSIZE[self.config.training.precision]
            size += self.shape.sum_weights(lambda w: w.count * itemsize)
        return size // self.world_size

    def staged(self) -> int:
        """Return the bytes of this rank's copy of weights and moments for a checkpoint."""
        if self.zero_stage:  # the engine's state is gathered into a copy of its own
            return 2 * 3 * _FP32 * self._num_trained() // self.world_size
        holders = self.config.strategy.replicas if self.is_sharded else self.world_size
        if self.offload == "cpu":  # copied into pageable memory
            return self.shape.sum_weights(self._state) // holders
        return self.shape.sum_weights(self._pinned_state) // holders

    def _state(self, weight: Weight) -> int:
        own = weight.shard_nbytes(self.shards) + self._moments(weight)
        return own * weight.is_trained

    def _pinned_state(self, weight: Weight) -> int:
        moments = 2 * self._pinned(self._moments(weight) // 2)
        return (self._pinned(weight.shard_nbytes(self.shards)) + moments) * weight.is_trained

    def exported(self) -> int:
        """Return the bytes of the gathered model, and of its merged or cast copy."""
        shape, output = self.shape, self.config.output
        is_gathered = self.is_sharded or self.zero_stage > 0
        if output.format == "adapter":
            return is_gathered * _FP32 * self._num_trained()
        gathered = is_gathered * shape.sum_weights(self._gathered)
        own = shape.sum_weights(lambda w: w.count)
        if self.config.method.type != "full":  # peft checks a copy of each merged weight
            cast = shape.largest_weight(lambda w: w.count)
            merged = max((w.count for kind in shape.kinds for w in kind.weights), default=cast)
            return gathered + _FP32 * own + max(4 * _FP32 * merged, 2 * cast)
        stored = _FP32 if self.zero_stage else ITEMSIZE[base_precision(self.config)]
        written = {"float32": 4, "float16": 2, "bfloat16": 2}.get(output.dtype or "", 2)
        return gathered + own * written * (written != stored)

    def _gathered(self, weight: Weight) -> int:
        is_fp32 = self.zero_stage and weight.is_trained
        return _FP32 * weight.count if is_fp32 else weight.nbytes

    def _moments(self, weight: Weight) -> int:
        return moment_nbytes(weight, self.shards, self.config.training.optimizer)

    def _num_trained(self) -> int:
        return self.shape.sum_weights(lambda w: w.is_trained * w.count)

    def _pinned(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes, self.allocator)
