"""Memory of DeepSpeed's engine between two steps, by ZeRO stage (arXiv:1910.02054, section 5).

Counted on engines of one and two ranks, which `test_zero_state.py` compares. With T trained and F
frozen elements on n ranks, the engine retains in 16 bits:

    stage 1    2 F + 2 T + 12 T / n + 4 T      the last are sums of gradients, absent in fp32
    stage 2    2 F + 2 T + 12 T / n
    stage 3    (2 F + 2 T + 16 T) / n + 4 T    the last is the bucket of gradients

12 are both moments and the fp32 weights. The bucket has at most 5e8 elements. Stage 3 does not
shard parameters of at most 1e5 elements, such as norms and most adapters.
"""

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.model_shape import ModelShape, Weight

MOST_IN_BUCKET = 500_000_000
"""Elements of the engine's bucket of gradients; DeepSpeed's default."""
_PERSISTENT = 100_000
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
