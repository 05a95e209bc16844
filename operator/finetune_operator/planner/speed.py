"""Forecast tokens per second, hours and price of a job on a GPU size, as bands.

`ftctl plan` calls it, after `Sizing` decided that the job fits. The time of a micro-batch with
F FLOPs is

    max(F / (peak x efficiency), launch time x layers) + dequantization

and the time of a step max(c, x) + 0.35 min(c, x), with c of computing and x of moving tensors,
which overlap in part. Volumes of communication are from arXiv:1910.02054, section 7. The
efficiencies are shares of the dense peak that published fine-tuning runs reach (QwenLM/Qwen
README, mosaicml/llm-foundry benchmarking README), and the band is as wide as their spread.
"""

import math
from dataclasses import dataclass

from finetune_operator.planner.catalogue import GpuSize
from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.method import ITEMSIZE
from finetune_trainer.sizing.model_shape import Layer, ModelShape, trained_count
from finetune_trainer.sizing.zero import stage_of

BAND = (0.65, 1.5)
"""Lowest and highest rate, relative to the expected rate."""
_LAUNCH_SECONDS = 0.005
"""Least time of a layer in a micro-batch: launching its kernels."""
_DEQUANTIZATION_SECONDS = 6e-12
"""Of a micro-batch, for each parameter stored in 4 or 8 bits."""
_RECOMPUTED = 1.7
"""FLOPs per weight for recomputing a layer, which stops before its last product."""
_EXPOSED = 0.35
_PER_DOUBLING = 0.97
"""Efficiency of twice the nodes, as published for QLoRA on two and three nodes of Azure."""
_OF_LINK = 0.8
"""Share of a link's bandwidth that collectives reach."""
_PCIE_BYTES_PER_SECOND = 12e9
_HOST_BYTES_PER_SECOND = 100e9
"""Of a node's memory: half the bandwidth of eight channels of DDR4; an assumption."""
_ADAMW_BYTES = 28
"""Bytes per parameter of an AdamW step in fp32: weight, gradient and two moments."""
_NODE_SECONDS, _COMPILE_SECONDS = 360.0, 120.0
_LOAD_BYTES_PER_SECOND = 0.5e9
_FP32 = 4


@dataclass(frozen=True)
class Band:
    """Lowest and highest value of a forecast."""

    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """Speed and price of a job.

    Attributes:
        tokens_per_second: Of all GPUs together.
        hours: From the request of nodes to the end of training; None without a number of tokens.
        usd: Price of all nodes for these hours; None without hours or a dated price.
    """

    tokens_per_second: Band
    hours: Band | None = None
    usd: Band | None = None


def forecast(
    shape: ModelShape, config: TrainConfig, size: GpuSize, tokens: int | None = None
) -> Forecast | None:
    """Return the forecast of a job without `auto` on nodes of a size.

    Args:
        shape: Shape of the model with its trained parameters.
        config: Configuration of the job; each of its nodes has this size.
        size: GPU size with its price.
        tokens: Tokens of the whole training; None if unknown.

    Returns:
        None if the speed is unknown: `tokens_per_second` lists the cases.
    """
    rate = tokens_per_second(shape, config, size)
    if rate is None:
        return None
    band = Band(rate * BAND[0], rate * BAND[1])
    if tokens is None:
        return Forecast(band)
    start = start_seconds(shape, config)
    hours = Band(*((tokens / one + start) / 3600 for one in (band.high, band.low)))
    if size.price is None:
        return Forecast(band, hours)
    per_hour = size.price.usd_per_hour * config.world.nnodes
    return Forecast(band, hours, Band(hours.low * per_hour, hours.high * per_hour))


def tokens_of(config: TrainConfig) -> int | None:
    """Return the tokens of a job with `maxSteps` and packing; None if its data determine them."""
    if config.training.max_steps is None or not config.data.packing:
        return None
    rows = config.training.max_steps * config.training.global_batch_size
    return rows * config.data.max_seq_len


def tokens_per_second(shape: ModelShape, config: TrainConfig, size: GpuSize) -> float | None:
    """Return the expected rate of all GPUs together.

    Returns:
        None for layers whose operations are unknown, for fp32 and fp64, and for files on NVMe.
    """
    is_half = config.training.precision in ("bf16", "fp16")
    if not (shape.is_known and is_half) or config.strategy.offload == "nvme":
        return None
    computing = config.gradient_accumulation_steps * _micro_batch_seconds(shape, config, size)
    moving = _communication_seconds(shape, config, size) + _offload_seconds(shape, config)
    step = max(computing, moving) + _EXPOSED * min(computing, moving)
    step /= math.pow(_PER_DOUBLING, math.log2(config.world.nnodes))
    return config.training.global_batch_size * config.data.max_seq_len / step


def start_seconds(shape: ModelShape, config: TrainConfig) -> float:
    """Return the seconds until the first step: nodes, weights in 16 bits, and compilation.

    Six minutes for a node, 0.5 GB/s for weights and two minutes of compilation are assumptions.
    """
    weights = 2 * shape.sum_weights(lambda weight: weight.count)
    compiling = _COMPILE_SECONDS * config.training.compile
    return _NODE_SECONDS + weights / _LOAD_BYTES_PER_SECOND + compiling


def flops_per_token(shape: ModelShape, config: TrainConfig) -> float:
    """Return the FLOPs of a token, forward and backward, including recomputation.

    A weight takes 4 FLOPs if it is frozen and 6 if it is trained (arXiv:2204.02311, appendix B).
    Each token is counted as a label, and attends to all earlier tokens of its row: sliding windows
    are not part of a shape.
    """
    head = shape.vocabulary * shape.hidden * (6 if shape.head_trained else 4)
    return head + sum(
        shape.order.count(index) * _flops_of_layer(layer, shape.hidden, config)
        for index, layer in enumerate(shape.kinds)
    )


def _flops_of_layer(layer: Layer, hidden: int, config: TrainConfig) -> float:
    recompute = config.strategy.activation_checkpointing
    again = _RECOMPUTED * (recompute == "full")
    # Selective recomputation repeats products with a trained weight, unless they are compiled.
    trained_again = again or _RECOMPUTED * (
        recompute == "selective" and not config.training.compile
    )
    flops = 0.0
    for product in layer.products:
        per_weight = 6 + trained_again if product.is_trained else 4 + again
        flops += per_weight * product.inputs * product.outputs
        flops += (6 + again) * product.rank * (product.inputs + product.outputs)
    if layer.experts is not None:
        experts = layer.experts
        width = experts.per_token * experts.width + experts.shared
        per_weight = 6 if experts.is_trained or experts.is_adapted else 4
        flops += (per_weight + again) * 3 * width * hidden
    if layer.out_of_attention is not None:
        attention = 6 * config.data.max_seq_len * layer.out_of_attention.inputs
        flops += attention * (4 / 3 if again else 1)
    return flops


def _micro_batch_seconds(shape: ModelShape, config: TrainConfig, size: GpuSize) -> float:
    tokens = config.training.micro_batch_size * config.data.max_seq_len
    peak = size.half_precision_tflops * 1e12 * _efficiency(size.capability)
    computing = flops_per_token(shape, config) * tokens / peak
    quantized = shape.sum_weights(lambda weight: weight.count * (weight.bits > 0))
    launching = _LAUNCH_SECONDS * len(shape.order)
    return max(computing, launching) + _DEQUANTIZATION_SECONDS * quantized


def _efficiency(capability: tuple[int, int]) -> float:
    """Return the share of the dense peak that training reaches on a generation of GPUs."""
    if capability < (8, 0):
        return 0.30
    return 0.46 if capability < (9, 0) else 0.42


def _communication_seconds(shape: ModelShape, config: TrainConfig, size: GpuSize) -> float:
    """Return the seconds of a step in which ranks exchange weights and gradients."""
    ranks, replicas = config.world.world_size, config.strategy.replicas
    gradients = 2 * _trained(shape) * _FP32
    if not _gathers(config):
        return gradients * (ranks - 1) / ranks / _link(ranks, config, size)
    shards = ranks // replicas
    passes = 3 if config.method.type == "full" else 2
    gathered = passes * _gathered(shape, config) * config.gradient_accumulation_steps
    seconds = gathered * (shards - 1) / shards / _link(shards, config, size)
    return seconds + gradients * (replicas - 1) / replicas / _link(ranks, config, size)


def _offload_seconds(shape: ModelShape, config: TrainConfig) -> float:
    """Return the seconds of a step for copies between host and GPU, and for the host's AdamW."""
    ranks = config.world.world_size // config.strategy.replicas
    if config.strategy.offload == "optimizer":
        moved = 2 * _trained(shape) * _FP32
    elif config.strategy.offload == "cpu":
        moved = 3 * _gathered(shape, config) * config.gradient_accumulation_steps
    else:
        return 0.0
    updated = _ADAMW_BYTES * _trained(shape) / (ranks / config.world.nproc_per_node)
    return moved / ranks / _PCIE_BYTES_PER_SECOND + updated / _HOST_BYTES_PER_SECOND


def _link(ranks: int, config: TrainConfig, size: GpuSize) -> float:
    """Return the bytes per second of the slowest link between ranks."""
    inside = _PCIE_BYTES_PER_SECOND
    if size.has_nvlink:
        inside = _OF_LINK * size.nvlink_gb_per_second / 2 * 1e9
    if ranks <= config.world.nproc_per_node:
        return inside
    return min(inside, _OF_LINK * (size.rdma_gbps or size.ethernet_gbps) / 8 * 1e9)


def _gathers(config: TrainConfig) -> bool:
    return config.strategy.type == "fsdp" or stage_of(config) == 3


def _trained(shape: ModelShape) -> int:
    return shape.sum_layers(lambda layer: trained_count(layer.weights)) + trained_count(
        shape.others
    )


def _gathered(shape: ModelShape, config: TrainConfig) -> int:
    """Return the bytes of all weights as they are gathered or copied to a GPU."""
    itemsize = ITEMSIZE[config.training.precision]
    return shape.sum_weights(lambda weight: weight.gathered_nbytes(itemsize))
