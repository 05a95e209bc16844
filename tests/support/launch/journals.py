"""Read the journals of a run."""

import json
from pathlib import Path
from typing import Any


def journals_in(run_dir: Path, rank: int = 0) -> list[Path]:
    """Return the journals of a rank in order: of all attempts, and of all starts of each."""

    def order(path: Path) -> list[int]:
        return [int(number) for number in path.parent.name.removeprefix("attempt-").split(".")]

    name = f"rank-{rank}.jsonl"
    of_release_0_1_0 = run_dir / "logs" / name
    found = sorted((run_dir / "logs").glob(f"attempt-*/{name}"), key=order)
    return [of_release_0_1_0, *found] if of_release_0_1_0.exists() else found


def journal_in(run_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return the complete lines of these journals; a process that is killed may cut its last."""
    texts = [path.read_text() for path in journals_in(run_dir, rank)]
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("}\n")]
