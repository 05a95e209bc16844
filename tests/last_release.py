"""The release before this one: its chart and its operator's code, out of git.

None is published yet; the commit before the first that may be upgraded from stands for it.
"""

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMIT = "7ab6427"
_PARTS = ("charts/finetune-operator", "operator/finetune_operator", "trainer/finetune_trainer")


@dataclass(frozen=True)
class LastRelease:
    """Where it lies.

    Attributes:
        chart: For helm.
        source: A folder with its packages, for PYTHONPATH.
    """

    chart: Path
    source: Path


def unpack(folder: Path) -> LastRelease | None:
    """Write it into a folder; None where git does not have that commit."""
    command = ["git", "archive", COMMIT, *_PARTS]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if packed.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    source = folder / "packages"
    source.mkdir()
    for part in _PARTS[1:]:
        (source / Path(part).name).symlink_to(folder / part)
    return LastRelease(folder / _PARTS[0], source)
