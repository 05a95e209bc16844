"""Choose which tensors FSDP leaves unsharded between micro-batches: weights, gradients.

`rank` calls it once per attempt, before the model is loaded. Both choices trade memory for
collectives: unsharded weights are gathered once per step instead of twice per micro-batch, and
unsharded gradients are reduce-scattered once per step instead of after every micro-batch.
"""

from itertools import product

from finetune_trainer.config import TrainConfig
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict
from finetune_trainer.sizing.reserve import measured_reserve


def choose_unsharded(
    config: TrainConfig,
    free: int,
    *,
    base: BaseShape | None = None,
    capability: tuple[int, int] = (9, 0),
) -> TrainConfig:
    """Return `config` in which `reshard_after_forward` and `reduce_each_micro_batch` are set.

    Configured values stay. A tensor stays unsharded by choice only if the step then fits with its
    reserve and margin. Weights have priority, because for the same reduction of traffic they need
    half the memory of gradients. Everything is sharded if the formula does not know the model's
    layers.

    Args:
        config: Configuration of any strategy; only fsdp has these settings.
        free: Free bytes of the rank that has the least, the same number on every rank.
        base: Shape of the model; read from its `config.json` by default.
        capability: Compute capability of the device.
    """
    strategy = config.strategy
    configured = (strategy.reshard_after_forward, strategy.reduce_each_micro_batch)
    if strategy.type != "fsdp" or None not in configured:
        return config
    sizing = Sizing(base or read_base_of(config), config.data.max_seq_len)
    gpu = Gpu(free + measured_reserve(config), capability)
    # False comes first: unsharded.
    resharded, reduced = ((False, True) if value is None else (value,) for value in configured)
    if strategy.reduce_each_micro_batch is None and config.gradient_accumulation_steps == 1:
        reduced = (True,)  # no gradient waits for another micro-batch
    for reshards, reduces in product(resharded, reduced):
        chosen = _with(config, reshards, reduces)
        if sizing.verdict(chosen, gpu) is Verdict.FITS:
            return chosen
    return _with(config, resharded[-1], reduced[-1])


def _with(config: TrainConfig, reshards: bool, reduces: bool) -> TrainConfig:
    values = {"reshard_after_forward": reshards, "reduce_each_micro_batch": reduces}
    return config.model_copy(update={"strategy": config.strategy.model_copy(update=values)})
