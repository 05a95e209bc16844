"""Check the job's requirements on this machine.

`unsupported` reads only the spec; `missing` also checks the disk, before any process starts.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from finetune_operator.api.paths import show_count, show_path
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.unbuilt import check_fields, only, unset
from finetune_operator.api.v1alpha1.job import FineTuneJob
from finetune_operator.backends.local import layout, trackers
from finetune_operator.backends.local.layout import BadUriError
from finetune_operator.backends.local.overlaps import overlaps
from finetune_operator.backends.local.render import visible_gpus
from finetune_operator.extras import DISTRIBUTION
from finetune_operator.planner import uris
from finetune_trainer.config import DATA_SUFFIXES, data_suffix, is_data_file

_LIBRARIES = ("torch", "transformers", "datasets", "accelerate", "peft", "safetensors", "psutil")
_INSTALL = f'pip install "{DISTRIBUTION}[trainer]"'

NO_EFFECT = (
    unset("model.tokenSecretRef", "remove it, and set HF_TOKEN"),
    unset("topology.instanceType"),
    only("topology.rdma", "auto"),
    only("topology.placement", "pack"),
    only("capacity", "onDemand"),
    unset("queue"),
    unset("ttlSecondsAfterFinished"),
    unset("podTemplate"),
    unset("observability.trackers[].secretRef", "remove it, and set WANDB_API_KEY or MLFLOW_*"),
)


def unsupported(job: FineTuneJob, manifest_dir: Path) -> list[Problem]:
    """Return the requests of a job that this machine can never satisfy.

    The API's own rules, and fields that no backend supports yet, are not checked again.
    """
    found = check_fields(job.to_object(), NO_EFFECT, "has no effect on this machine")
    fields = (Problem(show_path(one.path), one.message) for one in found)
    return [*_uris(job, manifest_dir), *fields]


def _uris(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    inputs = uris.inputs_of(job)
    for path, uri in (inputs | uris.outputs_of(job) | uris.starts_of(job)).items():
        if path in inputs and uris.is_on_hub(uri):
            continue
        if not uri.startswith(layout.FILE):
            may_be = "hf:// or file://" if path in inputs else "file://"
            yield Problem(path, f"{uri} cannot be used by the local backend; use {may_be}")
            continue
        try:
            layout.file_path(uri, manifest_dir)
        except BadUriError as error:
            yield Problem(path, str(error))


def missing_libraries() -> list[Problem]:
    """Return the packages to install before this machine can train, without importing them."""
    lacking = [name for name in _LIBRARIES if find_spec(name) is None]
    if not lacking:
        return []
    text = f"this machine cannot train without {', '.join(lacking)}; {_INSTALL}"
    return [Problem("", text)]


def missing(
    job: FineTuneJob,
    manifest_dir: Path,
    environ: Mapping[str, str],
    *,
    cores: int,
    gpus: Callable[[], int],
    system: str,
) -> list[Problem]:
    """Return inputs that are missing, folders that cannot be written, and excessive requests.

    Call it only for a job without errors from `unsupported`.

    Args:
        job: The job.
        manifest_dir: Folder of its manifest.
        environ: Environment of the trainer.
        cores: CPU cores that this process may use.
        gpus: Counts the GPUs.
        system: Operating system, as `platform.system` names it.
    """
    return [
        *_platform(system),
        *_model(job, manifest_dir),
        *_data(job, manifest_dir),
        *_start(job, manifest_dir),
        *_folders(job, manifest_dir),
        *_cache(environ),
        *trackers.problems(job, environ),
        *overlaps(job, manifest_dir),
        *_processors(job, environ, cores, gpus),
    ]


def usable_cores() -> int:
    """Count the CPU cores that this process may use; macOS does not limit them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def installed_gpus() -> int:
    """Count this machine's GPUs by their device files, because torch is not imported here."""
    return sum(entry.name[6:].isdigit() for entry in Path("/dev").glob("nvidia*"))


def _platform(system: str) -> Iterator[Problem]:
    if system != "Linux":
        message = f"local needs Linux (/proc, pidfd), this is {system}; use WSL or a container"
        yield Problem("spec.backend.type", message)


def _model(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    uri = job.spec.model.source
    if uris.is_on_hub(uri):
        return
    folder = layout.file_path(uri, manifest_dir)
    if not folder.is_dir():
        state = "is a file, not a folder" if folder.exists() else "does not exist"
        message = f"{uri}: {folder} {state}; name a folder written by save_pretrained"
        yield Problem("spec.model.source", message)
    elif not (folder / "config.json").is_file():
        message = f"{uri}: {folder} has no config.json; name a folder written by save_pretrained"
        yield Problem("spec.model.source", message)


def _data(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    for path, uri in uris.inputs_of(job).items():
        if path == "spec.model.source" or uris.is_on_hub(uri):
            continue
        place = layout.file_path(uri, manifest_dir)
        complaint = _complaint_about_data(place)
        if complaint:
            yield Problem(path, f"{uri}: {place} {complaint}")


def _complaint_about_data(place: Path) -> str:
    types = ", ".join(DATA_SUFFIXES)
    if not place.exists():
        return "does not exist; correct the path"
    if place.is_dir():
        if not any(is_data_file(entry.name) for entry in place.iterdir()):
            return f"holds no {types} file; add one or name another folder"
        return ""
    if data_suffix(place.name) is None:
        return f"is not one of {types}; convert it"
    if place.stat().st_size == 0:
        return "is empty; it needs at least one row"
    if not os.access(place, os.R_OK):
        return "cannot be read; change its permissions"
    return ""


def _start(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    """Check the checkpoint and the adapter that training starts from."""
    for path, uri in uris.starts_of(job).items():
        folder = layout.file_path(uri, manifest_dir)
        if path == "spec.checkpoint.resumeFrom":
            if not folder.is_dir():
                advice = "name the folder of a checkpoint (status.checkpoint.last.uri), or use auto"
                message = f"{uri}: {folder} does not exist; {advice}"
                yield Problem(path, message)
        elif not (folder / "adapter_config.json").is_file():
            message = f"{uri}: {folder} has no adapter_config.json; name the folder of an adapter"
            yield Problem(path, message)


def _folders(job: FineTuneJob, manifest_dir: Path) -> Iterator[Problem]:
    folders = layout.folders_of(job, manifest_dir)
    named = {
        "spec.backend.local.runDirectory": folders.run,
        "spec.checkpoint.uri": folders.checkpoint,
        "spec.output.uri": folders.output,
    }
    if job.spec.strategy.nvme_path is not None:
        named["spec.strategy.nvmePath"] = Path(job.spec.strategy.nvme_path)
    refused: set[Path] = set()
    for path, folder in named.items():
        complaint = _complaint_about_folder(folder)
        # The default folders are below the run directory, whose problem is reported once.
        if complaint and not refused & {folder, *folder.parents}:
            refused.add(folder)
            yield Problem(path, f"{folder} cannot be written: {complaint}; choose another folder")


def _cache(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Check the token cache, which all jobs of a user share and no field of a job names."""
    folder = layout.cache_dir(environ)
    if complaint := _complaint_about_folder(folder):
        message = (
            f"the token cache {folder} cannot be written: {complaint}; set XDG_CACHE_HOME to a "
            "folder that can be written"
        )
        yield Problem("", message)


def _complaint_about_folder(folder: Path) -> str:
    """Try to write in the folder, or in its future parent; leaves no file behind."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return f"{there}: {error.strerror}"


def _processors(
    job: FineTuneJob, environ: Mapping[str, str], cores: int, gpus: Callable[[], int]
) -> Iterator[Problem]:
    topology = job.spec.topology
    wanted = topology.nodes * topology.gpus_per_node
    if wanted:
        visible = visible_gpus(environ)
        there = gpus() if visible is None else min(gpus(), len(visible))
        if wanted > there:
            yield Problem(
                "spec.topology.gpusPerNode",
                f"{topology.gpus_per_node} on {show_count(topology.nodes, 'node')} needs "
                f"{show_count(wanted, 'GPU')}, this machine offers {there}; use fewer, or 0 to "
                "train on the CPU",
            )
        return
    processes = topology.nodes * (topology.processes_per_node or 1)
    if processes > cores:
        yield Problem(
            "spec.topology.processesPerNode",
            f"{processes} processes share {show_count(cores, 'core')} and slow each other down; "
            f"use at most {cores}",
            Severity.WARNING,
        )
