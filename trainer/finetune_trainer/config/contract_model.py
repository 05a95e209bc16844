"""Base classes of all values in the contract."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


def is_below(name: str) -> bool:
    """Whether a path in a record names a file below the folder of the record."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _below(name: str) -> str:
    if not is_below(name):
        raise ValueError(f"{name!r} is not the relative path of a file below the folder")
    return name


PathBelow = Annotated[str, AfterValidator(_below)]
"""Relative path of a file below the folder of the record that has the path."""


class ContractModel(BaseModel):
    """Frozen value with camelCase keys in JSON; refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        protected_namespaces=(),
    )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one JSON file.

        Raises:
            OSError: The file cannot be opened.
            pydantic.ValidationError: The text is not JSON, or not this model.
        """
        return cls.model_validate_json(path.read_bytes())

    def to_json(self) -> str:
        """Return JSON text for `read`: camelCase, two spaces, final newline."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


class JobRef(ContractModel):
    """Job and attempt of a run; for logs, metrics, the model card and checkpoints.

    A checkpoint belongs to the job with its `uid`; another job of the same name does not own it.
    """

    namespace: str = "default"
    name: str
    uid: str
    attempt: Annotated[int, Field(ge=1)] = 1

    @property
    def identity(self) -> str:
        """The uid, or namespace and name for a run that was started by hand without one."""
        return self.uid or f"{self.namespace}/{self.name}"
