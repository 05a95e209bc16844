"""Random interleavings of two jobs that want one folder: who writes, and what becomes of it.

`writers.py FIRST COUNT` runs so many from a seed on; nothing is made up but the model:
each writer is a process of its own that claims, restores, saves, retires and exports by the
trainer's code, on a layer of files whose listings lag. What each did it tells into a journal beside
that layer, which `writers_judge` reads.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from finetune_trainer.checkpoint.commit import MANIFEST, Fingerprint
from finetune_trainer.checkpoint.start import job_of_checkpoints
from finetune_trainer.checkpoint.store import CheckpointStore
from finetune_trainer.checkpoint.writing import TRAINER_FILE
from finetune_trainer.claims.enter import Pace, Wanted
from finetune_trainer.claims.fence import Fence, take
from finetune_trainer.claims.names import CLAIMS, Listing
from finetune_trainer.config import CheckpointConfig, JobRef
from finetune_trainer.errors import ClaimLostError, ConfigError, OvertakenError, Preempted
from finetune_trainer.export.publish import job_of_export, open_staging, publish
from support.checkpoint import writers_judge
from support.checkpoint.lagging_layer import lagging_layer
from support.checkpoint.writers_judge import KEEP, Event

LAG_SECONDS = 0.02
PATIENCE_SECONDS = 1.0
CHECK_SECONDS = 0.1
NEWS_SECONDS = 1.5
LAST_STEPS = 2  # of the last attempt, which is left alone
LIMIT_SECONDS = 40.0
FINGERPRINT = Fingerprint(model="none", method="lora", data="rows", order="seed 1")


@dataclass(frozen=True)
class Part:
    """What one process is to do.

    Attributes:
        number: Of the process in its run.
        root: The run's folder on the layer.
        starts_over: It has the explicit wish to begin at step 0.
        is_last: It trains `LAST_STEPS` further and exports.
        slowness: The most seconds that writing a shard takes.
    """

    number: int
    job: JobRef
    root: Path
    journal: Path
    lag_seconds: float
    take_over: bool = False
    starts_over: bool = False
    is_last: bool = False
    slowness: float = 0.0
    seed: int = 0


class Journal:
    """Tells what happens to one process, whole lines at once."""

    def __init__(self, path: Path, number: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._number = number

    def tell(self, what: str, **details: Any) -> None:
        line = {"time": time.monotonic(), "number": self._number, "what": what, **details}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def weights_of(step: int) -> str:
    """Return what the weights are after so many steps, in whichever attempts."""
    value = "new"
    for number in range(1, step + 1):
        value = train(value, number)
    return value


def train(value: str, step: int) -> str:
    return hashlib.sha256(f"{value} {step}".encode()).hexdigest()


class PlainShards:
    """Puts a state of plain values into two files."""

    def __init__(self, slowness: float, choose: random.Random) -> None:
        self._slowness = slowness
        self._choose = choose

    def reserve(self, state: dict[str, Any]) -> None:
        pass

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        return deepcopy(state)

    def write(self, state: dict[str, Any], folder: Path, group: object, step: int) -> list[str]:
        names = ["part-0", "part-1"]
        for name in names:
            time.sleep(self._choose.uniform(0, self._slowness))
            (folder / name).write_text(json.dumps({"name": name, **state["model"]}))
        return names

    def read(self, state: dict[str, Any], folder: Path, group: object) -> None:
        parts = [json.loads((folder / name).read_text()) for name in ("part-0", "part-1")]
        assert parts[0]["weights"] == parts[1]["weights"]
        state["model"]["weights"] = parts[0]["weights"]


def play(part: Part) -> int:
    """Be one attempt of a job, from its claim to its end; return the exit code."""
    journal = Journal(part.journal, part.number)
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True

    signal.signal(signal.SIGTERM, stop)

    def sleep(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if is_stopped:
                raise Preempted("told to stop")
            time.sleep(min(left, 0.01))

    journal.tell(
        "came",
        job=part.job.name,
        uid=part.job.uid,
        attempt=part.job.attempt,
        startsOver=part.starts_over,
        takesOver=part.take_over,
    )
    _tell_of_files(journal, part)
    try:
        return _train(part, journal, sleep, lambda: is_stopped)
    except (ClaimLostError, OvertakenError) as error:
        journal.tell("overtaken", text=str(error))
    except Preempted:
        journal.tell("preempted")
    except ConfigError as error:
        journal.tell("refused", text=str(error))
    return 1


def _tell_of_files(journal: Journal, part: Part) -> None:
    """Tell when it looks at the claims, writes what commits, and deletes; some list slowly."""
    root = str(part.root / "checkpoints")
    base = f"{root}/"
    choose = random.Random(f"listing {part.seed}")
    slow = choose.choice((0.0, 0.0, 0.0, 0.0, 0.15))

    def hear(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.listdir" and str(arguments[0]) == base + CLAIMS:
            journal.tell("looked")
        elif name == "os.listdir" and str(arguments[0]) == root:
            time.sleep(choose.uniform(0, slow))
        elif name == "open" and str(arguments[0]).startswith(base):
            path, mode = Path(str(arguments[0])), str(arguments[1])
            if "w" in mode and path.name in (MANIFEST, TRAINER_FILE):
                journal.tell(f"wrote {path.name}", folder=path.parent.name)
            elif "w" in mode and path.name == "part-0":
                journal.tell("began", folder=path.parent.name)
        elif name == "os.remove" and str(arguments[0]).startswith(base):
            path = Path(str(arguments[0]))
            if path.name == MANIFEST and path.exists():
                journal.tell("retired", folder=path.parent.name)
        elif name == "os.rmdir" and str(arguments[0]).startswith(base):
            journal.tell("removed", folder=Path(str(arguments[0])).name)

    sys.addaudithook(hear)


def _claim(part: Part, sleep: Any) -> Fence:
    def wanted(name: str, left_by: Any) -> Wanted:
        return Wanted(part.root / name, f"spec.{name}", part.job, part.take_over, left_by)

    choose = random.Random(part.seed)
    slow = choose.choice((0.0, 0.0, 0.1, 0.3))

    def clock() -> float:
        """Be slow where it is asked for: directly before the door, and behind it."""
        time.sleep(choose.uniform(0, slow))
        return time.monotonic()

    pace = Pace(part.lag_seconds, 0.02, PATIENCE_SECONDS, sleep=sleep, clock=clock)
    return take(
        [
            wanted("checkpoints", job_of_checkpoints),
            wanted("output", job_of_export),
        ],
        lambda _: pace,
    )


def _train(part: Part, journal: Journal, sleep: Any, is_stopped: Any) -> int:
    choose = random.Random(part.seed)
    root, output = part.root / "checkpoints", part.root / "output"
    fence = _claim(part, sleep)
    journal.tell("claimed", tag=fence.holding(root).claim.tag)

    def leave(error: ClaimLostError | OvertakenError) -> NoReturn:
        journal.tell("overtaken", text=str(error))
        os._exit(1)

    fence.watch(leave, CHECK_SECONDS)
    store = CheckpointStore(
        CheckpointConfig(
            dir=str(root),
            every_steps=1,
            keep=KEEP,
            resume_from="none" if part.starts_over else "auto",
            is_continued=part.job.attempt > 1 and not part.starts_over,
        ),
        rank=0,
        world_size=1,
        group=None,
        job=part.job,
        fingerprint=FINGERPRINT,
        fence=fence,
        warn=lambda text: journal.tell("warned", text=text),
        shards=PlainShards(part.slowness, choose),
    )
    state: dict[str, Any] = {"model": {"weights": "new"}, "trainer": {"step": 0}}
    manifest = store.restore(state)
    first = state["trainer"]["step"]
    assert first == (manifest.step if manifest else 0)
    if state["model"]["weights"] != weights_of(first):
        journal.tell("broken", text=f"the weights are not those of step {first}")
    journal.tell("started", step=first)

    def report(ref: Any) -> None:
        if ref is not None:
            journal.tell("committed", step=ref.step, folder=Path(ref.path).name)

    step = first
    while not (part.is_last and step == first + LAST_STEPS):
        step += 1
        time.sleep(choose.uniform(0.002, 0.02))
        state["model"]["weights"] = train(state["model"]["weights"], step)
        state["trainer"]["step"] = step
        store.save(step, state)
        report(store.poll())
        if is_stopped():
            break
    told = store.last
    last = store.wait()
    if last is not told:
        report(last)
    if is_stopped():
        raise Preempted("told to stop")
    staged = open_staging(output, fence.holding(output).claim)
    for name in ("model", "config"):
        (staged / name).write_text(f"{name} {state['model']['weights']}")
    publish(staged, output, step, fence)
    journal.tell("exported", step=step)
    return 0


@dataclass
class Actor:
    """A process that plays, as long as it has not been waited for."""

    part: Part
    pid: int


@dataclass
class Run:
    """One interleaving: what happens follows from the seed, when it happens does not only."""

    seed: int
    root: Path  # on the layer
    backing: Path
    journal: Path
    lag_seconds: float
    choose: random.Random = field(init=False)
    actors: list[Actor] = field(default_factory=list)
    jobs: dict[str, JobRef] = field(default_factory=dict)
    may_take_over: dict[str, bool] = field(default_factory=dict)
    count: int = 0
    num_uids: int = 0

    def __post_init__(self) -> None:
        self.choose = random.Random(f"writers {self.seed}")
        self.own = Journal(self.journal, -1)
        for name in ("a", "b"):
            self.jobs[name] = JobRef(name=name, uid=self._new_uid())
            self.may_take_over[name] = self.choose.random() < 0.5

    def _new_uid(self) -> str:
        self.num_uids += 1
        return f"{self.choose.randrange(16**4):04x}-{self.num_uids}"

    def start(self, name: str, **changes: Any) -> None:
        """Fork a process of the job's present attempt."""
        part = Part(
            self.count,
            self.jobs[name],
            self.root,
            self.journal,
            self.lag_seconds,
            take_over=self.may_take_over[name],
            slowness=self.choose.choice((0, 0, 0.01, 0.05)),
            seed=self.choose.randrange(2**32),
            **changes,
        )
        self.count += 1
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                code = play(part)
            except BaseException:
                Journal(part.journal, part.number).tell("failed", text=traceback.format_exc())
            finally:
                os._exit(code)
        self.actors.append(Actor(part, pid))

    def reap(self) -> None:
        for actor in list(self.actors):
            if os.waitpid(actor.pid, os.WNOHANG)[0]:
                self.actors.remove(actor)
                Journal(self.journal, actor.part.number).tell("gone")

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.reap()
            time.sleep(0.004)

    def wait_for_news(self, what: str) -> None:
        """Wait until somebody tells of this once more, for a while."""

        def count() -> int:
            return self.journal.read_text().count(f'"what": "{what}"')

        before, end = count(), time.monotonic() + NEWS_SECONDS
        while self.actors and count() == before and time.monotonic() < end:
            self.reap()
            time.sleep(0.004)

    def wait_for(self, actors: Sequence[Actor]) -> bool:
        end = time.monotonic() + LIMIT_SECONDS
        while any(one in self.actors for one in actors):
            self.reap()
            if time.monotonic() > end:
                return False
            time.sleep(0.004)
        return True

    def send(self, actors: Sequence[Actor], number: signal.Signals) -> None:
        for actor in actors:
            self.own.tell("sent", to=actor.part.number, signal=number.name)
            os.kill(actor.pid, number)  # nobody else waits for it, so that it is still ours

    def of(self, name: str) -> list[Actor]:
        return [one for one in self.actors if one.part.job.name == name]

    def go(self) -> None:
        """Do what the seed says, and at last let one attempt end in peace."""
        self.start("a")
        self.wait(self.choose.choice((0.0, self.choose.uniform(0.0, 0.1))))
        self.start("b")
        deeds = (self._suspend, self._kill, self._pause, self._next, self._again, self._anew)
        for _ in range(self.choose.randint(1, 4)):
            self.wait_for_news(self.choose.choice(("came", "claimed", "started", "committed")))
            self.wait(self.choose.uniform(0, 0.05))
            one = self.choose.choices((*deeds, self._fresh), (3, 4, 4, 5, 3, 3, 1))[0]
            one(self.choose.choice("ab"))
        self._end()

    def _suspend(self, name: str) -> None:
        self.send(self.of(name), signal.SIGTERM)

    def _kill(self, name: str) -> None:
        self.send(self.of(name)[-1:], signal.SIGKILL)

    def _pause(self, name: str) -> None:
        """Let one stand still, and often the next attempt come meanwhile."""
        paused = self.of(name)[-1:]
        self.send(paused, signal.SIGSTOP)
        if self.choose.random() < 0.6:
            self._next(name)
        self.wait(self.choose.uniform(0.02, 0.35))
        self.send([one for one in paused if one in self.actors], signal.SIGCONT)

    def _next(self, name: str) -> None:
        """Start the next attempt, whatever became of the one before; sometimes from step 0."""
        job = self.jobs[name]
        self.jobs[name] = job.model_copy(update={"attempt": job.attempt + 1})
        starts_over = self.choose.random() < 0.35
        self.start(name, starts_over=starts_over, is_last=self.choose.random() < 0.3)

    def _again(self, name: str) -> None:
        """Start the same attempt once more, as a container is that its pod restarts."""
        if self.choose.random() < 0.5:
            self.send(self.of(name), signal.SIGKILL)
        self.start(name)

    def _anew(self, name: str) -> None:
        """Delete the job and make it anew; an orphan of it may go on for a while."""
        if self.choose.random() < 0.7:
            self._end_all(self.of(name))
        self.jobs[name] = JobRef(name=name, uid=self._new_uid())
        self.may_take_over[name] = self.choose.random() < 0.7
        self.start(name)

    def _fresh(self, name: str) -> None:
        """Move everything aside, claims and all; an orphan may live."""
        if self.choose.random() < 0.7:
            self._end_all(self.actors)
        self.own.tell("fresh")
        aside = self.backing.with_name(f"{self.backing.name}-aside-{self.count}")
        aside.mkdir()
        for folder in list(self.backing.iterdir()):
            folder.rename(aside / folder.name)
        self.own.tell("moved")
        self.jobs[name] = JobRef(name=name, uid=self._new_uid())
        self.start(name)

    def _end_all(self, actors: Sequence[Actor]) -> None:
        actors = list(actors)
        self.send(actors, self.choose.choice((signal.SIGTERM, signal.SIGKILL)))
        if not self.wait_for(actors):
            self.own.tell("stuck", numbers=[one.part.number for one in actors])
            self.send([one for one in actors if one in self.actors], signal.SIGKILL)
            self.wait_for(actors)

    def _end(self) -> None:
        """Start the last attempt of who has the folder, or of both; one trains and exports."""
        uids = [job.uid for job in self.jobs.values()]
        self._end_all([one for one in self.actors if one.part.job.uid not in uids])
        self.own.tell("last")
        owner = Listing.of(self.backing / "checkpoints").owner
        for name, job in list(self.jobs.items()):
            is_theirs = owner is not None and owner.uid in uids and owner.uid != job.uid
            if is_theirs and self.choose.random() < 0.7:
                continue
            self.jobs[name] = job.model_copy(update={"attempt": job.attempt + 1})
            self.start(name, is_last=True)
        if not self.wait_for(self.actors):
            self.own.tell("stuck", numbers=[one.part.number for one in self.actors])
            self.send(self.actors, signal.SIGKILL)
            self.wait_for(self.actors)
        self.own.tell("over")


def run(seed: int, folder: Path, backing: Path, beside: Path, lag_seconds: float) -> list[str]:
    """Run one, and return what is wrong with it, with its journal; nothing where all is well."""
    name = f"seed-{seed}"
    (backing / name).mkdir()
    journal = beside / f"{name}.jsonl"
    one = Run(seed, folder / name, backing / name, journal, lag_seconds)
    one.go()
    events = sorted(Event.read(journal), key=lambda event: event.time)
    wrong = writers_judge.judge(events, backing / name, weights_of)
    return [*wrong, *map(str, events)] if wrong else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run some interleavings, several at once, and tell of those that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--local", action="store_true", help="on a plain folder")
    parser.add_argument("--at-once", type=int, default=8)
    given = parser.parse_args(arguments)
    seeds = range(given.first, given.first + given.count)
    with ExitStack() as stack:
        beside = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = []
        for number in range(1 if given.local else 2):
            place = beside / f"layer-{number}"
            if given.local:
                place.mkdir()
                places.append((place, place, 0.0))
            else:
                layer = lagging_layer(place, lag_seconds=LAG_SECONDS, seed=given.first + number)
                mounted = stack.enter_context(layer)
                places.append((mounted.root, mounted.backing, LAG_SECONDS))
        # Each writer that saves needs torch, and hundreds of forked processes share one import.
        importlib.import_module("torch")
        gc.freeze()
        workers = [
            _work(seeds[number :: given.at_once], places[number % len(places)], beside)
            for number in range(given.at_once)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
        refused = [] if given.local else _refusals(beside)
        counts = Counter(
            json.loads(line)["what"]
            for journal in beside.glob("*.jsonl")
            for line in journal.read_text().splitlines()
        )
    print(json.dumps(counts), *refused, sep="\n")
    return max(*codes, int(bool(refused)), 0)


def _work(seeds: Sequence[int], place: tuple[Path, Path, float], beside: Path) -> int:
    """Fork a process that runs these seeds one by one; return its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        for seed in seeds:
            root, backing, lag_seconds = place
            if wrong := run(seed, root, backing, beside, lag_seconds):
                code = 1
                os.write(1, "\n".join([f"seed {seed}:", *wrong, "", ""]).encode())
    except BaseException:
        traceback.print_exc()
        code = 3
    finally:
        os._exit(code)


def _refusals(beside: Path) -> list[str]:
    """Return what was asked of the layers that they lack, but for what has another way."""
    lines = [
        json.loads(line)
        for log in beside.glob("layer-*/refused.jsonl")
        for line in log.read_text().splitlines()
    ]
    return [
        f"refused by the layer: {line['operation']} {line['path']}"
        for line in lines
        if line["operation"] != "rename" or "/output/" not in line["path"]
    ]


if __name__ == "__main__":
    sys.exit(main())
