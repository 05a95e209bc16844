"""Problems of a manifest, as every check reports them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from finetune_operator.errors import ManifestError


class Severity(StrEnum):
    """An error refuses the manifest; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        path: Field it is about, such as `spec.training.epochs`; empty for the whole document.
        message: What is wrong, with the value, and what to do; does not repeat the path.
        severity: Whether the manifest is refused.
        file: The manifest, or `-` for standard input; empty when there is no file.
        line: Line in that file, from 1; None when there is none.
    """

    path: str
    message: str
    severity: Severity = Severity.ERROR
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        """`FILE:LINE: PATH MESSAGE`, with what is known."""
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.path} {self.message}" if self.path else f"{place}{self.message}"


class InvalidJobError(ManifestError):
    """A manifest has errors; `problems` holds them all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def errors_of(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that refuse their manifest."""
    return [problem for problem in problems if problem.severity is Severity.ERROR]


def raise_errors(problems: Iterable[Problem]) -> None:
    """Do nothing if all of the problems are warnings.

    Raises:
        InvalidJobError: holds the errors.
    """
    if errors := errors_of(problems):
        raise InvalidJobError(errors)
