"""Memory of DeepSpeed's engine by ZeRO stage (arXiv:1910.02054, section 5).

Counted on engines of one and two ranks, which `test_zero_state.py` compares. With T trained and F
frozen elements on n ranks, the engine retains between two steps in 16 bits:

    stage 1    2 F + 2 T + 12 T / n + 4 T      the last are sums of gradients, absent in fp32
    stage 2    2 F + 2 T + 12 T / n
    stage 3    (2 F + 2 T + 16 T) / n + 4 T    the last is the bucket of gradients

12 are both moments and the fp32 weights. The bucket has at most 5e8 elements. Stage 3 does not
shard parameters of at most 1e5 elements, such as norms and most adapters.

While the engine reduces a bucket of B elements, it also allocates copies of it in fp32: 4 B in
stage 1, 8 B in stage 3; in stage 2 with one in 16 bits 6 B, and 2 B for each bucket that it fills,
two on GPUs.
"""

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.model_shape import ModelShape, Weight

MOST_IN_BUCKET = 500_000_000
"""Elements of the engine's bucket of gradients; DeepSpeed's default."""
_PERSISTENT = 100_000
_MOST_GATHERED = 1_000_000_000
"""Elements of parameters that stage 3 does not release; DeepSpeed's default."""
_MOST_UPDATED = 1_000_000_000
"""Elements that stage 3 updates at once; DeepSpeed's default."""
_FP32 = 4


def stage_of(config: TrainConfig) -> int:
    """Return the ZeRO stage; 0 for another strategy."""
    kind = config.strategy.type
    return int(kind.removeprefix("zero")) if kind.startswith("zero") else 0


def engine_state(shape: ModelShape, config: TrainConfig, itemsize: int) -> dict[str, int]:
    """Return the bytes that a rank's engine retains, by component of a `Peak`.

    Args:
        shape: Shape of the model with its trained parameters.
        config: Configuration with a ZeRO strategy.
        itemsize: Bytes per element of the compute dtype.
    """
    stage, ranks = stage_of(config), config.world.world_size
    trained = shape.sum_weights(lambda w: w.is_trained * w.count)

    def stored(weight: Weight) -> int:
        return weight.nbytes if weight.bits else weight.count * itemsize

    def persistent(weight: Weight) -> int:
        return stored(weight) if weight.count <= _PERSISTENT else 0

    parameters = shape.sum_weights(stored)
    if stage == 3:
        parameters //= ranks
        if ranks > 1:
            parameters += shape.sum_weights(persistent)
    state = 3 * _FP32 * trained // ranks
    gradients = _FP32 * trained // ranks if stage == 3 else 0
    if stage == 1 and itemsize < _FP32:
        gradients = _FP32 * trained
    buckets = _FP32 * min(trained, MOST_IN_BUCKET) if stage == 3 else 0
    if config.strategy.offload != "none":
        state = gradients = 0
    if config.strategy.offload in ("cpu", "nvme"):
        parameters = 0
    return {
        "parameters": parameters,
        "buffers": shape.buffer_bytes,
        "moments": state,
        "engine buffers": gradients + buckets,
    }


def reduction_bytes(trained: int, config: TrainConfig, itemsize: int) -> int:
    """Return the bytes that the engine allocates while it reduces gradients.

    Args:
        trained: Elements of all trained parameters.
        config: Configuration with a ZeRO strategy.
        itemsize: Bytes per element of the compute dtype.
    """
    filled = 2 if config.world.device == "cuda" else 1
    each = {1: _FP32, 2: _FP32 + itemsize * (1 + filled), 3: 2 * _FP32}[stage_of(config)]
    return each * min(trained, MOST_IN_BUCKET)


def gathered_bytes(shape: ModelShape, config: TrainConfig, itemsize: int) -> int:
    """Return the bytes of sharded parameters that stage 3 has gathered, in two copies each."""
    if config.world.world_size == 1 and config.strategy.offload in ("none", "optimizer"):
        return 0
    sharded = shape.sum_weights(lambda w: w.count * (w.count > _PERSISTENT))
    return 2 * itemsize * min(sharded, _MOST_GATHERED)


def update_bytes(trained: int, config: TrainConfig) -> int:
    """Return the bytes of gradients that stage 3 copies for the optimizer."""
    return _FP32 * min(trained // config.world.world_size, _MOST_UPDATED)
