"""Judge a job whose attempt was frozen and woken beside the next attempt; for `failover_series`."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from finetune_trainer.checkpoint.commit import ledger, verify
from finetune_trainer.config import ExitCode, FailureClass, Phase, Progress, Termination
from finetune_trainer.errors import CheckpointError
from support.launch.series_runs import STEPS, Outcome

KINDS = {
    "result": "losses, gradient norms and weights bit-equal to an undisturbed run",
    "commit": "no acknowledged commit lost",
    "journal": "no torn journal",
    "progress": "no progress.json of an earlier attempt",
    "end": "woken attempt overtaken",
    "late": "woken attempt gone in time",
    "wait": "no wait beyond the patience",
}
Wrong = tuple[str, str]
"""A key of `KINDS`, and a sentence."""
Entry = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """The files of a job as they are now, behind the mounts of its attempts.

    Attributes:
        entries: Lines of all journals, whether attempts share a folder or not.
        torn: File and number of each line that is not whole.
    """

    place: Path
    entries: list[Entry]
    torn: list[str]

    @classmethod
    def read(cls, place: Path) -> Self:
        """Read every journal below the run directory."""
        found = cls(place, [], [])
        for path in sorted((place / "run" / "logs").rglob("rank-*.jsonl")):
            *lines, rest = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines, 1):
                try:
                    found.entries.append(dict(json.loads(line)))
                except (ValueError, TypeError):
                    found.torn.append(f"{path.parent.name}/{path.name} line {number}")
            if rest:
                found.torn.append(f"{path.parent.name}/{path.name} has no end")
        return found

    def of(self, attempt: int, event: str = "") -> list[Entry]:
        """Return the lines of rank 0 in an attempt."""
        mine = (one for one in self.entries if (one["attempt"], one["rank"]) == (attempt, 0))
        return [one for one in mine if event in ("", one["event"])]

    def phases(self, attempt: int) -> dict[str, float]:
        """Return when rank 0 entered each phase of an attempt."""
        return {one["phase"]: one["time"] for one in self.of(attempt, "phase")}

    def resumed(self, attempt: int) -> int:
        """Return the step from which an attempt continued."""
        return max((int(one["step"]) for one in self.of(attempt, "resumed")), default=0)

    def committed(self, attempt: int) -> list[int]:
        """Return the steps of the checkpoints that an attempt has acknowledged."""
        return [one["checkpoint"]["step"] for one in self.of(attempt, "checkpointed")]

    def silence(self, attempt: int) -> float:
        """Return the longest time between two lines of rank 0 in an attempt."""
        times = sorted(one["time"] for one in self.of(attempt))
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)

    @cached_property
    def outcome(self) -> Outcome:
        """All numbers and weights; of a step that was trained twice the last numbers count."""
        files = sorted((self.place / "output").glob("*.safetensors"))
        attempts = sorted({int(one["attempt"]) for one in self.entries})
        lines = [one for attempt in attempts for one in self.of(attempt)]
        return Outcome(
            weights={one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files},
            steps={one["step"]: _numbers(one) for one in lines if one["event"] == "step"},
            evaluations={one["step"]: one["loss"] for one in lines if one["event"] == "evaluated"},
        )


def newest_progress(place: Path) -> int | None:
    """Return the attempt of progress.json; None without the file, or while it is written."""
    try:
        return Progress.read(place / "run" / "progress.json").attempt
    except (OSError, ValidationError):
        return None


def _numbers(entry: Entry) -> tuple[float, ...]:
    return tuple(entry[name] for name in ("loss", "grad_norm", "learning_rate"))


def judge_woken(code: int | None, termination: Path) -> list[Wrong]:
    """Judge how the woken attempt ended: it is overtaken, or lost a rank that left first."""
    try:
        ended = Termination.read(termination)
    except (OSError, ValidationError):
        return [("end", f"exit code {code} without a termination message")]
    expected = {FailureClass.OVERTAKEN: ExitCode.DO_NOT_RESTART, FailureClass.WORKER_LOST: code}
    if code is not None and expected.get(ended.failure_class) == code:
        return []
    return [("end", f"{ended.failure_class}, exit code {code}: {ended.message}")]


def judge(job: Job, code: int | None, last: int, undisturbed: Outcome) -> list[Wrong]:
    """Judge a job whose attempts have ended; `code` is of attempt `last`."""
    wrong: list[Wrong] = []
    if code != ExitCode.DONE:
        wrong.append(("result", f"attempt {last} ended with exit code {code}"))
    if difference := job.outcome.difference(undisturbed):
        wrong.append(("result", f"other {difference} than the undisturbed run"))
    steps = [one for attempt in range(1, last) for one in job.of(attempt, "step")]
    if others := [one for one in steps if _numbers(one) != undisturbed.steps.get(one["step"])]:
        wrong.append(("result", f"other numbers in {others}"))
    if job.torn:
        wrong.append(("journal", f"torn: {', '.join(job.torn[:4])}"))
    own, resumed = [one["step"] for one in job.of(last, "step")], job.resumed(last)
    if own != list(range(resumed + 1, STEPS + 1)):
        wrong.append(("journal", f"attempt {last} continued from {resumed} and has steps {own}"))
    progress = Progress.read(job.place / "run" / "progress.json")
    if (progress.attempt, progress.phase) != (last, Phase.DONE):
        wrong.append(("progress", f"of attempt {progress.attempt} in phase {progress.phase}"))
    return wrong + list(_judge_commits(job, last))


def _judge_commits(job: Job, last: int) -> list[Wrong]:
    wrong: list[Wrong] = []
    resumed = job.resumed(last)
    for attempt in range(1, last):
        if lost := [step for step in job.committed(attempt) if step > resumed]:
            continued = f"attempt {last} continued from {resumed}"
            wrong.append(("commit", f"steps {lost} of attempt {attempt}; {continued}"))
    refs = ledger(job.place / "checkpoints")
    for ref in refs:
        try:
            verify(Path(ref.path))
        except CheckpointError as error:
            wrong.append(("commit", str(error)))
    left = {ref.step for ref in refs}
    if lost := sorted({*job.committed(last)[-2:], STEPS} - left):
        wrong.append(("commit", f"steps {lost} are not in the end, {sorted(left)} are"))
    return wrong
