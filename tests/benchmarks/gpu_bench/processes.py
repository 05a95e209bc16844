"""Measures one row in processes of its own, and says what came of it, an out-of-memory included."""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_bench.rows import FLOPS_PER_PARAMETER, PEAK_FLOPS, STEPS, Row, config_of
from gpu_bench.shapes import number_of_parameters, text_rows

from finetune_trainer.config import FailureClass, Termination

HERE = Path(__file__).parents[1]
Result = dict[str, Any]
_NO_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "can't allocate memory")


@dataclass(frozen=True)
class Bench:
    """Where and how rows are measured.

    Attributes:
        device: `cuda` or `cpu`.
        is_tiny: Models of two small layers, and rows of a 32nd of the tokens.
        work: Folder of models, and of what the rows leave behind until they are measured.
    """

    device: str
    is_tiny: bool
    work: Path

    def model(self, row: Row, deadline: float) -> Path:
        """Return the folder of the row's model, which is made once."""
        shape = "tiny" if self.is_tiny else row.shape
        folder = self.work / shape
        if not folder.exists():
            arguments = ("gpu_bench.shapes", str(folder), shape, self.device)
            code, said = run_process(("-m", *arguments), self.work / f"{shape}.log", deadline)
            if code:
                raise RowError(f"the model could not be made: {_last_line(said)}")
        return folder

    def tokens(self, row: Row) -> int:
        """Return how many tokens a row of text has."""
        return row.tokens // 32 if self.is_tiny else row.tokens


class RowError(Exception):
    """A row could not be measured; the text says why."""


class RowOutOfMemoryError(RowError):
    """The device has too little memory for the row."""


class RowOutOfTimeError(RowError):
    """The row had not ended when its time was over."""


def measure(row: Row, bench: Bench, *, seconds: float) -> Result:
    """Return the figures of a row, or `{"said": why there are none}`; it never raises for a row.

    Its processes are ended after `seconds`.
    """
    deadline, folder = time.monotonic() + seconds, bench.work / row.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    work = {"gemm": _gemm, "peer": _peer, "saving": _saving}.get(row.kind, _ours)
    try:
        result = work(row, bench, folder, deadline)
    except RowOutOfMemoryError as error:
        result = {"said": f"out of memory: {error}", "is_out_of_memory": True}
    except RowError as error:
        is_late = isinstance(error, RowOutOfTimeError)
        result = {"said": str(error), **({"is_out_of_time": True} if is_late else {})}
    shutil.rmtree(folder, ignore_errors=True)
    return {**result, "wall_seconds": round(time.monotonic() - began, 1)}


def run_process(
    arguments: Sequence[str], log: Path, deadline: float, *, is_read: bool = False
) -> tuple[int, str]:
    """Run Python with `arguments`; return its exit code and what it said (with `is_read`, apart).

    Raises:
        RowOutOfTimeError: it had not ended by `deadline`; it and its children are ended.
    """
    paths = [str(HERE), str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE if is_read else said,
            stderr=said,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RowOutOfTimeError("it had not ended when its time was over") from None
    return process.returncode, out or log.read_text(errors="replace")


def _gemm(row: Row, bench: Bench, folder: Path, deadline: float) -> Result:
    size = "256" if bench.is_tiny else "8192"
    arguments = ("-m", "gpu_bench.gemm", bench.device, size)
    found: Result = _answer(arguments, folder, deadline)
    return found


def _saving(row: Row, bench: Bench, folder: Path, deadline: float) -> Result:
    mib, rounds = ("24", "3") if bench.is_tiny else ("6144", "5")
    arguments = (str(HERE / "saving.py"), str(folder), mib, rounds, bench.device)
    ratios = _answer(arguments, folder, deadline)
    return {"blocking_ratio": statistics.median(ratios), "mib": int(mib)}


def _answer(arguments: Sequence[str], folder: Path, deadline: float) -> Any:
    """Return what the last line says that a program prints, as JSON."""
    code, said = run_process(arguments, folder / "log.txt", deadline, is_read=True)
    if code:
        _fail((folder / "log.txt").read_text(errors="replace"))
    return json.loads(said.splitlines()[-1])


def _ours(row: Row, bench: Bench, folder: Path, deadline: float) -> Result:
    model, tokens = bench.model(row, deadline), bench.tokens(row)
    rows = _rows(folder, tokens)
    sized = replace(row, tokens=tokens)
    config = config_of(sized, bench.device, model=str(model), rows=str(rows), folder=str(folder))
    path = folder / "config.json"
    path.write_text(config.to_json())
    entry = "idle" if row.kind == "idle" else "measure"
    script = str(HERE / "gpu_bench" / "start.py")
    code, said = run_process((script, str(path), entry), folder / "log.txt", deadline)
    if code:
        _fail(said, Path(config.termination_path))
    measured = json.loads((folder / "run" / "measured.json").read_text())
    (path,) = folder.glob("run/logs/*/rank-0.jsonl")
    journal = [json.loads(line) for line in path.read_text().splitlines()]
    warnings = [one["message"] for one in journal if one["event"] == "warning"]
    return {**figures_of(row, model, tokens, measured), "warnings": warnings}


def _peer(row: Row, bench: Bench, folder: Path, deadline: float) -> Result:
    model, tokens = bench.model(row, deadline), bench.tokens(row)
    rows, out = _rows(folder, tokens), folder / "peer.json"
    arguments = (str(model), str(rows), bench.device, str(tokens), str(STEPS), str(out))
    log = folder / "log.txt"
    code, said = run_process(("-m", "gpu_bench.peer", *arguments), log, deadline)
    if code:
        _fail(said)
    measured = json.loads(out.read_text())
    return {**figures_of(row, model, tokens, measured), "system": measured["system"]}


def _rows(folder: Path, tokens: int) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text_rows(STEPS, tokens))
    return path


def figures_of(row: Row, model: Path, tokens: int, measured: Result) -> Result:
    """Return a row's figures: MFU is F N tokens/s over the data sheet's peak."""
    median = statistics.median(measured["step_seconds"])
    speed = tokens / median
    flops = FLOPS_PER_PARAMETER[row.method] * number_of_parameters(model) * speed
    figures: Result = {
        "step_seconds": median,
        "step_seconds_least": min(measured["step_seconds"]),
        "step_seconds_most": max(measured["step_seconds"]),
        "tokens_per_second": speed,
        "flops_per_second": flops,
        "mfu": flops / PEAK_FLOPS,
    }
    at_start, at_end = measured.get("at_start", {}), measured.get("at_end", {})
    for name, key, values in (
        ("peak_gib", "peak_allocated_bytes", at_end),
        ("reserved_gib", "peak_reserved_bytes", at_end),
        ("loaded_gib", "allocated_bytes", at_start),
        ("outside_allocator_gib", "outside_allocator_bytes", at_end),
        ("host_peak_gib", "host_peak_bytes", at_end),
        ("formula_gib", "formula_bytes", measured),
    ):
        if key in values:
            figures[name] = values[key] / 2**30
    return figures | {key: measured[key] for key in ("idle_share",) if key in measured}


def _fail(said: str, termination: Path | None = None) -> None:
    """Raise what a process that failed has to say."""
    words = Termination.read(termination) if termination and termination.exists() else None
    message = words.message if words else _last_line(said)
    is_full = words is not None and words.failure_class is FailureClass.OUT_OF_MEMORY
    kind = RowOutOfMemoryError if is_full or any(x in said for x in _NO_MEMORY) else RowError
    raise kind(message[:300])


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
