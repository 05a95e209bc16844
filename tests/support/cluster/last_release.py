"""The previous release: its code and chart from git, and files that it wrote.

No release is published yet. Commit 633915b stands for release 0.1.0, from which users can
upgrade. `release_0_1_0/` holds the files; its README states how they were written.
"""

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
COMMIT = "633915b"
STORED = Path(__file__).parents[2] / "release_0_1_0"
BACKENDS = "aks=finetune_operator.backends.aks.backend:AksBackend"
"""Its backend for the setting `backends`: the packages here register none of that name."""
_PARTS = ("charts/finetune-operator", "operator/finetune_operator", "trainer/finetune_trainer")
_TESTS = ("crds", "tests")
_POD_ADDRESS = "192.0.2.10"


@dataclass(frozen=True)
class LastRelease:
    """The unpacked release.

    Attributes:
        chart: For helm.
        source: A folder with its packages, for PYTHONPATH.
        tests: Its tests and their helpers. Missing unless `unpack` was asked for them.
    """

    chart: Path
    source: Path
    tests: Path


def unpack(folder: Path, *, with_tests: bool = False) -> LastRelease | None:
    """Unpack the release into a folder; None if git does not have its commit."""
    command = ["git", "archive", COMMIT, *_PARTS, *(_TESTS if with_tests else ())]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if packed.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    source = folder / "packages"
    source.mkdir()
    for part in _PARTS[1:]:
        (source / Path(part).name).symlink_to(folder / part)
    return LastRelease(folder / _PARTS[0], source, folder / "tests")


def definitions() -> list[Any]:
    """Return its CustomResourceDefinitions."""
    names = ("finetunejobs", "finetuneprofiles")
    texts = [
        subprocess.run(
            ["git", "show", f"{COMMIT}:crds/{name}.yaml"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        for name in names
    ]
    return [yaml.safe_load(text) for text in texts]


def stored_jobs() -> list[str]:
    """List the stored jobs, each named by its phase."""
    names = {path.stem for path in (STORED / "jobs").glob("*.yaml")}
    return sorted(names - {"profile"})


def stored_objects(name: str, pod_address: str) -> list[dict[str, Any]]:
    """Read the objects of a stored job, the job first; its pods have the given address."""
    text = (STORED / "jobs" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text.replace(_POD_ADDRESS, pod_address)))


def unpack_run(name: str, folder: Path) -> None:
    """Unpack a stored run of the trainer, `run-killed` or `run-finished`, into a folder."""
    with tarfile.open(STORED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
