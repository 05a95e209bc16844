"""Freeze attempts, start the next attempt beside each, and wake them: no run may notice.

`make failover-series N=200 SEED=7` runs it; with `CASE=12` it repeats one case. All processes of an
attempt of two ranks are stopped (SIGSTOP) at a failpoint, while a file of the hub is on the way, or
at a random moment. The next attempt starts on the same folders: of a disk, or of a FUSE layer with
late listings that the next attempt sees through another mount. The frozen attempt is woken
(SIGCONT) while the next attempt trains, or after its end. `failover_judge` compares the result with
an undisturbed run.
"""

import argparse
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeVar

from finetune_trainer.config import ExitCode, Phase
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE, POINTS
from support.checkpoint.lagging_layer import LaggingLayer, lagging_layer
from support.data.hub_server import HubServer, hub_of
from support.launch.failover_judge import KINDS, Job, Wrong, judge, judge_woken, newest_progress
from support.launch.series_runs import SAVE_EVERY, draw_point, series_config
from support.launch.tiny_run import write_inputs
from support.launch.whole_attempts import Attempt, Start, start_main

MODEL, ROWS = "org/tiny", "org/rows"
HELD = (f"{MODEL}/model.safetensors", f"{ROWS}/train.jsonl")
MOMENT = "moment"
MOMENTS_IN_A_ROUND = 6
LAG_SECONDS = 0.1
LEAVE_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
SLACK_SECONDS = 5.0
END_SECONDS = 120.0  # after the patience, for an attempt that has not ended by itself
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """Where an attempt is frozen, and when it is woken.

    Attributes:
        number: Number of the case in its series.
        layer: "disk", or "fuse" for the mounts with late listings.
        place: A failpoint with step and rank, a file of the hub, or `MOMENT`.
        share: Of `MOMENT`: share of the time of the undisturbed run, from its start or, if
            `in_training`, from its first step.
        wakes_in_training: Wake it when the next attempt trains, or else after its end.
    """

    number: int
    layer: str
    strategy: str
    place: str
    share: float = 0.0
    in_training: bool = False
    wakes_in_training: bool = False

    def __str__(self) -> str:
        place = self.place
        if place == MOMENT:
            place = f"{self.share:.0%} of {'training' if self.in_training else 'the run'}"
        woken = "in training" if self.wakes_in_training else "after the end"
        return f"{self.layer}, {self.strategy}, frozen at {place}, woken {woken}"


def draw_cases(seed: int) -> Iterator[Case]:
    """Draw cases without end; each round has every failpoint, every file and some moments."""
    rng = random.Random(seed)
    places = _rounds(rng, [*POINTS, *HELD, *[MOMENT] * MOMENTS_IN_A_ROUND])
    settings = _rounds(rng, list(product(("disk", "fuse"), ("ddp", "fsdp"), (True, False))))
    for number, place in enumerate(places, 1):
        layer, strategy, wakes_in_training = next(settings)
        point = draw_point(rng, place) if place in POINTS else place
        share, in_training = rng.random(), rng.random() < 0.6
        yield Case(number, layer, strategy, point, share, in_training, wakes_in_training)


def _rounds(rng: random.Random, values: Sequence[T]) -> Iterator[T]:
    while True:
        yield from rng.sample(values, len(values))


@contextmanager
def two_mounts(folder: Path, seed: int = 0) -> Iterator[LaggingLayer]:
    """Mount a layer twice; new files are unknown to the other mount for a while."""
    # The export renames files, which BlobFuse does by copying them.
    with lagging_layer(
        folder, lag_seconds=LAG_SECONDS, seed=seed, num_nodes=2, lookup_lag=True, blobfuse=True
    ) as layer:
        yield layer


@dataclass(frozen=True)
class Result:
    """Outcome of a case.

    Attributes:
        left_seconds: From the wake until the frozen attempt was gone.
        wait_seconds: Longest time between two lines in the journal of the next attempt.
    """

    case: Case
    wrong: list[Wrong]
    left_seconds: float
    wait_seconds: float


class Series:
    """Cases of one tiny job, each in a folder of its own below `root`.

    Args:
        root: A folder on a disk.
        layer: A layer with two mounts.
        hub: A hub for `MODEL` and `ROWS`; None for cases without a download.
        start: Starts an attempt.
        patience_seconds: How long the product waits for a lock.
    """

    def __init__(
        self,
        root: Path,
        layer: LaggingLayer,
        hub: HubServer | None = None,
        *,
        start: Start = start_main,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.root, self.layer, self.hub, self.start = root, layer, hub, start
        self.patience_seconds = patience_seconds
        self.inputs = write_inputs(root / "inputs")
        self._undisturbed: dict[str, tuple[Job, float]] = {}
        if hub is not None:
            shutil.copytree(self.inputs / "model", hub.folder / "models" / MODEL)
            (hub.folder / "datasets" / ROWS).mkdir(parents=True)
            shutil.copy(self.inputs / "train.jsonl", hub.folder / "datasets" / ROWS)

    def undisturbed(self, strategy: str) -> tuple[Job, float]:
        """Return a run alone, and the seconds that it took."""
        if strategy not in self._undisturbed:
            life = _Life(self, Case(0, "disk", strategy, "none"), f"undisturbed-{strategy}")
            began = time.monotonic()
            attempt = life.begin()
            life.until(lambda: attempt.is_gone, 2 * END_SECONDS)
            assert attempt.code() == 0, f"the undisturbed run failed: {life.folder}"
            self._undisturbed[strategy] = life.job(), time.monotonic() - began
        return self._undisturbed[strategy]

    def run(self, case: Case) -> Result:
        """Run a case; the folder of a right case is deleted."""
        job, seconds = self.undisturbed(case.strategy)
        share, result = case.share, None
        while result is None:  # the attempt had ended before its moment
            life = _Life(self, replace(case, share=share), f"case-{case.number}-{share:.3f}")
            try:
                result = life.result(job, seconds)
            finally:
                for attempt in life.attempts:
                    attempt.kill()
            share /= 2
        if not result.wrong:
            shutil.rmtree(life.folder)
            shutil.rmtree(life.place, ignore_errors=True)
        return result


class _Life:
    """A job from its first attempt to its last.

    Attributes:
        place: The folder behind the mounts.
    """

    def __init__(self, series: Series, case: Case, name: str) -> None:
        self.series, self.case = series, case
        self.folder = series.root / name
        self.folder.mkdir()
        layer = series.layer
        on_disk = (self.folder, self.folder, self.folder)
        mounts = (*layer.nodes, layer.backing) if case.layer == "fuse" else on_disk
        *self._seen, self.place = (mount / name for mount in mounts)
        self._seen[0].mkdir()
        self.attempts: list[Attempt] = []
        self.wrong: list[Wrong] = []
        self._newest = 0

    def result(self, undisturbed: Job, seconds: float) -> Result | None:
        """Freeze, start the next attempt, wake, and judge; None if there was no time to freeze."""
        frozen = self._freeze(undisturbed, seconds)
        if frozen is None:
            return None
        had_exported = bool(self.job().of(len(self.attempts), "exported"))
        patience = self.series.patience_seconds
        last, number = self.begin(mount=1), len(self.attempts)
        if self.case.wakes_in_training:
            self.until(lambda: last.is_gone or self._trains(number), patience + END_SECONDS)
            self.until(lambda: last.is_gone, self.case.share)
        elif not self.until(lambda: last.is_gone, patience + END_SECONDS):
            self.wrong.append(("wait", f"attempt {number} waited until the other was woken"))
        woken = time.monotonic()
        frozen.wake()
        self.until(lambda: frozen.is_gone, END_SECONDS)
        left_seconds = time.monotonic() - woken
        self.until(lambda: last.is_gone, patience + END_SECONDS)
        job = self.job()
        if not (had_exported and frozen.code() == ExitCode.DONE):
            self.wrong += judge_woken(frozen.code(), frozen.termination)
        self.wrong += judge(job, last.code(), number, undisturbed.outcome)
        wait = job.silence(number)
        if wait > patience + SLACK_SECONDS:
            self.wrong.append(("wait", f"attempt {number} waited for {wait:.1f} s"))
        return Result(self.case, self.wrong, left_seconds, wait)

    def _freeze(self, undisturbed: Job, seconds: float) -> Attempt | None:
        """Start an attempt and stop it at the place of the case; None if it was too fast."""
        case, hub, marks = self.case, self.series.hub, self.folder / "marks"
        if case.place.startswith("restoring"):  # after an attempt that has saved and was killed
            kill = f"after-optimizer@{2 * SAVE_EVERY + 1}:rank=0"
            killed = self.begin({ENV_FAILPOINT: kill})
            self.until(lambda: killed.is_gone, END_SECONDS)
        if case.place == MOMENT:
            attempt = self.begin()
            if case.in_training:
                seconds = undisturbed.entries[-1]["time"] - undisturbed.phases(1)[Phase.TRAINING]
                self.until(lambda: attempt.is_gone or self._trains(1), END_SECONDS)
            self.until(lambda: attempt.is_gone, case.share * seconds)
            attempt.freeze()
            return None if attempt.is_gone or Phase.DONE in self.job().phases(1) else attempt
        if case.place in HELD:
            assert hub is not None, "the case needs a hub"
            hub.hold(case.place)
            attempt = self.begin()
            self.until(lambda: attempt.is_gone or hub.is_requested.is_set(), END_SECONDS)
            attempt.freeze()
            hub.is_released.set()
        else:
            point = f"{case.place}:SIGSTOP"
            attempt = self.begin({ENV_FAILPOINT: point, ENV_FAILPOINT_ONCE: str(marks)})
            self.until(lambda: attempt.is_gone or (marks / point).exists(), END_SECONDS)
            self.until(lambda: attempt.is_gone or attempt.is_stopped(), END_SECONDS)
            attempt.freeze()
        if attempt.is_gone:
            self.wrong.append(("end", f"the attempt ended before {case.place}"))
        return attempt

    def begin(self, environ: Mapping[str, str] | None = None, *, mount: int = 0) -> Attempt:
        """Start the next attempt, which sees the folders through a mount."""
        case, hub, place = self.case, self.series.hub, self._seen[mount]
        number = len(self.attempts) + 1
        own = self.folder / f"attempt-{number}"
        own.mkdir()
        given = dict(environ or {})
        changes: dict[str, Any] = {"data": {"cache_dir": str(self.folder / "cache")}}
        if case.place in HELD and hub is not None:
            changes["data"]["train"] = {"path": ROWS, "is_hub": True}
            changes["model"] = {"path": MODEL}
            given |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
            given |= {"HF_HOME": str(self.folder / "huggingface")}
        config = series_config(
            own,
            self.series.inputs,
            case.strategy,
            job={"attempt": number},
            checkpoint={"dir": str(place / "checkpoints"), "is_continued": number > 1},
            output={"dir": str(place / "output")},
            run_dir=str(place / "run"),
            listing_lag_seconds=LAG_SECONDS if case.layer == "fuse" else 0.0,
            **changes,
        )
        self.attempts.append(self.series.start(config, given))
        return self.attempts[-1]

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition; record a progress.json that returns to an earlier attempt."""
        end = time.monotonic() + seconds
        while not (is_met := condition()) and time.monotonic() < end:
            newest = newest_progress(self.place) or self._newest
            if newest < self._newest:
                self.wrong.append(("progress", f"of attempt {newest} after {self._newest}"))
            self._newest = newest
            time.sleep(0.02)
        return is_met

    def job(self) -> Job:
        """Read the files of the job."""
        return Job.read(self.place)

    def _trains(self, number: int) -> bool:
        return Phase.TRAINING in self.job().phases(number)


def print_totals(results: Sequence[Result]) -> int:
    """Print the figures of a series; return how many cases were right."""
    left = sorted(one.left_seconds for one in results)
    p99 = left[math.ceil(0.99 * len(left)) - 1]
    for one in results:
        if one.left_seconds > LEAVE_SECONDS < p99:
            one.wrong.append(("late", f"gone {one.left_seconds:.1f} s after the wake"))
    print(
        f"woken attempts gone after {statistics.median(left):.1f} s (median), {p99:.1f} s (p99), "
        f"{left[-1]:.1f} s (most); longest wait {max(one.wait_seconds for one in results):.1f} s"
    )
    wrong = Counter(kind for one in results for kind in {kind for kind, _ in one.wrong})
    for kind, sentence in KINDS.items():
        print(f"{len(results) - wrong[kind]} of {len(results)}: {sentence}")
    return sum(not one.wrong for one in results)


def main() -> int:
    """Run the series and return the exit code: 1 if any case was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="how many cases")
    parser.add_argument("seed", type=int)
    parser.add_argument("--case", type=int, help="number of the only case to run")
    parser.add_argument("--first", type=int, default=1, help="number of the first case to run")
    options = parser.parse_args()
    seed, count = options.seed, options.count
    first, last = (options.case, options.case) if options.case else (options.first, count)
    cases = list(islice(draw_cases(seed), first - 1, last))
    print(f"seed {seed}; the same series again: make failover-series N={count} SEED={seed}")
    root = Path(tempfile.mkdtemp(prefix="failover-series-"))
    results = []
    with two_mounts(root / "layer", seed) as layer, hub_of(root / "hub") as hub:
        series = Series(root, layer, hub)
        for case in cases:
            began = time.monotonic()
            result = series.run(case)
            results.append(result)
            verdict = "; ".join(f"{kind}: {text}" for kind, text in result.wrong)
            print(
                f"case {case.number}, {case}: "
                f"{f'WRONG, {verdict}' if verdict else 'right'} (left after "
                f"{result.left_seconds:.1f} s, waited {result.wait_seconds:.1f} s; "
                f"{time.monotonic() - began:.0f} s)",
                flush=True,
            )
    right = print_totals(results)
    for one in results:
        if one.wrong:
            print(f"wrong: make failover-series SEED={seed} CASE={one.case.number}")
    if right == len(results):
        shutil.rmtree(root)
    else:
        print(f"the files of wrong cases are in {root}")
    print(f"{right} of {len(results)} right")
    return int(right < len(results))


if __name__ == "__main__":
    sys.exit(main())
