"""`ftctl plan`: forecast memory, speed and price of a job before any node exists."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.cli.target import FileArgument, ProfileOption, open_target
from finetune_operator.cli.trainer_process import read_base
from finetune_operator.planner.catalogue import GpuSize, read_prices, size_of, sizes
from finetune_operator.planner.hardware import Option, options
from finetune_operator.planner.models import base_shape_of_job
from finetune_operator.planner.speed import Band

_GIB = 2**30
_BAR = 24


def plan(
    file: FileArgument,
    profile: ProfileOption = None,
    on: Annotated[
        str | None, typer.Option(metavar="SIZE,…", help="GPU sizes of Azure to plan for.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes in place of spec.topology.nodes.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the whole training, for hours and price.")
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV with the columns size, usd_per_hour and date."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all options as JSON.")] = False,
) -> None:
    """Forecast whether a job fits on GPU sizes of Azure, how it would run, and its price.

    --on selects the sizes; at most the GPUs per node of the job are used. Without it, the sizes are
    topology.instanceType, the sizes of the FineTuneProfile or, for the backend local, this machine,
    with the GPUs per node of the job. Without any of them, all sizes are compared, with
    all of their GPUs. The trainer chooses by the same formula when it starts.

    A known model is not read. The trainer's process reads others from a folder, the cache or the
    hub; HF_TOKEN gives access to gated ones. The exit code is 1 if the job does not fit.
    """
    target = open_target(file, profile=profile)
    job = target.job
    own = (
        target.backend.gpu_sizes(job)
        if on is None
        else [size_of(name) for name in dict.fromkeys(map(str.strip, on.split(",")))]
    )
    if not own:
        note = "the memory of the job's GPUs is not known; all sizes are compared, with all GPUs"
        typer.echo(f"note: {note}", err=True)
    offered = [_with_price(size, prices) for size in own or sizes()]
    base = base_shape_of_job(job.spec.model) or read_base(target, os.environ)
    gpus = (job.spec.topology.gpus_per_node or None) if own else None
    limits = {"gpus": gpus} if on is None else {"most_gpus": gpus}
    found = options(job, base, offered, nodes=nodes, tokens=tokens, **limits)
    if as_json:
        print(json.dumps([_as_json(one) for one in found], indent=2))
    else:
        print("\n".join(_text(job, found, has_tokens=tokens is not None)))
    if not found[0].is_possible:
        raise typer.Exit(1)


def _with_price(size: GpuSize, prices: Path | None) -> GpuSize:
    if prices is None:
        return size
    return replace(size, price=read_prices(prices).get(size.name))


def _text(job: FineTuneJob, found: list[Option], *, has_tokens: bool) -> list[str]:
    best = found[0]
    lines = [_verdict(job, best)]
    if best.fit is not None and best.config is not None:
        lines += ["", *_memory(best), ""]
    lines += _table(found)
    if best.is_possible and (best.forecast is None or best.forecast.hours is None):
        reason = "the speed is unknown" if best.forecast is None or has_tokens else "add --tokens N"
        lines += ["", f"Without hours and the price of the job: {reason}."]
    elif best.size.price is not None and best.is_possible:
        where = f" in {best.size.price.region}" if best.size.price.region else ""
        lines += ["", f"List prices of {best.size.price.date}{where}; hours and USD are bands."]
    if best.size.recalled:
        values = ", ".join(f"{name} {best.size.show(name)}" for name in best.size.recalled)
        lines += ["", f"Not looked up for {best.size.name}: {values}."]
    return lines


def _verdict(job: FineTuneJob, best: Option) -> str:
    model = job.spec.model.base_name or job.spec.model.source.removeprefix("hf://")
    gpus = best.size.gpus if best.config is None else best.config.world.nproc_per_node
    place = f"{best.nodes} x {best.size.name} ({gpus} x {best.size.gpu})"
    if best.config is None:
        return f"WouldNotFit: {model} on {place}: {best.lost_by}"
    strategy, training = best.config.strategy, best.config.training
    replicas = f" with {strategy.replicas} replicas" if strategy.replicas > 1 else ""
    verdict = "Tight" if best.fit is None else best.fit.verdict.value
    text = (
        f"{verdict}: {model} {best.config.method.type} on {place}\n"
        f"  {strategy.type}{replicas}, activation checkpointing "
        f"{strategy.activation_checkpointing}, micro-batch {training.micro_batch_size} x "
        f"{best.config.data.max_seq_len:,} tokens, accumulation "
        f"{best.config.gradient_accumulation_steps}, {training.precision}"
    )
    if best.fit is not None and best.fit.change is not None and best.is_refused:
        size = best.fit.change_bytes / _GIB
        text += f"\n  cheapest change that fits: {best.fit.change} ({size:.1f} GiB)"
    return text


def _memory(best: Option) -> list[str]:
    assert best.fit is not None, "the caller has checked it"
    peak, usable = best.fit.peak, best.size.memory.usable
    lines = [f"Memory of each GPU at the peak of a step ({peak.moment}), GiB"]
    for name, size in sorted(peak.parts.items(), key=lambda part: -part[1]):
        if size >= _GIB / 20:
            bar = "#" * max(1, round(_BAR * size / max(peak.nbytes, usable)))
            lines.append(f"  {name:18}{size / _GIB:8.1f}  {bar}")
    lines.append(f"  {'sum':18}{peak.nbytes / _GIB:8.1f}  of {usable / _GIB:.1f}")
    return lines


def _table(found: list[Option]) -> list[str]:
    rows = [("SIZE", "NODES", "CHOICE", "GIB", "HOURS", "USD", "LOST BY")]
    for one in found:
        choice = gib = hours = usd = ""
        if one.config is not None and one.is_possible:
            strategy = one.config.strategy
            kind = "hsdp" if strategy.replicas > 1 else strategy.type
            size = one.config.training.micro_batch_size
            choice = f"{kind}/{strategy.activation_checkpointing}/{size}"
        if one.fit is not None:
            gib = f"{one.fit.peak.nbytes / _GIB:.1f}"
        if one.forecast is not None:
            hours, usd = _band(one.forecast.hours), _band(one.forecast.usd)
        name = one.size.name.removeprefix("Standard_")
        rows.append((name, str(one.nodes), choice, gib, hours, usd, one.lost_by))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]


def _band(band: Band | None) -> str:
    return "" if band is None else f"{_number(band.low)}-{_number(band.high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _as_json(option: Option) -> dict[str, Any]:
    """Return an option as JSON; bytes, USD and hours."""
    result: dict[str, Any] = {
        "size": option.size.name,
        "nodes": option.nodes,
        "gpusPerNode": option.size.gpus,
        "verdict": "WouldNotFit",
        "lostBy": option.lost_by,
        "usableBytes": option.size.memory.usable,
        "recalled": list(option.size.recalled),
    }
    if option.config is not None:
        strategy, training = option.config.strategy, option.config.training
        result |= {
            "verdict": "Tight" if option.fit is None else option.fit.verdict.value,
            "gpusPerNode": option.config.world.nproc_per_node,
            "strategy": strategy.type,
            "replicas": strategy.replicas,
            "activationCheckpointing": strategy.activation_checkpointing,
            "microBatchSize": training.micro_batch_size,
            "gradientAccumulationSteps": option.config.gradient_accumulation_steps,
            "precision": training.precision,
        }
    if option.fit is not None:
        result |= {"peakBytes": option.fit.peak.nbytes, "memory": dict(option.fit.peak.parts)}
        result |= {"change": option.fit.change}
    if option.forecast is not None:
        for name in ("tokens_per_second", "hours", "usd"):
            band = getattr(option.forecast, name)
            key = {"tokens_per_second": "tokensPerSecond"}.get(name, name)
            result[key] = None if band is None else {"low": band.low, "high": band.high}
    if option.size.price is not None:
        price = option.size.price
        result["price"] = {"usdPerHour": price.usd_per_hour, "date": price.date.isoformat()}
    return result
