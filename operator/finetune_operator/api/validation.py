"""Check manifests without a cluster, for `ftctl validate` and `ftctl run`.

The steps are YAML as in kubectl, defaults, structure, rules, and unsupported values. Each step
reports all problems. Files named in a manifest are not opened.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
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
from finetune_operator.api.other_tools import entry_of
from finetune_operator.api.paths import Finding, show_path, show_value
from finetune_operator.api.problems import InvalidJobError, Problem, Severity, raise_errors
from finetune_operator.api.structural import check_structure
from finetune_operator.api.unbuilt import check_built
from finetune_operator.api.v1alpha1 import FineTuneJob, FineTuneProfile


def check_manifest(
    manifest: Manifest, *, with_unbuilt: bool = True, may_resume: bool = False
) -> list[Problem]:
    """Return all problems of a manifest.

    Args:
        manifest: The manifest.
        with_unbuilt: Also report unsupported values; otherwise the verdict matches the API
            server.
        may_resume: Omit the rules for a first attempt only, which `check_start` checks.
    """
    value = defaulted(manifest.value)
    if may_resume and isinstance(value.get("status"), dict):
        value["status"]["attempt"] = 1
    unbuilt = list(check_built(value)) if with_unbuilt else []
    findings = check_object(value, unbuilt=unbuilt)
    wrong = {finding.path for finding in findings}
    findings += [found for found in unbuilt if found.path not in wrong]
    # A placeholder stands for an unreadable value, which was already reported.
    unread = {problem.path for problem in manifest.problems}
    found = map(manifest.problem, findings)
    problems = [*manifest.problems, *(one for one in found if one.path not in unread)]
    if "status" in manifest.value:
        message = "is written by the controller; this value is ignored"
        place = manifest.line_of(("status",))
        problems.append(Problem("status", message, Severity.WARNING, manifest.file, place))
    return sorted(problems, key=lambda problem: problem.line or 0)


def check_profile(manifest: Manifest) -> list[Problem]:
    """Return all problems of a FineTuneProfile."""
    value = with_defaults(manifest.value, _profile_schema())
    findings = check_structure(value, _profile_schema())
    findings += _wrong_name(value) + check_metadata(value.get("metadata"))
    findings += check_rules(value, _profile_schema(), findings)
    return [*manifest.problems, *map(manifest.problem, findings)]


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
    """Return the profile of a manifest without problems."""
    return FineTuneProfile.model_validate(with_defaults(manifest.value, _profile_schema()))


def defaulted(value: Any) -> Any:
    """Return an object of the resource with the defaults of the CRD, including its status."""
    return with_defaults(value, _schema())


def check_object(value: Any, old: Any = None, *, unbuilt: Sequence[Finding] = ()) -> list[Finding]:
    """Return the errors of the API server for an object with its defaults.

    Args:
        value: The object to create, or the replacement of `old`.
        old: The object before an update, with its defaults; None at creation.
        unbuilt: Unsupported values. Rules that read them are omitted, because their advice would
            suggest other unsupported values.
    """
    findings = _not_in_status(check_structure(value, _schema(), entry_of=entry_of))
    findings += check_metadata(value.get("metadata"))
    before = {} if old is None else {"old": old}
    return findings + check_rules(value, _schema(), [*findings, *unbuilt], **before)


def check_start(job: FineTuneJob) -> list[Problem]:
    """Return the errors of the API server if the job were created in its current form."""
    value = {key: part for key, part in job.to_object().items() if key != "status"}
    findings = check_object(defaulted(value))
    return [Problem(show_path(finding.path), finding.message) for finding in findings]


def load_job(
    path: Path | str,
    *,
    backend: str | None = None,
    default_backend: str | None = None,
    may_resume: bool = False,
) -> tuple[FineTuneJob, Manifest]:
    """Read and check the only FineTuneJob in a file (`-` is standard input).

    Args:
        path: The file.
        backend: Replaces `spec.backend`, with the default settings of that backend.
        default_backend: The backend of a manifest that names none, instead of the cluster's.
        may_resume: Omit the rules for a first attempt only, which `check_start` checks.

    Raises:
        InvalidJobError: The file cannot be read, does not contain exactly one job, or has errors.
    """
    if is_folder(str(path)):
        raise InvalidJobError([Problem("", "is a folder; name one manifest file", file=str(path))])
    reading = read_manifests([str(path)])
    raise_errors(reading.problems)
    if len(reading.manifests) != 1:
        count = len(reading.manifests)
        raise InvalidJobError(
            [
                Problem(
                    "",
                    f"contains {count} FineTuneJobs; use a file with exactly one",
                    file=str(path),
                )
            ]
        )
    manifest = reading.manifests[0]
    if backend is None and not names_backend(manifest):
        backend = default_backend
    if backend is not None:
        manifest = with_backend(manifest, backend)
    raise_errors(check_manifest(manifest, may_resume=may_resume))
    return job_of(manifest), manifest


def job_of(manifest: Manifest) -> FineTuneJob:
    """Return the job of a manifest without problems, without its status."""
    value = {key: part for key, part in defaulted(manifest.value).items() if key != "status"}
    return FineTuneJob.model_validate(value)


@cache
def _schema() -> Schema:
    return _with_metadata(job_schema())


@cache
def _profile_schema() -> Schema:
    return _with_metadata(profile_schema())


def _with_metadata(schema: Schema) -> Schema:
    """Add metadata to the schema of a CRD, which has none because the API server checks it."""
    properties = {**schema["properties"], "metadata": OBJECT_METADATA}
    return {**schema, "properties": properties, "required": ["metadata", "spec"]}


def _not_in_status(findings: Iterable[Finding]) -> list[Finding]:
    """Drop findings in the status, except unknown fields, as the API server does."""
    return [found for found in findings if found.path[:1] != ("status",) or found.is_unknown]


def names_backend(manifest: Manifest) -> bool:
    """Whether a manifest has `spec.backend`."""
    spec = manifest.value.get("spec")
    return isinstance(spec, dict) and "backend" in spec


def with_backend(manifest: Manifest, backend: str) -> Manifest:
    """Return a manifest with another backend, which has its default settings."""
    spec = manifest.value.get("spec")
    if not isinstance(spec, dict):
        return manifest
    value = {**manifest.value, "spec": {**spec, "backend": {"type": backend}}}
    return replace(manifest, value=value)
