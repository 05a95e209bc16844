"""The job a command is about: its manifest, its plan and the backend that runs it.

Called by the commands that take FILE; it starts nothing.
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
    """One validated job, ready to be rendered or run.

    Attributes:
        manifest: Where it was read from.
        context: The manifest's folder, this process's environment and the known profiles.
        backend: Made for that.
    """

    job: FineTuneJob
    manifest: Manifest
    plan: Plan
    context: BackendContext
    backend: Backend

    @property
    def folders(self) -> Folders:
        """Where the files of a job of the local backend are."""
        return folders_of(self.job, self.manifest.directory)

    @property
    def base_folder(self) -> Path | None:
        """The local folder of the base model; None for one on the hub."""
        source = self.job.spec.model.source
        return None if is_on_hub(source) else file_path(source, self.manifest.directory)

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Print the warnings, and raise if there is an error among `problems`.

        Raises:
            InvalidJobError: holds the errors.
        """
        _refuse(problems, self.manifest)

    def refuse_fresh(self) -> None:
        """Refuse --fresh for a job with takeOver, as they exclude each other."""
        if self.job.spec.take_over:
            message = (
                "true goes on in the folders of the job before, and --fresh moves them aside; "
                "leave out one of them"
            )
            self.refuse([Problem("spec.takeOver", message)])


def open_target(
    file: Path, backend: str | None = None, *, runs_here: bool = False, profile: Path | None = None
) -> Target:
    """Read, validate and plan the job in `file`.

    Args:
        file: The manifest; it may hold the job's FineTuneProfile as well.
        backend: Takes the place of the manifest's own.
        profile: Another file with FineTuneProfiles.
        runs_here: Refuse a backend that does not run without a cluster.

    Raises:
        InvalidJobError: the manifest is refused, by the API's rules, the planner or the backend.
        UnknownBackendError: the backend is not installed.
    """
    if backend is not None:
        registry.load(backend)  # refused by its name, before the manifest is read with it
    job, manifest = load_job(file, backend=backend, may_go_on=runs_here)
    kind = registry.load(job.spec.backend.type)
    if runs_here and not kind.runs_without_cluster:
        message = (
            f"{kind.name} does not run without a cluster; apply the manifest to one, or add "
            "--backend local to run it here"
        )
        raise InvalidJobError([manifest.locate(Problem("spec.backend.type", message))])
    profiles = profiles_of(file, profile)
    context = BackendContext(manifest.directory, dict(os.environ), profiles=profiles)
    made = kind(context)
    _refuse(made.validate(job), manifest)
    try:
        plan = make_plan(job)
    except InvalidJobError as error:
        raise InvalidJobError(map(manifest.locate, error.problems)) from error
    return Target(job=job, manifest=manifest, plan=plan, context=context, backend=made)


def known_profiles(
    manifests: Iterable[Manifest], problems: list[Problem]
) -> dict[str, FineTuneProfile]:
    """Return the usable profiles by name; what is wrong with the others is added to `problems`."""
    known = {}
    for manifest in manifests:
        if wrong := check_profile(manifest):
            problems += wrong
        else:
            made = profile_of(manifest)
            known[made.metadata.name] = made
    return known


def profiles_of(file: Path | None, more: Path | None = None) -> dict[str, FineTuneProfile]:
    """Return the profiles in a job's file and in another one, by name.

    Args:
        file: The job's manifest; None where it is not known.
        more: Holds nothing but profiles.

    Raises:
        InvalidJobError: one of them cannot be used.
    """
    found = read_manifests([str(more)]) if more is not None else Reading((), ())
    problems = errors_of(found.problems)
    # A stream can be read only once, and was, for the job.
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
