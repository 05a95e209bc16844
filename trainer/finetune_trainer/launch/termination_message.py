"""Combine the reports of a node's ranks into the one `Termination` of an attempt.

Each rank leaves a `RankReport`. The supervisor adds which ranks were killed and why. From these
`choose_termination` derives the termination.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import ValidationError

from finetune_trainer import first_signal
from finetune_trainer.config import (
    ExitCode,
    FailureClass,
    Progress,
    SampleAnswer,
    Termination,
    redact,
)
from finetune_trainer.files import replace_text
from finetune_trainer.launch.rank_report import RankReport

MAX_TERMINATION_BYTES = 4096  # Kubernetes truncates longer termination messages

_CLASS_OF_CODE = {
    ExitCode.DONE: FailureClass.COMPLETED,
    ExitCode.DATA: FailureClass.DATA_ERROR,
    ExitCode.PREEMPTED: FailureClass.PREEMPTED,
    ExitCode.CONFIG: FailureClass.CONFIG_ERROR,
    ExitCode.DO_NOT_RESTART: FailureClass.DO_NOT_RESTART,
    ExitCode.KILLED: FailureClass.WORKER_LOST,
}


class EndedBy(StrEnum):
    """Cause of the end of a rank's process."""

    ITSELF = "itself"
    FAILURE_OF_ANOTHER = "failure of another"
    END_OF_GRACE = "end of grace"


@dataclass(frozen=True)
class RankExit:
    """End of one rank's process as seen by its supervisor.

    Attributes:
        code: Exit code; negative for a signal, as in `Popen.returncode`.
        time: When it was noticed, in seconds since the epoch.
        ended_by: Why the supervisor sent SIGKILL, if it did.
        report: The rank's report; None if it left none.
        stacks: File to which a timer wrote the stacks before it ended the rank; None without one.
    """

    rank: int
    code: int
    time: float
    ended_by: EndedBy = EndedBy.ITSELF
    report: RankReport | None = None
    stacks: Path | None = None

    @property
    def outcome(self) -> int:
        """Exit code of the report, which is written after all work; without a report `code`."""
        return self.report.termination.exit_code if self.report else self.code

    @property
    def is_preempted(self) -> bool:
        """Whether it was asked to stop, including by a signal before it could handle signals."""
        return self.outcome in (ExitCode.PREEMPTED, *(-number for number in first_signal.NUMBERS))


def choose_termination(
    exits: Sequence[RankExit], *, stop_reason: str | None, is_out_of_memory: bool
) -> Termination:
    """Choose the termination of the attempt.

    A failed rank takes precedence over a preempted rank, and a preempted rank over a finished rank.
    A rank that was ended only because another failed is ignored. Among failed ranks, a rank with a
    classified error or a kill is the root cause rather than a rank with an unclassified error,
    which may be a consequence. Among equal ranks the earliest is the root cause.

    Args:
        exits: One per rank of this node.
        stop_reason: Name of the signal that asked the supervisor to stop, if any.
        is_out_of_memory: Whether the kernel's out-of-memory killer was active on this node
            meanwhile.
    """
    faults = [(e, fault) for e in exits if (fault := _fault(e, is_out_of_memory)) is not None]
    if faults:
        _, fault = min(
            faults, key=lambda f: (f[1].exit_code == ExitCode.ERROR, f[0].time, f[0].rank)
        )
        return fault
    by_rank = sorted(exits, key=lambda e: e.rank)
    preempted = [e for e in by_rank if e.is_preempted]
    unfinished = [e for e in by_rank if e.outcome != ExitCode.DONE]
    if preempted or (stop_reason and unfinished):
        reports = [e.report for e in preempted if e.report]
        return reports[0].termination if reports else preempted_before_training(stop_reason)
    if not unfinished:
        reports = [e.report for e in by_rank if e.report]
        return reports[0].termination if reports else _termination(None, ExitCode.DONE, "finished")
    return _lost_peers(unfinished)


def preempted_before_training(reason: str | None) -> Termination:
    """Return the termination of an attempt that was stopped before it had anything to save."""
    return Termination(
        failure_class=FailureClass.PREEMPTED,
        exit_code=ExitCode.PREEMPTED,
        message=f"stopped by {reason or 'SIGTERM'} before training began; no work is lost",
    )


def write_termination(path: Path, termination: Termination) -> None:
    """Write the `message_text`, atomically if the file allows it."""
    text = message_text(termination)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_text(path, text)
    except OSError:
        # Kubernetes mounts the file itself, which can be written but not replaced.
        path.write_text(text, encoding="utf-8")


def message_text(termination: Termination) -> str:
    """Return the termination as one line of JSON with a newline, of at most 4096 bytes.

    The message has no credentials, because everyone who may read the pod can read it.
    """
    termination = termination.model_copy(update={"message": redact(termination.message)})
    for candidate in _shortened(termination):
        text = candidate.model_dump_json(by_alias=True, exclude_none=True) + "\n"
        if len(text.encode()) <= MAX_TERMINATION_BYTES:
            break
    return text


def with_published(termination: Termination, run_dir: Path, attempt: int) -> Termination:
    """Add the progress that rank 0 published, if the termination lacks it, as after a kill."""
    if termination.progress is not None:
        return termination
    try:
        progress = Progress.read(run_dir / "progress.json")
    except (OSError, ValidationError):
        return termination  # rank 0 may be on another node, or has not reported yet
    return with_progress(termination, progress) if progress.attempt == attempt else termination


def with_progress(termination: Termination, progress: Progress) -> Termination:
    """Add the progress, its step and its checkpoint if they are missing."""
    return termination.model_copy(
        update={
            "step": termination.step or progress.step,
            "checkpoint": termination.checkpoint or progress.checkpoint,
            "progress": termination.progress or progress,
        }
    )


def _fault(exit_: RankExit, is_out_of_memory: bool) -> Termination | None:
    """Return the failure that this rank caused, or None."""
    if exit_.outcome == ExitCode.DONE or exit_.is_preempted:
        return None
    if exit_.ended_by is EndedBy.FAILURE_OF_ANOTHER:
        return None
    if exit_.report is not None:
        return None if exit_.report.is_collateral else exit_.report.termination
    if exit_.ended_by is EndedBy.END_OF_GRACE:
        return _termination(
            exit_.rank,
            ExitCode.KILLED,
            f"rank {exit_.rank} was asked to stop, did not leave within its grace period and was "
            "killed; raise spec.deadlines.terminationGraceSeconds",
        )
    if exit_.code < 0:
        return _killed(exit_, is_out_of_memory)
    if exit_.stacks is not None:
        return _hung(exit_.rank, exit_.stacks)
    code = ExitCode(exit_.code) if exit_.code in list(ExitCode) else ExitCode.ERROR
    message = (
        f"rank {exit_.rank} exited with {exit_.code} without a termination message; see its log"
    )
    return _termination(exit_.rank, code, message)


def _hung(rank: int, stacks: Path) -> Termination:
    message = (
        f"rank {rank} made no progress while one of its threads held the interpreter lock, and a "
        f"timer has ended it; {stacks} shows where each thread was; raise "
        "spec.deadlines.hangSeconds if it was only slow"
    )
    hung = _termination(rank, ExitCode.ERROR, message)
    return hung.model_copy(update={"failure_class": FailureClass.HUNG})


def _killed(exit_: RankExit, is_out_of_memory: bool) -> Termination:
    name = signal.Signals(-exit_.code).name
    if exit_.code != -signal.SIGKILL:
        message = f"rank {exit_.rank} died of {name}; see its log"
        return _termination(exit_.rank, ExitCode.ERROR, message)
    if not is_out_of_memory:
        message = f"rank {exit_.rank} was killed from outside ({name})"
        return _termination(exit_.rank, ExitCode.KILLED, message)
    message = (
        f"rank {exit_.rank} was killed because the memory limit was reached; lower "
        "spec.training.microBatchSize or maxSeqLength, or give the node more memory"
    )
    killed = _termination(exit_.rank, ExitCode.KILLED, message)
    return killed.model_copy(update={"failure_class": FailureClass.OUT_OF_MEMORY})


def _lost_peers(exits: Sequence[RankExit]) -> Termination:
    """Report that the root cause is on another node: no rank here failed, but not all finished."""
    first = min(exits, key=lambda e: (e.time, e.rank))
    if first.report is not None:
        return first.report.termination
    message = f"rank {first.rank} ended early, and the cause is not on this node; see other nodes"
    lost = _termination(None, ExitCode.ERROR, message)
    return lost.model_copy(update={"failure_class": FailureClass.WORKER_LOST})


def _termination(rank: int | None, code: ExitCode, message: str) -> Termination:
    failure_class = _CLASS_OF_CODE.get(code, FailureClass.ERROR)
    return Termination(failure_class=failure_class, exit_code=code, message=message, rank=rank)


def _shortened(full: Termination) -> Iterator[Termination]:
    """Yield the message with ever fewer details besides class, step and message."""
    yield full
    progress = full.progress
    if progress is not None:
        samples = tuple(_cut_sample(sample, 160) for sample in progress.samples)
        warnings = tuple(_cut(warning, 160) for warning in progress.warnings[-5:])
        progress = progress.model_copy(update={"samples": samples, "warnings": warnings})
        yield full.model_copy(update={"progress": progress})
        bare = {"samples": (), "warnings": (), "train_data": None, "eval_data": None}
        bare |= {"trackers": None}
        progress = progress.model_copy(update=bare)
        yield full.model_copy(update={"progress": progress})
    short = full.model_copy(
        update={"message": _cut(full.message, 500), "artifacts": full.artifacts[:4]}
    )
    yield short.model_copy(update={"progress": progress})
    yield short.model_copy(update={"progress": None})
    yield short.model_copy(update={"progress": None, "artifacts": (), "checkpoint": None})


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _cut_sample(sample: SampleAnswer, length: int) -> SampleAnswer:
    return SampleAnswer(
        prompt=_cut(sample.prompt, length),
        before=None if sample.before is None else _cut(sample.before, length),
        after=None if sample.after is None else _cut(sample.after, length),
    )
