"""Refuse a model that does not fit before its weights are loaded, and suggest a change that fits.

Called by `rank`, on GPUs. The memory is a parameter, so this module runs without a GPU.
"""

from finetune_trainer.config import TrainConfig
from finetune_trainer.errors import ConfigError
from finetune_trainer.memory.read_base import read_base_of
from finetune_trainer.refusals import STRICT, Refusals
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.fit import Fit, Gpu, Sizing, Verdict
from finetune_trainer.sizing.reserve import measured_reserve

_GIB = 2**30


def check_memory(
    config: TrainConfig,
    free: int,
    *,
    row_tokens: int,
    base: BaseShape | None = None,
    capability: tuple[int, int] = (9, 0),
    can_shard: bool = True,
    refusals: Refusals = STRICT,
    warns: bool = True,
) -> Fit | None:
    """Compare the peak of a step with the free memory.

    A configuration that may not fit starts with a warning.

    Args:
        config: Configuration without any `auto`.
        free: Bytes that this rank may take of its device, measured after CUDA and NCCL started.
        row_tokens: Tokens of the longest row, including padding.
        base: Shape of the model; read from its `config.json` by default.
        capability: Compute capability of the device.
        can_shard: Whether the message may suggest sharding.
        refusals: Refuses a new run, and only warns if the run has a checkpoint.
        warns: Whether a configuration that may not fit gets a warning.

    Returns:
        The verdict; None for models without a list of decoder layers.

    Raises:
        ConfigError: the step does not fit; the message states the peak, its largest component and
            the cheapest change that fits.
    """
    base = base or read_base_of(config)
    if not base.order:
        return None
    gpu = Gpu(free + measured_reserve(config), capability)
    found = Sizing(base, row_tokens).fit(config, gpu, can_shard=can_shard)
    if found.verdict is Verdict.WOULD_NOT_FIT:
        sentence = f"{_problem(found, free)}; {_advice(found)}"
        refusals.refuse(ConfigError(f"{sentence}; spec.training.checkMemory false starts anyway"))
    elif found.verdict is Verdict.TIGHT and warns:
        advice = f"; {_advice(found)}" if found.change else ""
        refusals.warn(f"{_problem(found, free)}, which may not be enough{advice}")
    return found


def _problem(found: Fit, free: int) -> str:
    peak = found.peak
    return (
        f"spec.training: a step of this model takes {_gib(peak.nbytes)} of a GPU's memory at its "
        f"peak ({peak.moment}), of which {peak.largest} take {_gib(peak.parts[peak.largest])}, and "
        f"{_gib(free)} are free"
    )


def _advice(found: Fit) -> str:
    if found.change is None:
        return "no single setting makes it fit: use more or larger GPUs, or a smaller model"
    fits = "fits" if found.change_verdict is Verdict.FITS else "may fit"
    return f"the cheapest change that {fits} is {found.change} ({_gib(found.change_bytes)})"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
