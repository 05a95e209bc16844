"""What must hold of every interleaving of writers, judged by what each told and by what is left.

`writers` calls `judge` when all its processes are gone. All times are of one machine's clock.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from finetune_trainer.checkpoint.commit import ledger, verify
from finetune_trainer.claims.names import Listing
from finetune_trainer.errors import CheckpointError
from finetune_trainer.export.publish import RECORD, ExportRecord

KEEP = 2
LEAVE_SECONDS = 10.0
ENTER_SECONDS = 20.0
FILES = {"part-0", "part-1", "trainer.json"}
Order = tuple[int, int, int, str]


@dataclass(frozen=True)
class Event:
    """One line of the journal; `number` is that of the process, -1 of who plays with them."""

    time: float
    number: int
    what: str
    details: dict[str, Any]

    @classmethod
    def read(cls, journal: Path) -> "list[Event]":
        lines = (json.loads(line) for line in journal.read_text().splitlines())
        return [
            cls(one.pop("time"), one.pop("number"), one.pop("what"), details=one) for one in lines
        ]

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.time:12.4f} {self.number:2} {self.what} {details}"


@dataclass
class Writer:
    """What one process told."""

    events: list[Event]
    era: int  # how often everything was moved aside before it had the folder
    came: Event = field(init=False)

    def __post_init__(self) -> None:
        self.came = self.events[0]
        self.number = self.came.number
        self.uid: str = self.came.details["uid"]

    def all(self, *what: str) -> list[Event]:
        return [event for event in self.events if event.what in what]

    def one(self, what: str) -> Event | None:
        return next(iter(self.all(what)), None)

    @cached_property
    def claim(self) -> Order:
        claimed = self.one("claimed")
        assert claimed is not None
        return order_of(claimed.details["tag"])

    @property
    def claimed_at(self) -> float:
        claimed = self.one("claimed")
        return float("inf") if claimed is None else claimed.time

    @property
    def starts_over(self) -> bool:
        return bool(self.came.details["startsOver"])

    def looked_between(self, begin: float, end: float) -> Event | None:
        """Return the last look at the claims between two moments."""
        looks = (one for one in self.all("looked") if begin < one.time < end)
        return max(looks, key=lambda one: one.time, default=None)


def order_of(tag: str) -> Order:
    epoch, attempt, generation, nonce = tag.split("-")
    return int(epoch), int(attempt), int(generation), nonce


def owner_of(folder: str) -> Order:
    return order_of(folder.partition(".")[2])


def step_of(folder: str) -> int:
    return int(folder.partition(".")[0].removeprefix("step-"))


def judge(events: list[Event], root: Path, weights_of: Callable[[int], str]) -> list[str]:
    """Return a sentence for each thing that must not be."""
    moved = [event.time for event in events if event.what == "moved"]
    by_number: dict[int, list[Event]] = {}
    for event in events:
        by_number.setdefault(event.number, []).append(event)
    own = by_number.pop(-1)
    writers = []
    for told in by_number.values():
        had = next((event.time for event in told if event.what == "claimed"), told[0].time)
        if told[0].what == "came":  # else it was killed before
            writers.append(Writer(told, sum(time < had for time in moved)))
    case = _Case(own, writers, moved, root, weights_of)
    return list(case.wrong())


@dataclass
class _Case:
    own: list[Event]
    writers: list[Writer]
    moved: list[float]
    root: Path
    weights_of: Callable[[int], str]

    def wrong(self) -> Iterator[str]:
        yield from (f"{event}" for event in self.own if event.what == "stuck")
        for writer in self.writers:
            yield from self._failures(writer)
        self.had = [one for one in self.writers if one.one("claimed")]
        for one in self.had:
            for other in self.had:
                if (one.era, one.claim) < (other.era, other.claim):
                    yield from self._pair(one, other)
            yield from self._looks(one)
            yield from self._deletions(one)
            yield from self._start(one)
        yield from self._left()
        yield from self._last()

    def _failures(self, writer: Writer) -> Iterator[str]:
        for event in writer.all("failed", "broken"):
            is_orphan = any(time < event.time for time in self.moved[writer.era :])
            if event.what == "broken" or not is_orphan:
                yield f"{event}"
        arrived = writer.all("claimed", "refused", "overtaken", "preempted", "gone")
        if arrived and arrived[0].time - writer.came.time > ENTER_SECONDS:
            yield f"process {writer.number} was on its way for too long"
        for event in writer.all("refused"):
            uids = {one.uid for one in self.writers} - {writer.uid}
            is_moved = any(writer.came.time < time < event.time for time in self.moved)
            if not is_moved and not any(f"(uid {u})" in event.details["text"] for u in uids):
                yield f"process {writer.number} was refused without the owner's name"

    def _pair(self, one: Writer, later: Writer) -> Iterator[str]:
        """Judge two that had the folder, the second by the higher claim."""
        both = f"processes {one.number} and {later.number}"
        if one.era == later.era and one.uid != later.uid:
            if one.claim[0] == later.claim[0]:
                yield f"two jobs had the folder: {both}"
            elif not later.came.details["takesOver"]:
                yield f"a job came to have the folder of another: {both}"
        gone = one.one("gone")
        if gone and gone.time - later.claimed_at > LEAVE_SECONDS:
            yield f"an overtaken writer stayed: {both}"
        began = {event.details["folder"]: event.time for event in one.all("began")}
        for event in one.all("committed"):
            if began[event.details["folder"]] > later.claimed_at:
                yield f"an overtaken writer reported {event.details['folder']}: {both}"

    def _overtaken_before(self, writer: Writer, time: float) -> bool:
        own = writer.era, writer.claim
        return any((one.era, one.claim) > own and one.claimed_at < time for one in self.had)

    def _looks(self, one: Writer) -> Iterator[str]:
        """A look at the claims stands directly before each commit, report and deletion."""
        whole = {e.details["folder"]: e.time for e in one.all("wrote trainer.json")}
        manifests = {e.details["folder"]: e.time for e in one.all("wrote manifest.json")}
        spans = [("commit", f, whole[f], time) for f, time in manifests.items()]
        for event in one.all("committed"):
            folder = event.details["folder"]
            spans.append(("report", folder, manifests[folder], event.time))
        for what, folder, begin, end in spans:
            look = one.looked_between(begin, end)
            if look is None:
                yield f"process {one.number} did not look before its {what} of {folder}"
            elif what != "report" and self._overtaken_before(one, look.time):
                yield f"process {one.number} saw a higher claim before its {what} of {folder}"
        before, num_looks = 0.0, 1
        for event in one.all("wrote manifest.json", "retired"):
            if event.what == "retired":
                looks = [e for e in one.all("looked") if before < e.time < event.time]
                if len(looks) < num_looks:
                    folder = event.details["folder"]
                    yield f"process {one.number} did not look before its deletion of {folder}"
            # Of those after a manifest one is for the commit.
            before, num_looks = event.time, 2 if event.what == "wrote manifest.json" else 1

    def _deletions(self, one: Writer) -> Iterator[str]:
        for event in one.all("retired", "removed"):
            folder = event.details["folder"]
            if folder.startswith("step-") and owner_of(folder) > one.claim:
                yield f"process {one.number} deleted {folder} of a higher claim"
        lineage = self._lineage(one)
        killed_early = (w for w in self.had if w.starts_over and not w.one("started"))
        if any(w.claim < one.claim for w in killed_early):
            return  # nobody knows whether it had begun a course of its own
        course = {one.claim} | ({w.claim for w in lineage} if not one.starts_over else set())
        for event in one.all("retired"):
            if owner_of(event.details["folder"]) not in course:
                folder = event.details["folder"]
                yield f"process {one.number} deleted {folder}, which is on no course of its own"

    def _lineage(self, one: Writer) -> list[Writer]:
        """Return those whose commits the claim of `one` goes on from, in order."""
        before = [w for w in self.had if w.era == one.era and w.claim < one.claim]
        before.sort(key=lambda writer: writer.claim)
        for index in range(len(before) - 1, -1, -1):
            if before[index].starts_over:
                is_clear = before[index].one("started") is not None
                return before[index:] if is_clear else before[index + 1 :]
        return before

    def _start(self, one: Writer) -> Iterator[str]:
        if (started := one.one("started")) is None:
            return
        if one.starts_over:
            if started.details["step"] != 0:
                yield f"process {one.number} was to start from step 0"
            return
        lineage = self._lineage(one)
        told = [e.details["step"] for w in lineage for e in w.all("committed")]
        if started.details["step"] < max(told, default=0):
            yield f"process {one.number} started before step {max(told)}, which was committed"
        is_clear = bool(lineage) and lineage[0].starts_over
        there = [
            step_of(e.details["folder"]) for w in lineage for e in w.all("wrote manifest.json")
        ]
        if is_clear and started.details["step"] > max(there, default=0):
            yield f"process {one.number} started from a course that was left"

    def _left(self) -> Iterator[str]:
        """Judge the checkpoints that are there."""
        era = len(self.moved)
        had = sorted((w for w in self.had if w.era == era), key=lambda writer: writer.claim)
        if not had:
            return
        there = set()
        for ref in ledger(self.root / "checkpoints"):
            folder = Path(ref.path)
            there.add(folder.name)
            try:
                manifest = verify(folder)
            except CheckpointError as error:
                yield f"{error}"
                continue
            if set(manifest.files) != FILES:
                yield f"{folder.name} vouches for {sorted(manifest.files)} alone"
            weights = json.loads((folder / "part-1").read_text())["weights"]
            if weights != self.weights_of(ref.step):
                yield f"{folder.name} holds other weights"
        started = [writer for writer in had if writer.one("started")]
        if not started:
            return
        newest = started[-1]
        course = [newest] if newest.starts_over else [*self._lineage(newest), newest]
        wrote = {e.details["folder"] for w in course for e in w.all("wrote manifest.json")}
        retired = {e.details["folder"] for w in had for e in w.all("retired")}
        reported = {e.details["folder"] for w in course for e in w.all("committed")}
        for folder in reported - there:
            newer = [one for one in wrote if step_of(one) > step_of(folder)]
            if folder not in retired or len(newer) < KEEP:
                yield f"the committed {folder} is lost"

    def _last(self) -> Iterator[str]:
        """Judge what became of the attempts that were left alone."""
        began = next(event.time for event in self.own if event.what == "last")
        last = [writer for writer in self.writers if writer.came.time > began]
        ended = [writer for writer in last if writer.one("exported")]
        owner = Listing.of(self.root / "checkpoints").owner
        uids = {writer.uid for writer in last}
        if owner is None or owner.uid not in uids:
            yield from (f"process {writer.number} had no folder" for writer in ended)
            if owner is None or any(self._could_take_over(writer, owner.uid) for writer in last):
                yield "nobody went on"
            return
        if [writer.uid for writer in ended] != [owner.uid]:
            yield f"the last attempt of {owner.uid} did not come to its end"
            return
        step = ended[0].all("exported")[0].details["step"]
        output = self.root / "output"
        record = ExportRecord.read(output / RECORD)
        if (record.job.uid, record.step, record.is_whole) != (owner.uid, step, True):
            yield f"the export is of {record}"
        for name in ("model", "config"):
            if (output / name).read_text() != f"{name} {self.weights_of(step)}":
                yield f"the exported {name} is of another"

    def _could_take_over(self, writer: Writer, uid: str) -> bool:
        name = next((one.came.details["job"] for one in self.writers if one.uid == uid), "")
        return bool(writer.came.details["takesOver"]) and writer.came.details["job"] == name
