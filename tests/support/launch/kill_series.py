"""`kill -9` at random, again and again: every run must end with the weights of an unbroken one.

`make kill-series N=50 SEED=7` runs it: 2N launches over all strategies, N kills of a rank followed
by a resume, and up to 30 restarts in place. Half of the kills hit a named point of the code, the
others a moment. All that counts is compared bit by bit; what differs is kept for a look.
"""

import hashlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from finetune_trainer.config import Progress, TrainConfig
from finetune_trainer.failpoints import ENV_FAILPOINT, ENV_FAILPOINT_ONCE, POINTS
from support.launch.journals import journal_in
from support.launch.launches import clean_environment
from support.launch.series_runs import SAVE_EVERY, STEPS, Outcome, draw_point, series_config
from support.launch.tiny_run import write_inputs

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
MOST_RESTARTS = 30
LONGEST_RUN_SECONDS = 300


@dataclass(frozen=True)
class Kill:
    """Who is killed, and where: at named points, or so many seconds after a moment.

    Attributes:
        points: for the failpoints; empty for a kill by the clock.
        rank: of a kill by the clock.
        share: of the time that the unbroken run took, from its start or, if `in_training`, from
            the moment training began.
    """

    points: tuple[str, ...] = ()
    rank: int = 0
    share: float = 0.0
    in_training: bool = False

    @property
    def count(self) -> int:
        """How often ranks are killed."""
        return max(len(self.points), 1)

    def earlier(self) -> "Kill":
        """Return the same kill at half the time: the run was over already."""
        return replace(self, share=self.share / 2)

    def __str__(self) -> str:
        if self.points:
            return " then ".join(self.points)
        since = "training" if self.in_training else "start"
        return f"rank {self.rank} after {self.share:.0%} of the time since its {since}"


def draw_kill(rng: random.Random) -> Kill:
    """Draw a named point for half of the kills, and a moment for the others."""
    if rng.random() < 0.5:
        return Kill(rank=rng.randrange(2), share=rng.random(), in_training=rng.random() < 0.6)
    name = rng.choice(POINTS)
    point = draw_point(rng, name)
    if name != "restoring":
        return Kill(points=(point,))
    # Nobody restores before something else went wrong; when the second save has begun, the first
    # is committed.
    first = f"after-optimizer@{rng.randint(2 * SAVE_EVERY + 1, STEPS)}:rank={rng.randrange(2)}"
    return Kill(points=(first, point))


@dataclass
class Run:
    """One job in a folder of its own, over all its attempts."""

    folder: Path
    config: TrainConfig
    environ: dict[str, str] = field(default_factory=dict)
    attempt: int = 0

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the next attempt."""
        self.attempt += 1
        job = self.config.job.model_copy(update={"attempt": self.attempt})
        checkpoint = self.config.checkpoint.model_copy(update={"is_continued": self.attempt > 1})
        config = self.config.model_copy(update={"job": job, "checkpoint": checkpoint})
        path = self.folder / "config.json"
        path.write_text(config.to_json())
        with (self.folder / "stderr.txt").open("ab") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "finetune_trainer", str(path)],
                env=clean_environment(
                    PYTHONWARNINGS="default",
                    HF_HUB_OFFLINE="1",
                    DS_ACCELERATOR="cpu",
                    **self.environ,
                ),
                stderr=stderr,
                stdout=stderr,
            )

    def finish(self) -> int:
        """Start the next attempt and return its exit code."""
        return wait(self.start())

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return what rank 0's journal says of one kind of event, over all attempts."""
        return [one for one in journal_in(Path(self.config.run_dir)) if one["event"] == event]

    def has_begun_training(self) -> bool:
        """Say whether the first step is about to be made."""
        return any(entry["phase"] == "Training" for entry in self.events("phase"))

    def outcome(self) -> Outcome:
        """Return what a finished run produced; of a step made twice the last numbers count."""
        files = sorted(Path(self.config.output.dir).glob("*.safetensors"))
        numbers = ("loss", "grad_norm", "learning_rate")
        return Outcome(
            weights={f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
            steps={e["step"]: tuple(e[n] for n in numbers) for e in self.events("step")},
            evaluations={e["step"]: e["loss"] for e in self.events("evaluated")},
        )


@dataclass(frozen=True)
class Unbroken:
    """What a run that nobody killed produced, and the seconds it took in all and from training."""

    outcome: Outcome
    seconds: float
    training_seconds: float


class Series:
    """Runs of one tiny job, each in a folder of its own below `root`.

    Each kind of run returns what was wrong with it, or nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._inputs = write_inputs(root / "inputs")
        self._unbroken: dict[str, Unbroken] = {}

    def launch(self, name: str, strategy: str) -> str:
        """Run without a kill; the first run of a strategy is the measure of all others."""
        run = self._run(name, strategy)
        began = time.time()
        code = run.finish()
        ended = time.time()
        if code != 0:
            return f"exit code {code}"
        if strategy not in self._unbroken:
            outcome = run.outcome()
            if len(outcome.steps) != STEPS or not outcome.weights:
                return f"{len(outcome.steps)} steps and {len(outcome.weights)} files of weights"
            training = next(e["time"] for e in run.events("phase") if e["phase"] == "Training")
            unbroken = Unbroken(outcome, ended - began, ended - training)
            self._unbroken.setdefault(strategy, unbroken)  # another thread may have been faster
        return self._compare(run, strategy)

    def resume(self, name: str, strategy: str, kill: Kill) -> str:
        """Kill a rank, and start attempts until one of them is done."""
        run = self._run(name, strategy, kill)
        code, num_killed = self._first_attempt(run, strategy, kill), 0
        while code == 137 and num_killed < kill.count:
            num_killed += 1
            code = run.finish()
        if code != 0:
            return f"exit code {code} of attempt {run.attempt}"
        if num_killed == 0 and not kill.points:
            return self.resume(name, strategy, kill.earlier())
        return self._compare(run, strategy, num_killed=num_killed, kill=kill)

    def restart(self, name: str, strategy: str, kill: Kill) -> str:
        """Kill a rank, and let the supervisor start all of them again."""
        run = self._run(name, strategy, kill, restarts_in_place=kill.count)
        code = self._first_attempt(run, strategy, kill)
        if code != 0:
            return f"exit code {code}"
        progress = Progress.read(Path(run.config.run_dir) / "progress.json")
        if progress.restarts_in_place == 0 and not kill.points:
            return self.restart(name, strategy, kill.earlier())
        return self._compare(run, strategy, num_killed=progress.restarts_in_place, kill=kill)

    def _run(self, name: str, strategy: str, kill: Kill | None = None, **world: int) -> Run:
        folder = self._root / name
        shutil.rmtree(folder, ignore_errors=True)  # of a kill that came too late
        folder.mkdir()
        config = series_config(folder, self._inputs, strategy, world=world)
        run = Run(folder, config)
        if kill is not None and kill.points:
            run.environ[ENV_FAILPOINT] = ",".join(kill.points)
            run.environ[ENV_FAILPOINT_ONCE] = str(folder / "marks")
        return run

    def _first_attempt(self, run: Run, strategy: str, kill: Kill) -> int:
        """Start a run, kill its rank unless it does so itself, and return the exit code."""
        process = run.start()
        if not kill.points:
            unbroken = self._unbroken[strategy]
            seconds = unbroken.training_seconds if kill.in_training else unbroken.seconds
            if kill.in_training:
                _until(run.has_begun_training, process)
            _until(_after(kill.share * seconds), process)
            _until(lambda: kill.rank in _ranks(process.pid), process)
            pid = _ranks(process.pid).get(kill.rank)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        return wait(process)

    def _compare(
        self, run: Run, strategy: str, *, num_killed: int = 0, kill: Kill | None = None
    ) -> str:
        """Return how a run differs from what it should be, and delete one that does not."""
        expected = kill.count if kill is not None else 0
        if num_killed != expected:
            return f"killed {num_killed} times, not {expected}"
        difference = run.outcome().difference(self._unbroken[strategy].outcome)
        if difference:
            return f"other {difference} than the unbroken run"
        shutil.rmtree(run.folder)
        return ""


def wait(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code; a run that hangs is killed, which its code shows."""
    try:
        return process.wait(LONGEST_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks go with it
        return process.wait()


def _ranks(supervisor: int) -> dict[int, int]:
    """Return the process ids of the ranks that run now."""
    found = {}
    try:
        for child in psutil.Process(supervisor).children():
            rank = child.environ().get("RANK")
            if rank is not None:
                found[int(rank)] = child.pid
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        pass  # it ended while we looked, so the moment came too late for it
    return found


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def _until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None and not condition():
        time.sleep(0.005)


@dataclass(frozen=True)
class Count:
    """How many of one kind of run were made, and how many of them were good."""

    good: int
    all: int

    def __str__(self) -> str:
        return f"{self.good} of {self.all}"


def count_good(name: str, acts: Sequence[tuple[str, str, Callable[[], str]]]) -> Count:
    """Do each act (strategy, what it does, how; it returns what was wrong) and print a line."""

    def timed(act: Callable[[], str]) -> tuple[str, float]:
        began = time.monotonic()
        return act(), time.monotonic() - began

    good = 0
    # Two ranks are two cores' work.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        results = pool.map(timed, [act for _, _, act in acts])
        for number, ((strategy, what, _), (wrong, seconds)) in enumerate(
            zip(acts, results, strict=True), 1
        ):
            good += not wrong
            verdict = f"WRONG, {wrong}" if wrong else "same as unbroken"
            place = f"{name} {number} of {len(acts)}, {strategy}"
            print(f"{place}, {what}: {verdict} ({seconds:.1f} s)", flush=True)
    return Count(good, len(acts))


def main(count: int, seed: int) -> int:
    """Run the series and return the exit code: 1 if any run was not as it should be."""
    num_restarts = min(MOST_RESTARTS, math.ceil(0.6 * count))
    print(f"seed {seed}; the same series again: make kill-series N={count} SEED={seed}", flush=True)
    rng = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="kill-series-"))
    series = Series(root)

    def in_turn(runs: int) -> list[tuple[int, str]]:
        known = STRATEGIES[: 2 * count]
        return [(number, known[number % len(known)]) for number in range(runs)]

    def killed(
        act: Callable[[str, str, Kill], str], name: str, runs: int
    ) -> list[tuple[str, str, Callable[[], str]]]:
        drawn = [(number, strategy, draw_kill(rng)) for number, strategy in in_turn(runs)]
        return [(s, str(kill), partial(act, f"{name}-{n}", s, kill)) for n, s, kill in drawn]

    clean = count_good(
        "launch",
        [(s, "no kill", partial(series.launch, f"launch-{n}", s)) for n, s in in_turn(2 * count)],
    )
    resumes = count_good("kill", killed(series.resume, "kill", count))
    restarts = count_good("restart", killed(series.restart, "restart", num_restarts))
    is_good = all(c.good == c.all for c in (clean, resumes, restarts))
    if is_good:
        shutil.rmtree(root)
    else:
        print(f"what went wrong is in {root}")
    print(f"{resumes} correct resumes, {restarts} restarts, {clean} clean exits")
    return 0 if is_good else 1


if __name__ == "__main__":
    series_length, seed_text = sys.argv[1:]
    sys.exit(main(int(series_length), int(seed_text or random.randrange(10**6))))
