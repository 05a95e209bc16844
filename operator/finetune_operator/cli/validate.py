"""`ftctl validate`: print every problem of the manifests, with file, line and field."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from finetune_operator.api.manifest import Manifest, read_manifests
from finetune_operator.api.paths import show_count
from finetune_operator.api.problems import Problem, Severity, errors_of
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.api.v1alpha1.topology import KUBERNETES
from finetune_operator.api.validation import check_manifest, job_of, names_backend, with_backend
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.registry import available, load
from finetune_operator.cli.shared_folders import Checked, shared_folders
from finetune_operator.cli.target import known_profiles
from finetune_operator.errors import CatalogueError
from finetune_operator.planner.hardware import expect


class OutputFormat(StrEnum):
    """Output format of problems."""

    TEXT = "text"
    JSON = "json"


def validate(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="The same as -f FILE.")
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--filename", "-f", metavar="FILE|FOLDER|-", help="File, folder or standard input."
        ),
    ] = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="How to print.")
    ] = OutputFormat.TEXT,
) -> None:
    """Print every problem of the FineTuneJobs given, as FILE:LINE: FIELD SENTENCE.

    A job's FineTuneProfile is used if it is among the files.

    The command runs the checks of the API server and of the backend, and reports every value whose
    behaviour is not implemented yet. It opens no file that a manifest names; `ftctl run` does. The
    exit code is 1 if there is a problem.
    """
    given = [*(files or []), *(paths or [])]
    if not given:
        raise typer.BadParameter("give at least one file, folder or - for standard input")
    reading = read_manifests(given)
    problems = [*reading.problems]
    profiles = known_profiles(reading.profiles, problems)
    checked: list[Checked] = []
    for manifest in reading.manifests:
        problems += _check(_with_backend(manifest), profiles, checked)
    problems += shared_folders(checked)
    if not reading.manifests and not reading.profiles and not errors_of(problems):
        problems.append(Problem("", f"no FineTuneJob in {', '.join(given)}"))
    if output is OutputFormat.JSON:
        _print_json(reading.manifests, problems)
    else:
        _print_text(reading.manifests, problems)
    if errors_of(problems):
        raise typer.Exit(1)


def _with_backend(manifest: Manifest) -> Manifest:
    """Return a manifest with the backend to check it for, with a note if it names none.

    A file of this machine can only be read by the local backend.
    """
    if names_backend(manifest):
        return manifest
    is_local = any(value.startswith("file:") for value in _sources(manifest.value.get("spec")))
    name = "local" if is_local else KUBERNETES
    typer.echo(f"{manifest.file}: no spec.backend; checked for {name}", err=True)
    return with_backend(manifest, name)


def _sources(value: Any) -> Iterator[str]:
    """Yield the sources of data and models in a spec."""
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, str) and key.lower().endswith("source"):
                yield part
            yield from _sources(part)
    elif isinstance(value, list):
        for part in value:
            yield from _sources(part)


def _check(
    manifest: Manifest, profiles: Mapping[str, FineTuneProfile], checked: list[Checked]
) -> list[Problem]:
    """Return the problems of a job; its backend checks it only if the API accepts its fields.

    The job is appended to `checked` if its backend has checked it.
    """
    problems = check_manifest(manifest)
    if any(problem.path not in ("apiVersion", "kind") for problem in errors_of(problems)):
        return problems
    job = job_of(manifest)
    name = job.spec.backend.type
    if name not in available():
        message = f"{name} is not installed here; use {' or '.join(available())}"
        problems.append(manifest.locate(Problem("spec.backend.type", message)))
    else:
        context = BackendContext(manifest.directory, dict(os.environ), profiles=profiles)
        backend = load(name)(context)
        found = backend.validate(job)
        problems += map(manifest.locate, found)
        if not errors_of(found) and (problem := _too_large(job, backend)) is not None:
            problems.append(manifest.locate(problem))
        checked.append(Checked(manifest, job, backend))
    return problems


def _too_large(job: FineTuneJob, backend: Backend) -> Problem | None:
    """Return the problem of a job that fits on none of the GPU sizes that it may run on.

    An unknown size is only a warning, because it may be newer than the catalogue.
    """
    try:
        found = expect(job, backend.gpu_sizes(job))
    except CatalogueError as error:
        return Problem("", f"no forecast of memory: {error}", Severity.WARNING)
    if found is None or found.fits is not False or job.spec.training.check_memory is False:
        return None
    return Problem("spec.training", found.message.removeprefix("spec.training: "))


def _print_text(manifests: Sequence[Manifest], problems: Sequence[Problem]) -> None:
    for problem in problems:
        mark = "note: " if problem.severity is Severity.WARNING else ""
        typer.echo(f"{mark}{problem}")
    errors = len(errors_of(problems))
    jobs = show_count(len(manifests), "FineTuneJob")
    typer.echo(
        f"{show_count(errors, 'problem')} in {jobs}" if errors else f"{jobs} checked, no problem"
    )


def _print_json(manifests: Sequence[Manifest], problems: Sequence[Problem]) -> None:
    entries = [asdict(problem) for problem in problems]
    typer.echo(json.dumps({"jobs": len(manifests), "problems": entries}, indent=2))
