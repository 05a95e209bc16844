"""Compare the host memory of a run with the memory of rank 0's node, before the model is loaded.

Called on rank 0, on GPUs. The memory is a parameter, so this module runs without a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.host import allocator_settings, free_host_memory, host_memory
from finetune_trainer.model.stored_quantization import stored_kind
from finetune_trainer.refusals import Refusals
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.fit import Gpu, Sizing, Verdict, changes
from finetune_trainer.sizing.host import HostPeak, host_peak, loading_bytes
from finetune_trainer.sizing.method import base_precision, with_method

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GIB = 2**30
_WORDS = {
    "loading": "loading the model",
    "training": "offloading",
    "checkpoint": "copying a checkpoint",
    "export": "exporting the model",
}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class HostMemory:
    """Memory of a node within the limit of the container.

    Attributes:
        free: Bytes that are free once the ranks have started.
        total: All bytes.
    """

    free: int
    total: int

    @classmethod
    def of_node(cls) -> "HostMemory":
        """Return the memory of this node."""
        return cls(free_host_memory(), host_memory())


def check_host_memory(
    config: TrainConfig,
    host: HostMemory,
    sizing: Sizing,
    gpu: Gpu,
    *,
    settings: "PretrainedConfig",
    refusals: Refusals,
) -> None:
    """Refuse a model that cannot be loaded into host memory; warn if memory may not be enough.

    Args:
        config: Configuration without any `auto`.
        host: Memory of the node of rank 0.
        sizing: The model.
        gpu: Memory of a rank; a suggested change fits into it.
        settings: The model's `config.json`, which states the dtype of its files.
        refusals: Refuses a new run, and only warns if the run has a checkpoint.

    Raises:
        ConfigError: The weights alone exceed the memory of the node.
    """
    stored = _stored_precision(settings)
    peak = _peak(config, sizing, stored)
    verdict = _verdict(peak, host, is_sure=stored is not None)
    if verdict is Verdict.FITS:
        return
    better: dict[Verdict, str] = {}  # the first change by the verdict after it
    for name, changed in _changes(config):
        if sizing.verdict(changed, gpu) is not Verdict.WOULD_NOT_FIT:
            after = _verdict(_peak(changed, sizing, stored), host, is_sure=True)
            better.setdefault(after, name)
    is_refused = verdict is Verdict.WOULD_NOT_FIT
    advice = "use nodes or limits with more memory"
    if Verdict.FITS in better:
        advice += f", or {better[Verdict.FITS]}"
    elif is_refused and Verdict.TIGHT in better:
        advice += f", or {better[Verdict.TIGHT]}, which may be enough"
    moment = "loading" if is_refused else peak.moment
    problem = (
        f"spec.resources: {_WORDS[moment]} takes {peak.moments[moment] / _GIB:.1f} GiB of host "
        "memory on the node of rank 0, "
    )
    if is_refused:
        problem += f"which has {host.total / _GIB:.1f} GiB; {advice}"
        start = "spec.training.checkMemory false starts anyway"
        refusals.refuse(ConfigError(f"{problem}; {start}"))
    else:
        free = f"of which {host.free / _GIB:.1f} GiB are free"
        refusals.warn(f"{problem}{free}, which may not be enough; {advice}")


def can_load(
    config: TrainConfig, total: int, base: BaseShape, settings: "PretrainedConfig"
) -> bool:
    """Return whether the node of rank 0 may have the memory to load the model.

    Args:
        config: Configuration whose precision is known.
        total: Memory of the node of rank 0.
        base: Shape of the model.
        settings: The model's `config.json`, which states the dtype of its files.
    """
    stored = _stored_precision(settings)
    converts = stored != base_precision(config)
    needed = loading_bytes(with_method(base, config), config, converts=converts)
    return stored is None or needed <= total


def _stored_precision(settings: "PretrainedConfig") -> str | None:
    """Return the precision of the model's files, or their quantisation; None if not stated."""
    kind = stored_kind(settings)
    if kind is not None:
        return kind
    dtype = getattr(settings.get_text_config(), "dtype", None) or getattr(settings, "dtype", None)
    return _PRECISIONS.get(str(dtype).removeprefix("torch."))


def _peak(config: TrainConfig, sizing: Sizing, stored: str | None) -> HostPeak:
    converts = stored != base_precision(config)
    shape = sizing.shape(config)
    return host_peak(shape, config, converts=converts, allocator=allocator_settings())


def _verdict(peak: HostPeak, host: HostMemory, *, is_sure: bool) -> Verdict:
    if is_sure and peak.moments["loading"] > host.total:
        return Verdict.WOULD_NOT_FIT
    return Verdict.TIGHT if peak.nbytes > host.free else Verdict.FITS


def _changes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Yield changes that save host memory: first of the output, then of speed, then of numerics."""
    if config.output.format != "adapter" and config.method.type != "full":
        yield "spec.output.format adapter", _with(config, "output", format="adapter")
    if config.strategy.offload != "none":
        yield "spec.strategy.offload none", _with(config, "strategy", offload="none")
    if config.strategy.type != "ddp" and config.strategy.offload == "none":
        yield "spec.strategy.type ddp", _with(config, "strategy", type="ddp", replicas=1)
    yield from changes(config)
    yield "spec.checkpoint.enabled false", _with(config, "checkpoint", enabled=False)


def _with(config: TrainConfig, part: str, **values: Any) -> TrainConfig:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=values)})
