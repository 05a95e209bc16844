"""Forecast how a job would run on GPU sizes of Azure, with the memory formula of the trainer.

`ftctl plan` prints the options; the operator refuses a new job that fits on none. Everything is
pure; `choose` is the function by which the trainer chooses when an attempt starts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from finetune_operator.api.problems import InvalidJobError
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.planner.catalogue import GpuSize
from finetune_operator.planner.models import base_shape_of_job
from finetune_operator.planner.plan import Expectation, make_plan
from finetune_operator.planner.speed import Forecast, forecast, tokens_of
from finetune_operator.planner.train_config import Locations, derive_train_config
from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.base_shape import BaseShape
from finetune_trainer.sizing.choose import Hardware, choose
from finetune_trainer.sizing.fit import Fit, Gpu, Sizing, Verdict
from finetune_trainer.sizing.host import loading_bytes
from finetune_trainer.sizing.method import base_precision, is_loaded_once

_SHORTEST_ROW = 8  # tokens, as in `training.maxSeqLength`
_GIB = 2**30
_BF16_FROM = (8, 0)
NOWHERE = Locations(str, "run", "checkpoints", "output", "cache", "termination", trackers=())
"""Locations for a configuration that is never run."""


@dataclass(frozen=True)
class Option:
    """A job on nodes of a GPU size.

    Attributes:
        size: The GPU size.
        nodes: Number of nodes.
        config: Configuration without `auto`; None if the job cannot run on the size at all.
        fit: Verdict, peak and the cheapest change that fits; None without `config`, and for models
            without a list of layers.
        forecast: Speed and price; None if unknown.
        lost_by: Reason why another option is better; empty for the best option.
    """

    size: GpuSize
    nodes: int
    config: TrainConfig | None
    fit: Fit | None
    forecast: Forecast | None
    lost_by: str

    @property
    def is_possible(self) -> bool:
        """Whether the job may start: it fits, or it may fit."""
        return self.config is not None and not self.is_refused

    @property
    def is_refused(self) -> bool:
        """Whether the trainer would refuse the job."""
        return self.fit is not None and self.fit.verdict is Verdict.WOULD_NOT_FIT

    @property
    def is_too_large(self) -> bool:
        """Whether a step should need more memory than there is; its start may be Tight."""
        fit = self.fit
        return fit is not None and (self.is_refused or fit.peak.nbytes > self.size.memory.usable)

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all nodes; None if unknown."""
        price = self.size.price
        return None if price is None else price.usd_per_hour * self.nodes

    @property
    def cost(self) -> float | None:
        """Expected price of the whole job or, without a number of tokens, of an hour."""
        if self.forecast is not None and self.forecast.usd is not None:
            return (self.forecast.usd.low + self.forecast.usd.high) / 2
        return self.usd_per_hour


def options(
    job: FineTuneJob,
    base: BaseShape,
    sizes: Iterable[GpuSize],
    *,
    nodes: int | None = None,
    gpus: int | None = None,
    most_gpus: int | None = None,
    tokens: int | None = None,
) -> list[Option]:
    """Return an option for each size, the best first.

    Options that fit come before others, then cheaper ones, then fewer GPUs.

    Args:
        job: The job; its number of GPUs per node is replaced.
        base: Shape of the model.
        sizes: GPU sizes to compare.
        nodes: Number of nodes; by default as in the job.
        gpus: GPUs per node; a size with fewer is not possible. All GPUs of each size by default.
        most_gpus: Most GPUs per node.
        tokens: Tokens of the whole training; by default computed from `maxSteps` with packing.
    """
    sizing = Sizing(base, job.spec.training.max_seq_length)
    nodes = nodes or job.spec.topology.nodes
    found = [
        _option(job, sizing, size, nodes, gpus or min(size.gpus, most_gpus or size.gpus), tokens)
        for size in sizes
    ]
    found.sort(key=_rank)
    best = found[0] if found and found[0].is_possible else None
    return [one if one is best or one.lost_by else _beside(one, best) for one in found]


def expect(job: FineTuneJob, sizes: Sequence[GpuSize]) -> Expectation | None:
    """Forecast whether a job fits on any GPU size that job or profile select.

    Args:
        job: A valid job.
        sizes: Sizes on which its pods may run; empty if they are not known.

    Returns:
        None for a job without GPUs.
    """
    gpus = job.spec.topology.gpus_per_node
    if not gpus:
        return None
    base = base_shape_of_job(job.spec.model)
    if base is None:
        text = "the model is not built in; set spec.model.baseName to its name on the hub"
        return Expectation(None, "ModelUnknown", text)
    if not sizes:
        text = "neither the job nor its profile selects a GPU size, or states the memory of a GPU"
        return Expectation(None, "CapacityUnknown", text)
    different = {(one.memory, one.has_nvlink, one.gpus, one.unsupported): one for one in sizes}
    sizes = list(different.values())
    best = options(job, base, sizes, gpus=gpus)[0]
    if best.config is None:
        return Expectation(None, "CapacityUnknown", f"{best.size.name} {best.lost_by}")
    if best.is_refused and (others := [one.name for one in sizes if one.unsupported]):
        text = f"it does not fit on {best.size.name}, and {others[0]} needs an image of your own"
        return Expectation(None, "CapacityUnknown", text)
    if best.is_refused:
        # The model may not support packing.
        if job.spec.training.packing is not True and _fits_with_short_rows(job, base, sizes, gpus):
            text = f"on {best.size.name} the longest row decides{_memory(best)} with maxSeqLength"
            return Expectation(True, Verdict.TIGHT.value, text)
        return Expectation(False, "DoesNotFit", refusal(best))
    verdict = Verdict.TIGHT if best.fit is None else best.fit.verdict
    return Expectation(True, verdict.value, f"on {best.size.name}{_memory(best)}")


def _fits_with_short_rows(
    job: FineTuneJob, base: BaseShape, sizes: Sequence[GpuSize], gpus: int
) -> bool:
    training = job.spec.training.model_copy(update={"max_seq_length": _SHORTEST_ROW})
    spec = job.spec.model_copy(update={"training": training})
    short = job.model_copy(update={"spec": spec})
    return options(short, base, sizes, gpus=gpus)[0].is_possible


def refusal(option: Option) -> str:
    """Return why a job is too large for a size, with the cheapest change that fits."""
    fit = option.fit
    assert fit is not None, "it is too large by its memory"
    advice = "use more or larger GPUs, or a smaller model"
    if fit.change is not None:
        advice = (
            f"the cheapest change that fits is {fit.change} ({fit.change_bytes / _GIB:.1f} GiB)"
        )
    verb, also = "may not fit", ""
    if option.is_refused:
        verb, also = "does not fit", "; spec.training.checkMemory false starts anyway"
    return (
        f"spec.training: the job {verb} on {option.size.name}: it "
        f"{_needs(fit, option.size.memory)} per GPU; {advice}{also}"
    )


def step_memory(option: Option) -> str:
    """Return the memory of a step and of a GPU; empty for models without known layers."""
    if option.fit is None:
        return ""
    peak, usable = option.fit.peak.nbytes, option.size.memory.usable
    return f"a step takes {peak / _GIB:.1f} of {usable / _GIB:.1f} GiB per GPU"


def _memory(option: Option) -> str:
    text = step_memory(option)
    return f": {text}" if text else ""


def _rank(option: Option) -> tuple[int, float, int]:
    verdicts = list(Verdict)
    verdict = Verdict.TIGHT if option.fit is None else option.fit.verdict
    place = len(verdicts) if option.config is None else verdicts.index(verdict)
    cost = float("inf") if option.cost is None else option.cost
    return place, cost, option.size.gpus * option.nodes


def _option(
    job: FineTuneJob, sizing: Sizing, size: GpuSize, nodes: int, gpus: int, tokens: int | None
) -> Option:
    def without(reason: str) -> Option:
        return Option(size, nodes, None, None, None, reason)

    if size.unsupported:
        return without(size.unsupported)
    if nodes * gpus == 1 and job.spec.strategy.type == "fsdp":
        return without("has one GPU, and fsdp needs at least two")
    if gpus > size.gpus:
        return without(f"has {size.gpus} of the job's {gpus} GPUs per node")
    try:
        config = _config_on(job, nodes, gpus)
    except InvalidJobError as error:
        return without(str(error))
    gpu, shortage = size.memory, _host_shortage(config, sizing, size)
    if config.auto is not None:
        hardware = Hardware(gpu, has_nvlink=size.has_nvlink)
        choice = choose(config, sizing, hardware, can_shard=not shortage)
        if choice.verdict is Verdict.WOULD_NOT_FIT:  # if shards do not fit either, refuse it
            choice = choose(config, sizing, hardware)
        config = choice.config
    if config.training.precision == "bf16" and gpu.capability < _BF16_FROM:
        return without("has no bf16")
    fit = sizing.fit(config, gpu) if sizing.has_layers else None
    if fit is not None and fit.verdict is Verdict.WOULD_NOT_FIT:
        return Option(size, nodes, config, fit, None, _needs(fit, gpu))
    if shortage and is_loaded_once(config):
        return without(shortage)
    speed = None
    if size.half_precision_tflops:
        speed = forecast(sizing.shape(config), config, size, tokens or tokens_of(config))
    return Option(size, nodes, config, fit, speed, "")


def _host_shortage(config: TrainConfig, sizing: Sizing, size: GpuSize) -> str:
    """Return the reason why rank 0 cannot load the model on a size; empty if it can.

    The dtype of the files is not known. Only for fp32 are they assumed to have another one, so that
    rank 0 holds all weights in its memory.
    """
    if not size.host_gib or "host_gib" in size.recalled:
        return ""
    converts = base_precision(config) == "fp32"
    needed = loading_bytes(sizing.shape(config), config, converts=converts) / _GIB
    if needed <= size.host_gib:
        return ""
    return f"needs {needed:.1f} of {size.host_gib:g} GiB of host memory to load the model"


def _config_on(job: FineTuneJob, nodes: int, gpus: int) -> TrainConfig:
    topology = job.spec.topology.model_copy(
        update={"nodes": nodes, "gpus_per_node": gpus, "processes_per_node": None}
    )
    spec = job.spec.model_copy(update={"topology": topology})
    return derive_train_config(make_plan(job.model_copy(update={"spec": spec})), 1, NOWHERE)


def _needs(fit: Fit, gpu: Gpu) -> str:
    return f"needs {fit.peak.nbytes / _GIB:.1f} of {gpu.usable / _GIB:.1f} GiB"


def _beside(option: Option, best: Option | None) -> Option:
    """Return the option with the reason why the best one is better."""
    assert best is not None, "without a possible option each one has a reason"
    if option.fit is not None and best.fit is not None and option.fit.verdict != best.fit.verdict:
        return replace(option, lost_by="may not fit")
    if option.cost is None or not best.cost:
        return replace(option, lost_by="price unknown")
    what = "cost" if option.forecast and option.forecast.usd else "price per hour"
    return replace(option, lost_by=f"{option.cost / best.cost - 1:+.0%} {what}")
