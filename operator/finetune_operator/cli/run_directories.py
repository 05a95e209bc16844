"""Find the run directories of this machine, for `ftctl logs` and `ftctl top`."""

from pathlib import Path

from finetune_operator.api.manifest import Manifest
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.local.layout import folders_of
from finetune_operator.backends.local.run_folder import RunFolder
from finetune_operator.errors import FineTuneError


def shown_path(path: Path) -> str:
    """Return the path, relative if it is below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def run_directories(name: str = "*") -> list[Path]:
    """Return the run directories of this folder and its subfolders, of all jobs or of one name."""
    patterns = (f"runs/*/{name}/job.json", f"*/runs/*/{name}/job.json")
    return sorted(stored.parent for one in patterns for stored in Path.cwd().glob(one))


def run_directory(job: str, manifest: tuple[FineTuneJob, Manifest] | None) -> Path:
    """Find the run directory that the user has named.

    Raises:
        FineTuneError: no directory, or several, have that name.
    """
    path = Path(job)
    if path.is_dir():
        if not RunFolder(path).path.exists():
            raise FineTuneError(
                f"{job} is not a run directory: it has no job.json; name a manifest, a run "
                "directory or a job"
            )
        return path.resolve()
    if manifest is not None:
        return folders_of(manifest[0], manifest[1].directory).run
    if "/" in job or path.suffix:
        raise FineTuneError(f"{job} does not exist; name a manifest, a run directory or a job")
    here = Path.cwd()
    found = run_directories(job)
    if not found:
        raise FineTuneError(
            f"no run of a job called {job} below {here}; name its manifest or its run directory, "
            "or the --namespace of a job in a cluster"
        )
    if len(found) > 1:
        listed = ", ".join(str(one.relative_to(here)) for one in found)
        raise FineTuneError(f"several runs are called {job}: {listed}; name a folder")
    return found[0]
