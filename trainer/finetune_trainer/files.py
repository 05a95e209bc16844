"""Write a small file so that a reader sees the old text or the new one, nothing between.

Used for news: progress, reports, last words. Checkpoints have stricter rules (`checkpoint.commit`).
"""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text at once: written beside it, then renamed over it.

    No fsync: this is for news, which readers must be able to miss, not for checkpoints.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
