"""Locate the logs of an attempt in the run directory, for the trainer and for all readers.

Each start of an attempt writes to its own folder, `logs/attempt-ATTEMPT.GENERATION`, so that a
process of an earlier attempt that was paused cannot write into the logs of its successor.
"""

from pathlib import Path


def log_folder(run_dir: Path, attempt: int, generation: int) -> Path:
    """Return the folder of one start of an attempt."""
    return run_dir / "logs" / f"attempt-{attempt}.{generation}"


def generations(run_dir: Path, attempt: int) -> list[int]:
    """Return the generations of an attempt that have a folder, in order."""
    names = [path.name for path in (run_dir / "logs").glob(f"attempt-{attempt}.*")]
    texts = [name.partition(".")[2] for name in names]
    return sorted(int(text) for text in texts if text.isdecimal())


def free_generation(run_dir: Path, attempt: int, generation: int) -> int:
    """Return `generation`, or the next generation if its folder, or a later folder, exists.

    A job that takes over the folders of an earlier job counts its attempts from 1 again.
    """
    return max([generation, *(one + 1 for one in generations(run_dir, attempt))])


def journals(run_dir: Path, attempt: int, rank: int) -> list[Path]:
    """Return the paths of a rank's journals in an attempt, in order; a file may be missing.

    The first is the file in which release 0.1.0 has all attempts.
    """
    folders = [log_folder(run_dir, attempt, one) for one in generations(run_dir, attempt)]
    return [folder / f"rank-{rank}.jsonl" for folder in (run_dir / "logs", *folders)]
