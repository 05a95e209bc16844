"""Load the job of a command: its manifest, its plan and its backend.

The commands that take FILE call it; it starts no process.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from finetune_operator.api.manifest import Manifest, Reading, read_manifests
from finetune_operator.api.manifest_files import is_stream
from finetune_operator.api.problems import (
    InvalidJobError,
    Problem,
    Severity,
    errors_of,
    raise_errors,
)
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile
from finetune_operator.api.validation import check_profile, load_job, profile_of
from finetune_operator.backends import registry
from finetune_operator.backends.base import Backend, BackendContext
from finetune_operator.backends.local.layout import Folders, file_path, folders_of
from finetune_operator.planner.plan import Plan, make_plan
from finetune_operator.planner.uris import is_on_hub

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Manifest of one FineTuneJob.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="FineTuneProfiles to use; FILE itself may hold them too."),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Use this backend, with its default settings, in place of spec.backend.",
    ),
]


@dataclass(frozen=True)
class Target:
    """A validated job, ready to be rendered or run.

    Attributes:
        manifest: Manifest of the job.
        context: The manifest's folder, this process's environment and the known profiles.
        backend: Backend in that context.
    """

    job: FineTuneJob
    manifest: Manifest
    plan: Plan
    context: BackendContext
    backend: Backend

    @property
    def folders(self) -> Folders:
        """The folders of a job of the local backend."""
        return folders_of(self.job, self.manifest.directory)

    @property
    def base_folder(self) -> Path | None:
        """The local folder of the base model; None if the model is on the hub."""
        source = self.job.spec.model.source
        return None if is_on_hub(source) else file_path(source, self.manifest.directory)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Print the warnings, and raise if `problems` contains an error.

        Raises:
            InvalidJobError: with all errors.
        """
        _refuse(problems, self.manifest)

    def refuse_fresh(self) -> None:
        """Refuse --fresh for a job with takeOver: they exclude each other."""
        if self.job.spec.take_over:
            message = (
                "true continues in the folders of the previous job, and --fresh moves them aside; "
                "leave out --fresh or takeOver"
            )
            self.refuse([Problem("spec.takeOver", message)])


def open_target(
    file: Path, backend: str | None = None, *, runs_here: bool = False, profile: Path | None = None
) -> Target:
    """Read, validate and plan the job in `file`.

    Args:
        file: The manifest; it may also hold the job's FineTuneProfile.
        backend: Backend that replaces spec.backend. Without it and spec.backend, it is local.
        profile: Another file with FineTuneProfiles.
        runs_here: Whether to refuse a backend that needs a cluster.

    Raises:
        InvalidJobError: the API's rules, the planner or the backend refuse the manifest.
        UnknownBackendError: the backend is not installed.
    """
    if backend is not None:
        registry.load(backend)  # an unknown name is refused before the manifest is read
    job, manifest = load_job(file, backend=backend, default_backend="local", may_resume=runs_here)
    kind = registry.load(job.spec.backend.type)
    if runs_here and not kind.runs_without_cluster:
        message = (
            f"{kind.name} does not run without a cluster; apply the manifest to one, or add "
            "--backend local to run it here"
        )
        raise InvalidJobError([manifest.locate(Problem("spec.backend.type", message))])
    profiles = profiles_of(file, profile)
    context = BackendContext(manifest.directory, dict(os.environ), profiles=profiles)
    instance = kind(context)
    _refuse(instance.validate(job), manifest)
    try:
        plan = make_plan(job)
    except InvalidJobError as error:
        raise InvalidJobError(map(manifest.locate, error.problems)) from error
    return Target(job=job, manifest=manifest, plan=plan, context=context, backend=instance)


def known_profiles(
    manifests: Iterable[Manifest], problems: list[Problem]
) -> dict[str, FineTuneProfile]:
    """Return the valid profiles by name; append the problems of the others to `problems`."""
    known = {}
    for manifest in manifests:
        if wrong := check_profile(manifest):
            problems += wrong
        else:
            profile = profile_of(manifest)
            known[profile.metadata.name] = profile
    return known


def profiles_of(file: Path | None, more: Path | None = None) -> dict[str, FineTuneProfile]:
    """Return the profiles of a job's file and of another file, by name.

    Args:
        file: The job's manifest; None if unknown.
        more: A file that contains only profiles.

    Raises:
        InvalidJobError: a profile is invalid.
    """
    found = read_manifests([str(more)]) if more is not None else Reading((), ())
    problems = errors_of(found.problems)
    # A stream can be read only once, and has been read for the job.
    is_readable = file is not None and not is_stream(str(file))
    beside = read_manifests([str(file)]).profiles if is_readable else ()
    known = known_profiles([*beside, *found.profiles], problems)
    raise_errors(problems)
    return known


def _refuse(problems: Iterable[Problem], manifest: Manifest) -> None:
    listed = list(map(manifest.locate, problems))
    for problem in listed:
        if problem.severity is Severity.WARNING:
            print(f"warning: {problem}", file=sys.stderr)
    raise_errors(listed)
