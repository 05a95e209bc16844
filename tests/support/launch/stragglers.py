"""Faulty ranks, and 20 runs of clean ones: who is named, and after how long (`make stragglers`).

Several runs at a time, as their compute is a sleep. Exits with 1 where somebody is named wrongly,
or too late.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from support.launch.faulty_ranks import FAULTS, FaultyRanks

CLEAN_RUNS = 20
_AT_ONCE = 5
_CLEAN_SECONDS = 60.0
_LIMITS = {"slower": 30.0, **dict.fromkeys(FAULTS, 60.0)}
_STEPS_BEFORE = 20


def main() -> None:
    """Run all of it and print a line each."""
    with TemporaryDirectory() as folder:
        wrong = [*_faulty(Path(folder)), *_clean(Path(folder))]
    sys.exit(1 if any(wrong) else 0)


def _faulty(folder: Path) -> list[bool]:
    return [
        _is_wrong(folder / f"{fault}-{num_ranks}".replace(" ", "-"), num_ranks, fault)
        for fault in _LIMITS
        for num_ranks in (4, 2)
    ]


def _is_wrong(folder: Path, num_ranks: int, fault: str) -> bool:
    """Print who is named in one run, and return whether that is wrong."""
    ranks = FaultyRanks(folder, num_ranks, fault, 1, FAULT_STEP=str(_STEPS_BEFORE))
    try:
        ranks.wait_for_step(1 if fault == "slower" else _STEPS_BEFORE - 10)
        began = time.monotonic()
        found = ranks.wait_for_suspect(120)
        seconds = time.monotonic() - began
    finally:
        ranks.close()
    print(
        f"{num_ranks} ranks, rank 1 {fault}: rank {found.rank} named after {seconds:.1f} s, cause "
        f"{found.cause}, score {found.score}, process {found.process}",
        flush=True,
    )
    return found.rank != 1 or seconds > _LIMITS[fault]


def _clean(folder: Path) -> list[bool]:
    named = []
    for first in range(0, CLEAN_RUNS, _AT_ONCE):
        with ExitStack() as stack:
            runs = [
                FaultyRanks(folder / f"clean-{first + one}", 4, "none", 1)
                for one in range(_AT_ONCE)
            ]
            for run in runs:
                stack.callback(run.close)
            for run in runs:
                run.wait_for_step(1)
            until = time.monotonic() + _CLEAN_SECONDS
            found = set[int]()
            while time.monotonic() < until:
                time.sleep(1)
                found |= {number for number, run in enumerate(runs) if run.progress().suspects}
        named += [number in found for number in range(_AT_ONCE)]
    print(f"{CLEAN_RUNS} clean runs of {_CLEAN_SECONDS:g} s: somebody named in {sum(named)}")
    return named


if __name__ == "__main__":
    main()
