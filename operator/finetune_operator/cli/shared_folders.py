"""Jobs of one call that would write one folder: `ftctl validate` tells what would be refused."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from finetune_operator.api.manifest import Manifest
from finetune_operator.api.problems import Problem, Severity
from finetune_operator.api.v1alpha1 import FineTuneJob
from finetune_operator.backends.base import Backend, Written
from finetune_operator.backends.folders import FolderIndex, sentence


@dataclass(frozen=True)
class Checked:
    """A manifest in which nothing was found wrong.

    Attributes:
        manifest: Where it stands.
        job: The job.
        backend: Who would run it.
    """

    manifest: Manifest
    job: FineTuneJob
    backend: Backend


def shared_folders(jobs: Iterable[Checked]) -> Iterator[Problem]:
    """Yield a warning for each folder that touches one of an earlier manifest, with its place.

    Two manifests of one name are one job, of which the cluster has the one that was applied last.
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
    told = sentence(mine, theirs, f"{_name(other)} in {place.file}:{place.line}")
    text = (
        f"{told}; a folder has one writer, so the second job to start is refused: use another, "
        "such as one with {namespace} and {name} in it"
    )
    return checked.manifest.locate(Problem(mine.field, text, Severity.WARNING))


def _name(checked: Checked) -> str:
    return f"{checked.job.metadata.namespace}/{checked.job.metadata.name}"
