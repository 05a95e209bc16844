"""Compare the planner's memory and speed with published points of other programs.

    python planner_accuracy.py points.csv [--record]

One row is a run, with the columns of `COLUMNS`. The settings of a point are fully given if its row
and the program's script leave no setting open, and the trainer has the same settings; this is
decided and listed before anything is computed.
"""

import argparse
import csv
import math
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accuracy_table import record
from planner_stacks import CACHE, FSDP1_CACHE, Stack, base_of, size_with, stack_of

from finetune_operator.planner.speed import BAND, tokens_per_second
from finetune_trainer.config import TrainConfig
from finetune_trainer.sizing.method import with_method
from finetune_trainer.sizing.model_shape import ModelShape, Weight
from finetune_trainer.sizing.peak import step_peak
from finetune_trainer.sizing.reserve import reserve_bytes
from support.launch.launches import train_config

Row = dict[str, str]
COLUMNS = (
    *("id", "model", "params_b", "method", "strategy", "gpu", "gpus_per_node", "nodes", "seq_len"),
    *("micro_batch", "grad_accum", "precision", "optimizer", "act_ckpt", "impl", "peak_mem"),
    *("mem_unit", "mem_scope", "tokens_per_s_per_gpu", "source", "notes"),
)
_OF_PLAN = ("seq_len", "micro_batch", "gpus_per_node", "nodes")
_OFFLOADS = r"cpu_offload|optimizer_offload|param_offload|zero\+\+"
_KNOWN = {
    "strategy": rf"(single|ddp|fsdp( full_shard)?|zero[123])(\+({_OFFLOADS}))*",
    "precision": r"(amp_)?(bf16|fp16)( \(V100 has no bf16\))?|nf4|pure mixed precision",
    "act_ckpt": r"none|selective|full( \(reentrant\))?",
    "optimizer": r"adamw?(_torch(_fused)?)?",
    "mem_unit": r"g \(as printed\)|[mg]i?b( reserved)?",
    "mem_scope": r"per_gpu|sum_over_gpus",
}
"""Values that are fully given, and that the forecast reads."""
_UNITS = {"gib": 2**30, "gb": 1e9, "g": 1e9, "mib": 2**20, "mb": 1e6}


@dataclass(frozen=True)
class Point:
    """A forecast beside a published figure.

    Attributes:
        id: Number of the run.
        group: Source, method, strategy and world.
        is_given: Whether its settings are fully given.
        is_cache: Whether the figure includes the allocator's cache, which no forecast contains.
    """

    id: str
    group: str
    is_given: bool
    is_cache: bool
    forecast: float
    published: float

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.forecast / self.published - 1

    @property
    def is_in_band(self) -> bool:
        """Whether the printed band contains the published rate."""
        return BAND[0] <= self.published / self.forecast <= BAND[1]


def open_settings(row: Row, *, of_memory: bool) -> list[str]:
    """Return the reasons why a point's settings are not fully given.

    Memory depends on the program, too; a rate may be of any program.
    """
    names = ["strategy", "precision", "act_ckpt"]
    names += ["optimizer", "mem_unit", "mem_scope"] if of_memory else []
    reasons = [
        f"{name} {row[name] or 'is empty'}"
        for name in names
        if not re.fullmatch(_KNOWN[name], row[name], re.IGNORECASE)
    ]
    if not of_memory and ("inferred" in row["gpu"] or size_with(row["gpu"]) is None):
        reasons.append(f"gpu {row['gpu'] or 'is empty'}")
    stack = stack_of(row["source"], row["impl"])
    if of_memory and stack is None:
        reasons.append(f"program {row['impl'] or 'is empty'}")
    if "lora" in row["method"] and _rank(row, stack) is None:
        reasons.append("rank is empty")
    return reasons


def cannot_compute(row: Row) -> str | None:
    """Return the setting that prevents a forecast; None if a forecast is possible."""
    for name in _OF_PLAN:
        if not _is_positive(row[name]):
            return f"{name} {row[name] or 'is empty'}"
    if row["method"].split("+")[0] not in ("full", "lora", "qlora"):
        return f"method {row['method'] or 'is empty'}"
    if not re.match(r"single|ddp|fsdp|zero[123]", row["strategy"]):
        return f"strategy {row['strategy'] or 'is empty'}"
    if row["act_ckpt"].startswith("offloaded") or "nvme" in row["strategy"]:
        return "offload to host or disk is not computed"
    if row["grad_accum"] and not _is_positive(row["grad_accum"]):
        return f"grad_accum {row['grad_accum']}"
    base = base_of(row["model"])
    if base is None:
        return f"model {row['model']} is not listed"
    count = sum(math.prod(tensor.shape) for _, tensor in base.tensors()) / 1e9
    if not _is_positive(row["params_b"]):
        return f"params_b {row['params_b'] or 'is empty'}"
    if abs(count / float(row["params_b"]) - 1) > 0.05:  # learned positions are not in all shapes
        return f"params_b {row['params_b']} differs from the listed shape's {count:.2f}"
    try:
        config_of(row, Path())
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return f"the trainer refuses it: {lines[min(2, len(lines) - 1)]}"
    return None


def _rank(row: Row, stack: Stack | None) -> int | None:
    stated = re.search(r"r=(\d+)", row["notes"])
    if stated:
        return int(stated[1])
    return None if stack is None else stack.rank


def config_of(row: Row, folder: Path) -> TrainConfig:
    """Return the configuration of the trainer that is closest to a point."""
    stack = stack_of(row["source"], row["impl"]) or Stack()
    nodes, gpus, rows = int(row["nodes"]), int(row["gpus_per_node"]), int(row["micro_batch"])
    steps = row["grad_accum"]
    method: dict[str, Any] = {"type": row["method"].split("+")[0]}
    if method["type"] != "full":
        method["lora"] = {"r": _rank(row, stack) or 16, "target_modules": stack.targets}
    if method["type"] == "qlora":
        method["quantization"] = "nf4"
    return train_config(
        folder,
        world={"nnodes": nodes, "nproc_per_node": gpus, "device": "cuda"},
        data={"max_seq_len": int(row["seq_len"])},
        method=method,
        strategy=_strategy(row, stack, nodes * gpus),
        training={
            "global_batch_size": nodes * gpus * rows * (int(steps) if steps.isdecimal() else 1),
            "micro_batch_size": rows,
            "precision": "fp16" if row["precision"].startswith("fp16") else "bf16",
            "compile": "compile" in row["impl"],
            "fused_head": False,
        },
        output={"format": "merged" if method["type"] == "full" else "adapter"},
    )


def _strategy(row: Row, stack: Stack, ranks: int) -> dict[str, Any]:
    text, offload = row["strategy"], "none"
    kind = re.match(r"ddp|fsdp|zero[123]", text)
    strategy = kind[0] if kind else "ddp"
    if text == "single" and row["method"] == "full":
        strategy = stack.full_strategy
    if strategy == "fsdp" and ranks == 1:
        strategy = "ddp"
    if "cpu_offload" in text or "param_offload" in text:
        offload = "cpu"
    elif "optimizer_offload" in text:
        offload = "optimizer"
    recompute = re.match(r"full|selective", row["act_ckpt"])
    return {
        "type": strategy,
        "offload": offload,
        "activation_checkpointing": recompute[0] if recompute else "none",
    }


def shape_of(row: Row, config: TrainConfig) -> ModelShape:
    """Return the shape that a point trains; `lora+emb` also trains copies of both tables."""
    base = base_of(row["model"])
    assert base is not None, "cannot_compute names models without a shape"
    shape = with_method(base, config)
    if not row["method"].endswith("+emb"):
        return shape
    # `modules_to_save` of peft copies modules in their dtype, and keeps the frozen ones.
    table = Weight(shape.vocabulary * shape.hidden, 2, shape.vocabulary, is_trained=True)
    return replace(shape, others=(*shape.others, table, table), head_trained=True)


def memory_of(row: Row, shape: ModelShape, config: TrainConfig) -> float:
    """Return the forecast in the unit and scope of a point.

    Figures of the allocator, called reserved, include its cache and exclude the CUDA context, which
    others include.
    """
    unit = _UNITS.get(row["mem_unit"].lower().split(" ")[0], 1e9)
    stack = stack_of(row["source"], row["impl"]) or Stack()
    nbytes: float = _peak_of(stack, shape, config)
    if "reserved" in row["mem_unit"]:
        nbytes *= FSDP1_CACHE if config.strategy.type == "fsdp" else CACHE
    else:
        nbytes += reserve_bytes(config)
    if row["mem_scope"] == "sum_over_gpus":
        nbytes *= config.world.world_size
    return nbytes / unit


def _peak_of(stack: Stack, shape: ModelShape, config: TrainConfig) -> int:
    """Return the peak of a step with the tensors that only the other program allocates."""
    tokens = config.training.micro_batch_size * config.data.max_seq_len
    moments = dict(step_peak(shape, config).moments)
    recomputes = config.strategy.activation_checkpointing == "full"
    layers = [shape.kinds[kind] for kind in shape.order]
    inputs = [sum(p.inputs for p in layer.products if p.rank) for layer in layers]
    # A mask of one byte and a result of two, for each input of an adapter.
    dropout = 3 * tokens * (inputs[-1] if recomputes else sum(inputs)) * stack.has_dropout
    logits = 4 * tokens * shape.vocabulary * stack.holds_logits
    for name in moments:
        if "backward" in name:
            moments[name] += dropout + logits
    moments["head"] += logits + dropout * (not recomputes)
    if stack.bucket is not None and config.strategy.type == "zero2":
        ranks = config.world.world_size
        moments.pop("gradients are reduced")
        moments["first layer's backward"] += 3 * 2 * stack.bucket
        moments["optimizer"] += shape.sum_weights(lambda w: w.is_trained * w.count) * 4 // ranks
    if config.strategy.type in ("ddp", "fsdp"):  # torch's AdamW copies all trained parameters
        shards = config.world.world_size if config.strategy.type == "fsdp" else 1
        moments["optimizer"] += shape.sum_weights(
            lambda weight: weight.is_trained * weight.nbytes // shards
        )
    return max(moments.values())


def compare(rows: list[Row], folder: Path) -> tuple[list[Point], list[Point]]:
    """Return the points of memory, and of rates per GPU."""
    memory, rates = list[Point](), list[Point]()
    for row in rows:
        if cannot_compute(row):
            continue
        config = config_of(row, folder)
        shape = shape_of(row, config)
        published, size = row["tokens_per_s_per_gpu"], size_with(row["gpu"])
        if _is_positive(row["peak_mem"]):
            forecast = memory_of(row, shape, config)
            memory.append(_point(row, forecast, row["peak_mem"], of_memory=True))
        if _is_positive(published) and size and (rate := tokens_per_second(shape, config, size)):
            each = rate / config.world.world_size
            rates.append(_point(row, each, published, of_memory=False))
    return memory, rates


def _point(row: Row, forecast: float, published: str, *, of_memory: bool) -> Point:
    source = re.split(r"[ ,]", row["source"])[0]
    world = f"{row['nodes']}x{row['gpus_per_node']}"
    return Point(
        id=row["id"],
        group=f"{source} {row['method']} {row['strategy']} {world}",
        is_given=not open_settings(row, of_memory=of_memory),
        is_cache=of_memory and "reserved" in row["mem_unit"],
        forecast=forecast,
        published=float(published),
    )


def _is_positive(text: str) -> bool:
    return bool(re.fullmatch(r"\d+(\.\d+)?", text)) and float(text) > 0


def list_settings(rows: list[Row]) -> Iterator[str]:
    """Yield which points are fully given, and why the others are not."""
    for name, of_memory in (("memory", True), ("rates", False)):
        reasons = {
            row["id"]: cannot_compute(row) or "; ".join(open_settings(row, of_memory=of_memory))
            for row in rows
            if _is_positive(row["peak_mem" if of_memory else "tokens_per_s_per_gpu"])
        }
        given = [point for point, reason in reasons.items() if not reason]
        yield f"{name}: settings fully given in {len(given)} of {len(reasons)}: {' '.join(given)}"
        for reason in dict.fromkeys(filter(None, reasons.values())):
            yield f"  not: {reason}: {' '.join(p for p in reasons if reasons[p] == reason)}"


def table(points: list[Point], title: str, *, has_band: bool) -> Iterator[str]:
    """Yield the errors of each group, of all points, and of points that are fully given."""
    yield f"\n{title:<64}  n   mean    p90   lowest  highest{'  in band' * has_band}"
    groups = dict.fromkeys((point.is_given, point.group) for point in points)
    lines = {
        f"{'' if is_given else '(not given) '}{group}": [
            point for point in points if (point.is_given, point.group) == (is_given, group)
        ]
        for is_given, group in sorted(groups, key=lambda one: (not one[0], one[1]))
    }
    given = [point for point in points if point.is_given]
    lines["ALL POINTS"] = points
    if not has_band:
        lines["FULLY GIVEN, reserved by the allocator"] = [p for p in given if p.is_cache]
        lines["FULLY GIVEN, used on the device"] = [p for p in given if not p.is_cache]
    lines["FULLY GIVEN"] = given
    for name, chosen in lines.items():
        if chosen:
            yield f"{name[:64]:<64} {_errors(chosen)}{_in_band(chosen) * has_band}"


def _errors(points: list[Point]) -> str:
    errors = [point.error for point in points]
    sizes = sorted(map(abs, errors))
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    mean = statistics.mean(sizes)
    return f"{len(points):>3} {mean:>6.1%} {p90:>6.1%} {min(errors):>+8.1%} {max(errors):>+8.1%}"


def _in_band(points: list[Point]) -> str:
    return f" {sum(point.is_in_band for point in points) / len(points):>8.0%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison of the file that the command line names."""
    parser = argparse.ArgumentParser(description="Compare the planner with published points.")
    parser.add_argument("file", type=Path, help="CSV file with one run per row")
    parser.add_argument("--record", action="store_true", help="write the errors into the guide")
    options = parser.parse_args(arguments)
    with options.file.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, restval=""))
    if rows and (missing := [name for name in COLUMNS if name not in rows[0]]):
        parser.error(f"{options.file}: no column {', '.join(missing)}")
    print(*list_settings(rows), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        memory, rates = compare(rows, Path(folder))
    print(*table(memory, "memory", has_band=False), sep="\n")
    print(*table(rates, "tokens per second", has_band=True), sep="\n")
    if options.record:
        for name, points in (("published", memory), ("rates", rates)):
            record(name, [point.error for point in points if point.is_given])


if __name__ == "__main__":
    main()
