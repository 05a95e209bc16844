"""What is wrong with a configuration, in sentences; for whoever reads one."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def sentences(source: str, error: ValidationError) -> list[str]:
    """Return a sentence for each thing that is wrong with the configuration from `source`."""
    return [_sentence(source, problem) for problem in error.errors(include_url=False)]


def _sentence(source: str, problem: "ErrorDetails") -> str:
    said = problem["msg"].removeprefix("Value error, ")
    if said.startswith("spec."):  # it names its field as the user's manifest does
        return said
    return f"{'.'.join(map(str, problem['loc'])) or source}: {said}"
