"""Measure the trainer on one GPU: each row of `gpu_bench/rows.py` in processes of its own.

Called by `make bench-gpu`. After each row docs/benchmarks/gpu.json and gpu.md are written; begun
again with the same card, commit and packages, it goes on where it was, and tries again what
failed. A row that runs out of memory is noted as such, and the next one begins. Rounds go over all
rows, so that rows that are compared are measured in turn.

With --device cpu or --shape tiny the same rows run with tiny models, which shows that they run and
no more: what is written then goes to build/bench-gpu, never among the published pages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_bench.processes import Bench, Result, measure, run_process
from gpu_bench.rows import ROWS, Row
from gpu_page import page
from measured import FOLDER, ROOT, commit

_LEFT_OUT = "left out"
QUICK = ("gemm", "lora-8b", "qlora-8b", "full-1b", "saving")
UNPUBLISHED = ROOT / "build" / "bench-gpu"


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Measure what is missing; return 1 where a row failed that did not run out of memory."""
    options = _options(arguments, rows)
    out = _out(options)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(options.device, is_tiny=_is_tiny(options), work=work)
        card = _card(bench)
        card |= {"commit": options.commit or _commit(), "notes": options.note}
        results = _Results(out, card, is_tiny=bench.is_tiny, again=options.again)
        _measure_all(rows, bench, results, options)
    failed = [row.name for row in rows if results.has_failed(row)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _measure_all(
    rows: Sequence[Row], bench: Bench, results: "_Results", options: argparse.Namespace
) -> None:
    end = time.monotonic() + options.seconds
    wanted = [row for row in rows if not options.rows or row.name in options.rows]
    for number in range(options.rounds or (1 if bench.is_tiny else 3)):
        for row in wanted:
            if results.count(row) > number:
                continue
            left = end - time.monotonic()
            if left < options.least_seconds:
                print(f"no time left for {row.name}; the same command goes on with it", flush=True)
                return
            why = results.why_not(row)
            limit = min(left, options.row_seconds)
            result = {"said": why} if why else measure(row, bench, seconds=limit)
            if result.get("is_out_of_time") and limit == left:
                continue  # of the whole, not of this row: it is begun anew next time
            results.add(row, result)
            print(f"{row.name}: {json.dumps(result)}", flush=True)


class _Results:
    """gpu.json and gpu.md, written after each row.

    Of a row that was measured before with another commit or other packages, the figures stay until
    the first new one.
    """

    def __init__(self, folder: Path, card: dict[str, Any], *, is_tiny: bool, again: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._page = folder / "gpu.json", folder / "gpu.md"
        text = self._json.read_text() if self._json.exists() else "{}"
        self._measured = {"is_tiny": is_tiny, "cards": {}} | json.loads(text)
        if self._measured["is_tiny"] != is_tiny:
            raise SystemExit(f"{self._json} has tiny and whole models; name another --out")
        rows = self._measured["cards"].get(card["name"], {}).get("rows", {})
        self._card = {**card, "rows": rows}
        self._made_with = made_with(card)
        self._again = again
        self._begun = set[str]()  # of those that are measured anew

    def count(self, row: Row) -> int:
        """Return how often the row was measured, an out-of-memory included, a failure not."""
        return sum(not _has_failed(one) for one in self._found(row))

    def add(self, row: Row, result: Result) -> None:
        """Write what came of a row."""
        kept = [one for one in self._found(row) if not _has_failed(one)]
        found = [*kept, {**result, "made_with": self._made_with}]
        self._begun.add(row.name)
        self._card["rows"][row.name] = found
        self._measured["cards"][self._card["name"]] = self._card
        self._json.write_text(json.dumps(self._measured, indent=2) + "\n")
        self._page.write_text(page(self._measured))

    def _found(self, row: Row) -> list[Result]:
        if self._again and row.name not in self._begun:
            return []
        found = self._card["rows"].get(row.name, [])
        return [one for one in found if one["made_with"] == self._made_with]

    def why_not(self, row: Row) -> str | None:
        """Say why a row is left out on this machine, if it is."""
        if row.needs is None:
            return None
        if self._card["name"] == "CPU":
            return f"{_LEFT_OUT}: {row.needs} needs a GPU"
        is_there = row.needs in self._card["versions"]
        return None if is_there else f"{_LEFT_OUT}: {row.needs} is not installed"

    def has_failed(self, row: Row) -> bool:
        """Say whether a row has neither figures nor a reason that lies in the machine."""
        return any(map(_has_failed, self._found(row)))


def _has_failed(result: Result) -> bool:
    is_told = "said" in result and not result["said"].startswith(_LEFT_OUT)
    return is_told and not result.get("is_out_of_memory")


def made_with(card: dict[str, Any]) -> str:
    """Return what two results must have in common to be compared."""
    versions = ", ".join(f"{name} {number}" for name, number in card["versions"].items())
    return f"commit {card['commit'][:12]}; {versions}"


def _card(bench: Bench) -> dict[str, Any]:
    log = bench.work / "card.log"
    arguments = ("-m", "gpu_bench.card", bench.device)
    code, said = run_process(arguments, log, time.monotonic() + 120, is_read=True)
    if code:
        raise SystemExit(f"there is no {bench.device} here: {log.read_text().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _commit() -> str:
    try:
        return commit()
    except (FileNotFoundError, subprocess.CalledProcessError):  # a copy without its history
        return "unknown"


def _is_tiny(options: argparse.Namespace) -> bool:
    return bool(options.device == "cpu" or options.shape == "tiny")


def _out(options: argparse.Namespace) -> Path:
    if not _is_tiny(options):
        return Path(options.out or FOLDER)
    out = Path(options.out or UNPUBLISHED)
    if out.resolve() == FOLDER.resolve():
        raise SystemExit(f"--out {out} holds figures of GPUs; tiny models write elsewhere")
    return out


def _options(arguments: Sequence[str] | None, rows: Sequence[Row]) -> argparse.Namespace:
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("whole", "tiny"), default="whole")
    names = [row.name for row in rows]
    parser.add_argument("--rows", nargs="*", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help=f"10 min: {', '.join(QUICK)}")
    parser.add_argument("--rounds", type=int, help="how often each row: 3; 1 where tiny")
    parser.add_argument("--seconds", type=float, default=1e9, help="end within so many, in all")
    parser.add_argument("--row-seconds", type=float, default=900, help="of one row")
    parser.add_argument("--least-seconds", type=float, default=30, help="to begin a row with")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--out", type=Path, help="docs/benchmarks; build/bench-gpu where tiny")
    parser.add_argument("--work", type=Path, help="keep models here; 8B takes 16 GB")
    parser.add_argument("--commit", help="of a copy of the tree that has no history")
    parser.add_argument("--note", action="append", default=[], help="told beside the figures")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rows = options.rows or [row.name for row in rows if row.name in QUICK]
        options.rounds = options.rounds or 1
        options.seconds = min(options.seconds, 560)
    return options


if __name__ == "__main__":
    sys.exit(main())
