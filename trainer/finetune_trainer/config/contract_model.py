"""What every value of the contract is made from."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ContractModel(BaseModel):
    """A frozen value that is camelCase in JSON and refuses unknown keys."""

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
            OSError: the file cannot be opened.
            pydantic.ValidationError: the text is not JSON, or not this model.
        """
        return cls.model_validate_json(path.read_bytes())

    def to_json(self) -> str:
        """Return the JSON text that `read` takes back: camelCase, two spaces, final newline."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


class JobRef(ContractModel):
    """Which job and which attempt this is; for logs, metrics, the model card and checkpoints.

    A checkpoint belongs to the job of its `uid`: a job of the same name is another one.
    """

    namespace: str = "default"
    name: str
    uid: str
    attempt: Annotated[int, Field(ge=1)] = 1

    @property
    def identity(self) -> str:
        """The uid; namespace and name where there is none, as it was started by hand."""
        return self.uid or f"{self.namespace}/{self.name}"
