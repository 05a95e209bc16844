"""Problems of a manifest, in the form that all checks report."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from finetune_operator.errors import ManifestError


class Severity(StrEnum):
    """Severity of a problem; a manifest is refused only for errors."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """A finding in a manifest.

    Attributes:
        path: Field, such as `spec.training.epochs`; empty for the whole document.
        message: Value, error and remedy, without the path.
        severity: Whether the manifest is refused.
        file: The manifest, or `-` for standard input; empty if there is no file.
        line: Line in that file, from 1; None if there is none.
    """

    path: str
    message: str
    severity: Severity = Severity.ERROR
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        """Return `FILE:LINE: PATH MESSAGE`, without the parts that are unknown."""
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.path} {self.message}" if self.path else f"{place}{self.message}"


class InvalidJobError(ManifestError):
    """A manifest has errors; `problems` contains all its problems."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that are errors."""
    return [problem for problem in problems if problem.severity is Severity.ERROR]


def raise_errors(problems: Iterable[Problem]) -> None:
    """Do nothing if all problems are warnings.

    Raises:
        InvalidJobError: Contains the errors.
    """
    if errors := errors_of(problems):
        raise InvalidJobError(errors)
