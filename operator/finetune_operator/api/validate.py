"""Check manifests without a cluster; the ladder that `ftctl validate` and `ftctl run` climb.

YAML as kubectl reads it, defaults, structure, rules, and what is not built yet. Every step reports
all it finds, and no step opens a file that a manifest names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finetune_operator.api.cel import check_rules
from finetune_operator.api.crd import job_schema, profile_schema
from finetune_operator.api.defaults import with_defaults
from finetune_operator.api.manifest import Manifest, read_manifests
from finetune_operator.api.manifest_files import is_folder
from finetune_operator.api.metadata import OBJECT_METADATA, check_metadata, is_subdomain
from finetune_operator.api.openapi import Schema
from finetune_operator.api.paths import Finding, show_path, show_value
from finetune_operator.api.problems import InvalidJobError, Problem, Severity
from finetune_operator.api.structural import check_structure
from finetune_operator.api.unbuilt import check_built
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile


@dataclass(frozen=True)
class ManifestRef:
    """Where a job was read from.

    Attributes:
        manifest: The job as it is written, with the line of every field.
    """

    manifest: Manifest

    @property
    def path(self) -> Path:
        """File it stands in."""
        return Path(self.manifest.file)

    @property
    def line(self) -> int:
        """Line it starts on, from 1."""
        return self.manifest.line

    @property
    def directory(self) -> Path:
        """Folder that `file://./x` is relative to."""
        return self.manifest.directory

    def locate(self, problem: Problem) -> Problem:
        """Return the problem of a backend or of the planner with its file and line."""
        lines = {show_path(path): line for path, line in self.manifest.lines.items()}
        path = problem.path
        while path and path not in lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return problem.at(self.manifest.file, lines.get(path, self.line))


def validate(manifests: Iterable[Manifest]) -> list[Problem]:
    """Return every problem of every manifest, in the order of their lines."""
    return [problem for manifest in manifests for problem in check_manifest(manifest)]


def check_manifest(
    manifest: Manifest, *, with_unbuilt: bool = True, may_go_on: bool = False
) -> list[Problem]:
    """Return every problem of one manifest.

    Args:
        manifest: What was read.
        with_unbuilt: Report also what is not built yet; without it the verdict is the API server's.
        may_go_on: Leave out what is asked of the first attempt only, which `check_start` asks.
    """
    value = defaulted(manifest.value)
    if may_go_on and isinstance(value.get("status"), dict):
        value["status"]["attempt"] = 1
    findings = check_object(value)
    if with_unbuilt:
        wrong = {finding.path for finding in findings}
        findings += [found for found in check_built(value) if found.path not in wrong]
    # What is said of a value that could not be read would be said of what stands in for it.
    unread = {problem.path for problem in manifest.problems}
    found = (_problem(finding, manifest) for finding in findings)
    problems = [*manifest.problems, *(one for one in found if one.path not in unread)]
    if "status" in manifest.value:
        message = "is written by the controller; what stands here is ignored"
        place = manifest.line_of(("status",))
        problems.append(Problem("status", message, Severity.WARNING, manifest.file, place))
    return sorted(problems, key=lambda problem: problem.line or 0)


def check_profile(manifest: Manifest) -> list[Problem]:
    """Return every problem of one FineTuneProfile."""
    value = with_defaults(manifest.value, _profile_schema())
    findings = check_structure(value, _profile_schema())
    findings += _wrong_name(value) + check_metadata(value.get("metadata"))
    findings += check_rules(value, _profile_schema(), findings)
    return [*manifest.problems, *(_problem(finding, manifest) for finding in findings)]


def _wrong_name(profile: Any) -> list[Finding]:
    metadata = profile.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or is_subdomain(name):
        return []
    text = (
        "cannot be a name; use lower-case letters, digits, hyphens and dots, with a letter or "
        "digit at both ends"
    )
    return [Finding(("metadata", "name"), f"{show_value(name)} {text}")]


def profile_of(manifest: Manifest) -> FineTuneProfile:
    """Return the profile a manifest without problems describes."""
    return FineTuneProfile.model_validate(with_defaults(manifest.value, _profile_schema()))


def defaulted(value: Any) -> Any:
    """Return an object of the resource with the CRD's defaults, those of its status included."""
    return with_defaults(value, _schema())


def check_object(value: Any, old: Any = None) -> list[Finding]:
    """Return what the API server would refuse in an object that has its defaults.

    Args:
        value: The object to create, or to replace `old` with.
        old: The object before an update, with its defaults; None when it is created.
    """
    findings = _not_in_status(check_structure(value, _schema()))
    findings += check_metadata(value.get("metadata"))
    if old is None:
        return findings + check_rules(value, _schema(), findings)
    return findings + check_rules(value, _schema(), findings, old)


def check_start(job: FineTuneJob) -> list[Problem]:
    """Return what the API server would refuse in a job that is created as `job` is now."""
    value = {key: part for key, part in job.to_object().items() if key != "status"}
    findings = check_object(defaulted(value))
    return [Problem(show_path(finding.path), finding.message) for finding in findings]


def load_job(
    path: Path | str, *, backend: str | None = None, may_go_on: bool = False
) -> tuple[FineTuneJob, ManifestRef]:
    """Read and check the one FineTuneJob in a file (`-` is standard input).

    Args:
        path: The file.
        backend: Takes the place of `spec.backend`, with that backend's default settings.
        may_go_on: Leave out what is asked of the first attempt only, which `check_start` asks.

    Raises:
        InvalidJobError: the file cannot be read, does not hold exactly one job, or has problems.
    """
    if is_folder(str(path)):
        raise InvalidJobError([Problem("", "is a folder; name one manifest file", file=str(path))])
    reading = read_manifests([str(path)])
    errors = _errors(reading.problems)
    if errors:
        raise InvalidJobError(errors)
    if len(reading.manifests) != 1:
        count = len(reading.manifests)
        raise InvalidJobError(
            [Problem("", f"holds {count} FineTuneJobs; give a file with one", file=str(path))]
        )
    manifest = reading.manifests[0]
    if backend is not None:
        manifest = _with_backend(manifest, backend)
    errors = _errors(check_manifest(manifest, may_go_on=may_go_on))
    if errors:
        raise InvalidJobError(errors)
    return job_of(manifest), ManifestRef(manifest)


def job_of(manifest: Manifest) -> FineTuneJob:
    """Return the job a manifest without problems describes; what it says of a status is dropped."""
    value = {key: part for key, part in defaulted(manifest.value).items() if key != "status"}
    return FineTuneJob.model_validate(value)


@cache
def _schema() -> Schema:
    """The CRD's schema with metadata, which the API server checks by itself."""
    schema = job_schema()
    schema["properties"]["metadata"] = OBJECT_METADATA
    schema["required"] = ["metadata", "spec"]
    return schema


@cache
def _profile_schema() -> Schema:
    schema = profile_schema()
    schema["properties"]["metadata"] = OBJECT_METADATA
    schema["required"] = ["metadata", "spec"]
    return schema


def _not_in_status(findings: Iterable[Finding]) -> list[Finding]:
    """The API server drops a new object's status unread, but for fields that do not exist."""
    return [found for found in findings if found.path[:1] != ("status",) or found.is_unknown]


def _problem(finding: Finding, manifest: Manifest) -> Problem:
    line = manifest.line_of(finding.path)
    return Problem(show_path(finding.path), finding.message, file=manifest.file, line=line)


def _errors(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity is Severity.ERROR]


def _with_backend(manifest: Manifest, backend: str) -> Manifest:
    spec = manifest.value.get("spec")
    if not isinstance(spec, dict):
        return manifest
    value = {**manifest.value, "spec": {**spec, "backend": {"type": backend}}}
    return Manifest(manifest.file, manifest.line, value, manifest.lines, manifest.problems)
