"""Find FineTuneJobs and FineTuneProfiles in files, folders and standard input.

`ftctl validate` and `load_job` call it. Files named in a manifest are never opened.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune_operator.api.manifest_files import (
    TOO_LARGE,
    files_below,
    is_folder,
    is_stream,
    read_bytes,
)
from finetune_operator.api.other_tools import entry_of
from finetune_operator.api.paths import FieldPath, Finding, show_path, show_value
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1 import API_VERSION, GROUP, KIND, PROFILE_KIND
from finetune_operator.api.yaml_documents import YamlDocument, read_yaml

_OBJECT_KEYS = frozenset({"apiVersion", "kind", "spec"})
_NO_KIND = f"is missing; write kind: {KIND}"


@dataclass(frozen=True)
class Manifest:
    """A FineTuneJob or FineTuneProfile as written; only its kind is checked.

    Attributes:
        file: Name of its file as the caller gave it, or `-`.
        value: The object.
        lines: Line of every field, from 1; paths start at the object.
        problems: Errors of the YAML, such as a duplicate key.
    """

    file: str
    line: int
    value: Mapping[str, Any]
    lines: Mapping[FieldPath, int]
    problems: tuple[Problem, ...] = ()

    @property
    def directory(self) -> Path:
        """Folder to which `file://./x` is relative."""
        return Path.cwd() if is_stream(self.file) else Path(self.file).absolute().parent

    def line_of(self, path: FieldPath) -> int:
        """Return the line of a field, or of its nearest parent that has a line."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return self.line

    def problem(self, finding: Finding) -> Problem:
        """Return a finding in the object as a problem with file and line."""
        line = self.line_of(finding.path)
        return Problem(show_path(finding.path), finding.message, file=self.file, line=line)

    def locate(self, problem: Problem) -> Problem:
        """Return a problem of a backend or the planner with file and line."""
        lines = {show_path(path): line for path, line in self.lines.items()}
        path = problem.path
        while path and path not in lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return replace(problem, file=self.file, line=lines.get(path, self.line))


@dataclass(frozen=True)
class Reading:
    """Manifests and problems in a list of paths.

    Attributes:
        manifests: The jobs.
        problems: Files and documents that cannot be read, and warnings about skipped ones.
        profiles: The profiles, which jobs may name.
    """

    manifests: tuple[Manifest, ...]
    problems: tuple[Problem, ...]
    profiles: tuple[Manifest, ...] = ()


def read_manifests(paths: Iterable[str]) -> Reading:
    """Read files, folders recursively, and `-` for standard input.

    Hidden folders and files of other kinds are ignored; files of a folder are read by name.
    """
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    profiles: list[Manifest] = []
    for path in paths:
        for found in _read_path(path):
            if isinstance(found, Problem):
                problems.append(found)
            elif found.value["kind"] == PROFILE_KIND:
                profiles.append(found)
            else:
                manifests.append(found)
    return Reading(tuple(manifests), tuple(problems), tuple(profiles))


def _read_path(path: str) -> Iterator[Manifest | Problem]:
    if is_stream(path) or not is_folder(path):
        yield from _read_file(path, is_from_folder=False)
        return
    for file in files_below(path):
        if isinstance(file, Problem):
            yield file
        else:
            yield from _read_file(file, is_from_folder=True)


def _read_file(file: str, is_from_folder: bool) -> Iterator[Manifest | Problem]:
    raw = read_bytes(file)
    is_json = Path(file).suffix == ".json"
    if isinstance(raw, Problem):
        # A folder of manifests may also contain data files.
        is_data = is_json and is_from_folder and raw.message == TOO_LARGE
        yield _note(f"skipped: it {raw.message}", file, None) if is_data else raw
        return
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        yield Problem("", "is not UTF-8 text", file=file, line=line)
        return
    if is_json:
        try:
            # Only the keys matter here, and Python refuses to parse thousands of digits as an int.
            value = json.loads(text, parse_int=float)
        except json.JSONDecodeError as error:
            message = f"is not JSON: {error.msg[0].lower()}{error.msg[1:]} (column {error.colno})"
            yield Problem("", message, file=file, line=error.lineno)
            return
        except RecursionError:
            yield Problem("", "is nested too deeply to be read", file=file)
            return
        if is_from_folder and not (isinstance(value, dict) and value.keys() & _OBJECT_KEYS):
            return  # settings, progress, a tokenizer: slow to parse as YAML, and not an object
        text = text.replace("\t", " ")  # whitespace in JSON, but not in YAML
    for document in read_yaml(text, file):
        if isinstance(document, Problem):
            yield document
        else:
            yield from _jobs_in(document, file, is_from_folder)


def _jobs_in(
    document: YamlDocument, file: str, is_from_folder: bool
) -> Iterator[Manifest | Problem]:
    value = document.value
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "List" and isinstance(value.get("items"), list):
        for index in range(len(value["items"])):
            yield from _jobs_in(_item(document, index), file, is_from_folder)
    elif kind is None and is_from_folder:
        yield _note("skipped: it has no kind", file, document.line)
    elif is_from_folder and _is_record(value):
        yield _note("skipped: it is the record of a job, not a manifest", file, document.line)
    elif not isinstance(value, dict):
        message = f"is {show_value(value)}, which is not a Kubernetes object"
        yield Problem("", message, file=file, line=document.line)
    else:
        yield _job_or_problem(document, value, file)


def _is_record(value: Any) -> bool:
    """Whether the value is the `job.json` of a run; runs are stored below the manifest's folder."""
    if not isinstance(value, dict) or not isinstance(value.get("metadata"), dict):
        return False
    return "status" in value and "uid" in value["metadata"]


def _item(document: YamlDocument, index: int) -> YamlDocument:
    prefix: FieldPath = ("items", index)
    lines = {path[2:]: line for path, line in document.lines.items() if path[:2] == prefix}
    problems = document.problems if index == 0 else []
    return YamlDocument(document.value["items"][index], lines[()], lines, problems)


def _job_or_problem(document: YamlDocument, value: dict[str, Any], file: str) -> Manifest | Problem:
    manifest = Manifest(file, document.line, value, document.lines, tuple(document.problems))
    kind, api_version = value.get("kind"), value.get("apiVersion")
    is_our_version = str(api_version or GROUP).partition("/")[0] == GROUP
    is_like_ours = any(key in _OBJECT_KEYS or entry_of((key,)) for key in value)
    if kind in (KIND, PROFILE_KIND) or (kind is None and is_our_version and is_like_ours):
        return _with_type(manifest)
    if kind is None:
        return Problem("kind", _NO_KIND, file=file, line=document.line)
    if api_version is not None and is_our_version:
        message = f"{show_value(kind)} is not a kind of {GROUP}; write kind: {KIND}"
        return Problem("kind", message, file=file, line=manifest.line_of(("kind",)))
    return _note(f"skipped: its kind is {kind}", file, document.line)


def _with_type(manifest: Manifest) -> Manifest:
    """Return a manifest with kind and apiVersion, and a problem for each that is missing or wrong.

    The other fields can then be checked.
    """
    kind, api_version = manifest.value.get("kind"), manifest.value.get("apiVersion")
    faults = {} if kind else {"kind": _NO_KIND}
    if api_version is None:
        faults["apiVersion"] = f"is missing; write apiVersion: {API_VERSION}"
    elif api_version != API_VERSION:
        fault = f"{show_value(api_version)} is not known"
        faults["apiVersion"] = f"{fault}; write apiVersion: {API_VERSION}"
    problems = (manifest.problem(Finding((field,), text)) for field, text in faults.items())
    value = {**manifest.value, "kind": kind or KIND, "apiVersion": API_VERSION}
    return replace(manifest, value=value, problems=(*manifest.problems, *problems))


def _note(message: str, file: str, line: int | None) -> Problem:
    return Problem("", message, Severity.WARNING, file, line)
