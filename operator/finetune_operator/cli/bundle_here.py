"""Files of a job of this machine for `ftctl doctor --bundle`: its run directory, without data."""

import json
import os
from pathlib import Path

from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.cli.bundle import MAX_BYTES, MAX_LOGS, Bundle
from finetune_operator.errors import FineTuneError

_RECORDS = (
    "attempts/*/attempt.json",
    "attempts/*/cancel.json",
    "attempts/*/node-*.exit.json",
    "attempts/*/node-*.termination.json",
)
_LOGS = ("operator.log", "attempts/*/node-*.log", "logs/**/*.jsonl")


def add_run_directory(bundle: Bundle, run_dir: Path) -> None:
    """Add the stored job, the records of its attempts, and the ends of logs and journals.

    Raises:
        FineTuneError: the directory holds no job.
    """
    stored = RunFolder(run_dir).path
    if not stored.exists():
        raise FineTuneError(f"{run_dir} holds no job; for a job in a cluster add --cluster")
    _add_json(bundle, stored, "job.yaml")
    _add_json(bundle, run_dir / "progress.json", "progress.yaml")
    for path in _files(run_dir, _RECORDS):
        _add_json(bundle, path, str(path.relative_to(run_dir).with_suffix(".yaml")))
    logs = sorted(_files(run_dir, _LOGS), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in logs[:MAX_LOGS]:
        name = str(path.relative_to(run_dir))
        try:
            bundle.add_log(name, _last_lines(path))
        except OSError as error:
            bundle.left_out.append(f"{name}: {error.strerror}")
    if len(logs) > MAX_LOGS:
        bundle.left_out.append(f"the oldest {len(logs) - MAX_LOGS} of {len(logs)} logs")


def _files(run_dir: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = (path for one in patterns for path in sorted(run_dir.glob(one)))
    return [path for path in found if path.is_file() and not path.is_symlink()]


def _add_json(bundle: Bundle, path: Path, name: str) -> None:
    """Add a record as YAML; a record that cannot be parsed is named instead."""
    try:
        bundle.add_objects(name, json.loads(path.read_bytes()))
    except FileNotFoundError:
        bundle.left_out.append(f"{path.name}: does not exist")
    except (OSError, ValueError) as error:
        bundle.left_out.append(f"{path.name}: cannot be read ({error})")


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[1:] if size > MAX_BYTES else lines
