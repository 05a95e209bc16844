"""Describe what is wrong with a configuration, one sentence per problem."""

from typing import TYPE_CHECKING

from pydantic import ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def sentences(source: str, error: ValidationError) -> list[str]:
    """Return a sentence for each problem of the configuration from `source`."""
    return [_sentence(source, problem) for problem in error.errors(include_url=False)]


def _sentence(source: str, problem: "ErrorDetails") -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if message.startswith("spec."):  # already names the field of the user's manifest
        return message
    return f"{'.'.join(map(str, problem['loc'])) or source}: {message}"
