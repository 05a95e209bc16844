"""Choose strategy, recomputation, micro-batch and precision by the memory of the GPUs.

The trainer chooses when an attempt starts; `ftctl plan` and the operator forecast with the same
function. The same model, settings and hardware give the same choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict

MOST_TOKENS = 16_384
"""Tokens of a micro-batch beyond which a larger one no longer gains speed."""
MOST_ROWS = 64
"""Rows of a micro-batch, which bounds the number of candidates for short rows."""
LOWER = 0.9
"""Relative peak of the next choice after an OutOfMemory, at most."""
_HAS_BF16_FROM = (8, 0)
_RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Hardware:
    """Hardware of every rank.

    Attributes:
        gpu: Memory and compute capability of the rank that has the least.
        free: Bytes of it that are free for this run; the whole memory by default.
        has_nvlink: Whether NVLink connects the GPUs of a node.
    """

    gpu: Gpu
    free: int | None = None
    has_nvlink: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen configuration.

    Attributes:
        config: Configuration without `auto`.
        verdict: Whether a step fits into the memory of the GPU.
        peak_bytes: Memory of the tensors at the peak of a step; None without known layers.
        lower_peak_bytes: Peak of the choice after an OutOfMemory; None if there is none.
        passed_over: The choice by the whole memory, if less is free and it does not fit.
    """

    config: TrainConfig
    verdict: Verdict
    peak_bytes: int | None
    lower_peak_bytes: int | None = None
    passed_over: TrainConfig | None = None


def choose(
    config: TrainConfig,
    sizing: Sizing,
    hardware: Hardware,
    *,
    needs_single_rows: bool = False,
    can_shard: bool = True,
) -> Choice:
    """Choose the settings in `config.auto`, which is not None.

    The first candidate of the documented order that fits is chosen; otherwise the lowest peak among
    the candidates that may fit, or among all candidates.

    Args:
        config: Configuration with `auto`.
        sizing: Model and rows.
        hardware: Memory and links of the GPUs.
        needs_single_rows: Whether the model supports a micro-batch of one row only.
        can_shard: Whether the weights can be sharded. Quantised files cannot, and weights for which
            the host of rank 0 has too little memory.
    """
    config = with_precision(config, hardware.gpu)
    if not sizing.has_layers:
        return Choice(_with(config, {}), Verdict.TIGHT, None)
    is_known = sizing.is_known(config)
    most_rows = 1 if needs_single_rows or not is_known else None
    strategies = list(_strategies(config, can_shard=can_shard))
    found = [
        _candidate(one, sizing, hardware.gpu)
        for one in _candidates(
            config, strategies, _sizes(config, sizing.row_tokens, most_rows), hardware.has_nvlink
        )
    ]
    assert config.auto is not None, "the caller has checked it"
    limit = config.auto.peak_at_most
    allowed = [one for one in found if limit is None or one.peak <= limit]
    best = by_total = _best(allowed or [min(found, key=_peak)], is_known=is_known)
    if hardware.free is not None:
        free = Gpu(hardware.free, hardware.gpu.capability)
        if sizing.verdict(best.config, free) is Verdict.WOULD_NOT_FIT:
            seen = [
                _Candidate(one.config, one.peak, sizing.verdict(one.config, free))
                for one in allowed
            ]
            if any(one.verdict is not Verdict.WOULD_NOT_FIT for one in seen):
                best = _best(seen, is_known=is_known)
    lower = [one.peak for one in found if one.peak <= LOWER * best.peak]
    return Choice(
        config=best.config,
        verdict=best.verdict,
        peak_bytes=best.peak,
        lower_peak_bytes=max(lower, default=None),
        passed_over=by_total.config if best.config != by_total.config else None,
    )


@dataclass(frozen=True)
class _Candidate:
    config: TrainConfig
    peak: int
    verdict: Verdict


def _candidate(config: TrainConfig, sizing: Sizing, gpu: Gpu) -> _Candidate:
    peak = sizing.peak(config, gpu)
    return _Candidate(config, peak.nbytes, sizing.verdict_of(peak, config, gpu))


def _peak(candidate: _Candidate) -> int:
    return candidate.peak


def _best(candidates: list[_Candidate], *, is_known: bool) -> _Candidate:
    fitting = [one for one in candidates if one.verdict is Verdict.FITS]
    tight = [one for one in candidates if one.verdict is Verdict.TIGHT]
    if fitting or (tight and not is_known):  # unknown layers are at best tight
        return (fitting or tight)[0]
    return min(tight or candidates, key=_peak)


def with_precision(config: TrainConfig, gpu: Gpu) -> TrainConfig:
    """Return the configuration with the precision that the GPU supports, if it is `auto`."""
    assert config.auto is not None, "the caller has checked it"
    if "precision" not in config.auto.settings:
        return config
    precision = "bf16" if gpu.capability >= _HAS_BF16_FROM else "fp16"
    return config.model_copy(
        update={"training": config.training.model_copy(update={"precision": precision})}
    )


def _candidates(
    config: TrainConfig,
    strategies: list[Mapping[str, Any]],
    sizes: list[int],
    has_nvlink: bool,
) -> Iterator[TrainConfig]:
    """Yield the candidates from the fastest to the slowest.

    Replicas come before shards, and less recomputation before more. With NVLink, sharding without
    recomputation comes before replicas with full recomputation. Without NVLink each micro-batch
    gathers the weights slowly, so of sharded candidates the largest micro-batch comes first.
    """
    pairs = [(one, recompute) for one in strategies for recompute in _recomputations(config)]
    whole = [pair for pair in pairs if pair[0]["type"] != "fsdp"]
    sharded = [pair for pair in pairs if pair[0]["type"] == "fsdp"]
    if has_nvlink:
        first = [pair for pair in whole if pair[1] != "full"] + [
            pair for pair in sharded if pair[1] == "none"
        ]
        order = [(*pair, size) for pair in _unique(first + whole + sharded) for size in sizes]
    else:
        order = [(*pair, size) for pair in whole for size in sizes]
        order += [(*pair, size) for size in sizes for pair in sharded]
    for strategy, recompute, size in order:
        values = {**strategy, "activation_checkpointing": recompute}
        yield _with(config, values, micro_batch_size=size)


def _strategies(config: TrainConfig, *, can_shard: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the values of replication and sharding: DDP, HSDP and FSDP.

    `auto` never chooses ZeRO. Weights in 8 bits cannot be sharded, and neither can a single rank.
    """
    assert config.auto is not None, "the caller has checked it"
    world = config.world
    if "strategy" not in config.auto.settings:
        yield {"type": config.strategy.type}
        return
    yield {"type": "ddp"}
    if world.world_size == 1 or config.method.quantization == "int8" or not can_shard:
        return
    if world.nnodes > 1 and world.nproc_per_node > 1:
        yield {"type": "fsdp", "replicas": world.nnodes, "prefetch": 1}
    yield {"type": "fsdp", "replicas": 1, "prefetch": 1}


def _recomputations(config: TrainConfig) -> tuple[str, ...]:
    assert config.auto is not None, "the caller has checked it"
    if "activationCheckpointing" in config.auto.settings:
        return _RECOMPUTATIONS
    return (config.strategy.activation_checkpointing,)


def _sizes(config: TrainConfig, row_tokens: int, most_rows: int | None) -> list[int]:
    """Return micro-batches that divide the rows of a rank, from the largest to 1.

    Each is at least a quarter smaller than the one before, which bounds the number of candidates.
    """
    assert config.auto is not None, "the caller has checked it"
    if "microBatchSize" not in config.auto.settings:
        return [config.training.micro_batch_size]
    rows = config.training.global_batch_size // config.world.world_size
    most = min(most_rows or rows, rows, MOST_ROWS, max(1, MOST_TOKENS // row_tokens))
    sizes = list[int]()
    for size in range(most, 0, -1):
        if rows % size == 0 and (not sizes or size == 1 or size <= 0.75 * sizes[-1]):
            sizes.append(size)
    return sizes


def _unique(pairs: list[Any]) -> list[Any]:
    return [pair for place, pair in enumerate(pairs) if pair not in pairs[:place]]


def _with(config: TrainConfig, strategy: Mapping[str, Any], **training: Any) -> TrainConfig:
    """Return a candidate, whose settings are all chosen."""
    return config.model_copy(
        update={
            "auto": None,
            "strategy": config.strategy.model_copy(update=dict(strategy)),
            "training": config.training.model_copy(update=training),
        }
    )
