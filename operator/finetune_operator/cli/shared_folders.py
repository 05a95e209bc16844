"""Find jobs of an `ftctl validate` that would write the same folder, which a cluster refuses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from finetune_operator.api.manifest import Manifest
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Backend, Written
from finetune_operator.backends.folder_index import FolderIndex, sentence


@dataclass(frozen=True)
class Checked:
    """A manifest without problems, its job, and the backend that would run it."""

    manifest: Manifest
    job: FineTuneJob
    backend: Backend


def shared_folders(jobs: Iterable[Checked]) -> Iterator[Problem]:
    """Yield a warning, with a line, for each folder that overlaps a folder of an earlier manifest.

    Two manifests of one name are one job: in a cluster, the manifest applied last wins.
    """
    index, seen = FolderIndex[int](), list[Checked]()
    for number, checked in enumerate(jobs):
        written = checked.backend.writes(checked.job)
        for mine in written:
            touching = sorted(index.touching(mine, besides=number), key=lambda found: found[0])
            for other, theirs in touching:
                if _name(seen[other]) != _name(checked):
                    yield _problem(checked, mine, seen[other], theirs)
                    break
        index.put(number, written)
        seen.append(checked)


def _problem(checked: Checked, mine: Written, other: Checked, theirs: Written) -> Problem:
    place = other.manifest.locate(Problem(theirs.field, ""))
    shared = sentence(mine, theirs, f"{_name(other)} in {place.file}:{place.line}")
    text = (
        f"{shared}; a folder has one writer, so the second job to start is refused; use another, "
        "such as one with {namespace} and {name} in it"
    )
    return checked.manifest.locate(Problem(mine.field, text, Severity.WARNING))


def _name(checked: Checked) -> str:
    return f"{checked.job.metadata.namespace}/{checked.job.metadata.name}"
