"""Which files of the operator run for one job: how many a reader must open to follow it.

    PYTHONPATH=tests python tests/benchmarks/files_on_the_way.py [--names]

A 2-node `kubernetes` job lives in memory: from its apply until it is Running, then from a lost pod
until the next attempt is created. Counted are the files with a function that runs while the job is
reconciled; what only runs at import is not.
"""

import argparse
import asyncio
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import finetune_operator
from finetune_trainer.config import Phase, Progress
from support.cluster.played_pods import ProgressServer
from support.kernel.kernel_world import KEY
from support.kubernetes.kubernetes_world import ADDRESS, KubernetesWorld

PACKAGE = Path(finetune_operator.__file__).parent
CORE = ("kernel", "reconcile")
_MOST_LOOKS = 1000
_PAUSE_SECONDS = 0.01  # in which rank 0's progress is read


class Files:
    """Files of the operator whose functions have run."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note each function that runs in this block."""

        def note(frame: FrameType, event: str, arg: object) -> None:
            self._codes.add(frame.f_code)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def names(self) -> list[str]:
        """Return the files by their paths in the package; bodies of modules are no functions."""
        functions = (one for one in self._codes if one.co_flags & inspect.CO_OPTIMIZED)
        paths = {Path(one.co_filename) for one in functions}
        return sorted(str(one.relative_to(PACKAGE)) for one in paths if PACKAGE in one.parents)


async def live() -> dict[str, Files]:
    """Let the job live; return the files of each part of its life."""
    started, restarted = Files(), Files()
    async with ProgressServer(Progress()).serving(ADDRESS) as said:
        world = KubernetesWorld(said.port)
        await world.apply()
        await _reconcile_until(world, started, attempt=1)
        await world.make_pods(1)
        await world.run_pods(1, 0, 1)
        said.progress = Progress(phase=Phase.TRAINING, step=1, total_steps=10)
        await _reconcile_until(world, started, phase="Running")
        await world.end_pods(1, 1, code=137)
        await _reconcile_until(world, restarted, phase="Restarting")
        await world.conclude(1, "Failed")
        await _reconcile_until(world, restarted, attempt=2)
    return {"from apply to Running": started, "from a lost pod to the next attempt": restarted}


async def _reconcile_until(world: KubernetesWorld, files: Files, **wanted: Any) -> None:
    """Reconcile the job until its newest attempt is created, or its phase is the wanted one."""
    for _ in range(_MOST_LOOKS):
        await world.catch_up()
        with files.noting():
            await world.reconciler.reconcile(KEY)
        phase = world.job.get("status", {}).get("phase")
        seen = {"attempt": len(world.attempts), "phase": phase}
        if wanted.items() <= seen.items():
            return
        await asyncio.sleep(_PAUSE_SECONDS)
    raise AssertionError(f"the job does not come to {wanted}; it is {seen}")


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="print the files, too")
    arguments = parser.parse_args()
    asyncio.run(live())  # what is imported on first use is imported by now
    for part, files in asyncio.run(live()).items():
        names = files.names()
        core = [one for one in names if one.split("/")[0] in CORE]
        print(f"{part}: {len(core)} of {' and '.join(CORE)}, {len(names)} of all")
        if arguments.names:
            print(*(f"    {one}" for one in core), sep="\n")
            print(*(f"        {one}" for one in names if one not in core), sep="\n")


if __name__ == "__main__":
    main()
